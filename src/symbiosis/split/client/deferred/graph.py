"""The graph behind deferred tensors: one node for each layer, norm and sum that has no values yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor

from symbiosis.split.client.autograd import LayerRef
from symbiosis.split.client.deferred.tensor import DeferredTensor, is_pending, ordinary
from symbiosis.split.client.session import ClientSession
from symbiosis.transport.messages import MAX_LAYERS
from symbiosis.types import LayerSpec, ProgramOp

MAX_RESOLVED = 4  # a layer whose own result was read this often is computed at once


class Deferral:
    """Decides for one session what is deferred. Copies of a model share it."""

    has_history: ClassVar[bool]
    """Whether its tensors take part in autograd."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.dtype = getattr(torch, session.manifest.dtype)
        self.exposing = threading.Lock()
        self.resolved: dict[LayerRef, int] = {}
        """How often a deferred result of a layer was read before its program's end."""

    def owns(self, x: Any) -> TypeGuard[DeferredTensor]:
        """Whether `x` is pending and belongs to this session."""
        return is_pending(x) and x.node.deferral is self

    def count_resolved(self, me: LayerRef) -> None:
        self.resolved[me] = self.resolved.get(me, 0) + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferral:
        return self


class Node:
    """One step from another node, or from rows that belong to this node alone.

    The node copies plain inputs, so later writes do not change its result. Its
    values are those of immediate execution: the same operations, rounded alike.
    """

    __slots__ = (
        *("addend", "deferral", "device", "dtype", "exposed", "is_used", "length"),
        *("shape", "source", "step", "value", "version_when_exposed"),
    )

    def __init__(
        self,
        deferral: Any,
        step: LayerRef | LayerSpec | ProgramOp,
        source: Node | Tensor,
        width: int,
        addend: Node | Tensor | None = None,
    ) -> None:
        """`step` is a layer, a norm (`LayerSpec`), or `ADD`/`ADD_FLOAT` of `addend`.

        A sum with float32 has the addend's dtype. It becomes a program step when it is rounded (`rounded`).
        """
        self.deferral, self.step = deferral, step
        self.shape: torch.Size = source.shape
        if width != self.shape[-1]:
            self.shape = torch.Size((*self.shape[:-1], width))
        self.dtype: torch.dtype = source.dtype if not isinstance(addend, Tensor) else addend.dtype
        self.device: torch.device = source.device
        self.source = source
        self.addend = addend
        self.value: Tensor | None = None
        """Values that other nodes read; nothing writes to them."""
        self.exposed: Tensor | None = None
        """The tensor that callers have: `value` itself, or a copy if other nodes read `value`."""
        self.length: int = (source.length if isinstance(source, Node) else 1) + (2 if isinstance(addend, Node) else 1)
        """Upper bound of the program's length up to here."""
        self.version_when_exposed = 0
        self.is_used = False
        for used in (source, addend):
            if isinstance(used, Node):
                used.is_used = True

    @property
    def is_wide(self) -> bool:
        return self.step is ProgramOp.ADD_FLOAT and self.dtype is torch.float32

    def rounded(self) -> Node:
        """A wide sum, rounded to the dtype of its rows."""
        made = type(self)(self.deferral, ProgramOp.ADD_FLOAT, self.source, self.shape[-1], self.addend)
        made.dtype = self.deferral.dtype
        return made

    @property
    def like(self) -> Node | Tensor:
        """The holder of shape, dtype and device: the exposed tensor, which its owner may have changed, or this node."""
        return self if self.exposed is None else self.exposed

    def expose(self) -> Tensor:
        """Its values as a tensor for any use."""
        if self.exposed is None:
            with ordinary():
                self._resolve()
        assert self.exposed is not None, "just resolved"
        return self.exposed

    def _resolve(self) -> None:
        """Set `value` and `exposed`."""
        if self.value is None:
            self._compute()
        assert self.value is not None, "just computed"
        with self.deferral.exposing:
            if self.exposed is None:
                exposed = self.value.clone() if self.is_used else self.value
                self.version_when_exposed, self.exposed = exposed._version, exposed

    def _compute(self) -> None:
        if isinstance(self.step, LayerRef):
            self.deferral.count_resolved(self.step)
            source = self.source
            if isinstance(source, Node) and source.value is None and (path := source.find_path()):
                (self.value,) = source.run(path, (self.step,))  # the caller reads the layer's input soon, too
                return
        if path := self.find_path():
            self.run(path, ())

    def count_writes(self) -> int:
        """How often the exposed tensor was written to."""
        return 0 if self.exposed is None else self.exposed._version - self.version_when_exposed

    def as_addend(self) -> Node | Tensor:
        """What a sum reads: current values that later writes do not change."""
        if self.exposed is not None:
            return self.exposed.clone()
        if self.value is None:
            return self
        self.is_used = True
        return self.value

    def run(self, path: Sequence[Node], heads: Sequence[LayerRef]) -> tuple[Tensor, ...]:
        """Compute this node by its `path` in one call. Returns the results of `heads`, layers that read its values."""
        program, tensors = build_program(path, ProgramOp.PUSH)
        if heads:
            program += [ProgramOp.HEADS, *[head.handle for head in heads]]
        is_norm = isinstance(self.step, LayerSpec)
        widths = [self.shape[-1]] * (2 if is_norm else 1) + [head.layer.out_width for head in heads]
        with ordinary(), torch._C._DisableFuncTorch():  # the reader's modes do not affect the values
            results = list(self.deferral.session.run_program(tuple(program), widths, tuple(tensors)))
        source = self.source
        self.value = results.pop(0)
        if is_norm:
            before = results.pop(0)
            if isinstance(source, Node) and source.value is None:
                source.value = before
        return tuple(results)

    def find_path(self) -> list[Node]:
        """The nodes that the executor must compute for this one, first to last.

        A sum whose terms have values is computed here instead. The list is empty if nothing else is left.
        """
        if self.is_wide:
            source = cast(Node, self.source)
            if source.value is None and (path := source.find_path()):
                source.run(path, ())
        path = self.pending_path()
        for done, node in enumerate(path):
            before, addend = node.source, node.addend
            if addend is None or not isinstance(before, Node) or before.value is None:
                return path[done:]
            if isinstance(addend, Node):
                addend = addend.value
            with ordinary():
                node.value = (before.value + cast(Tensor, addend)).to(node.dtype)
        return []

    def pending_path(self) -> list[Node]:
        """All nodes without values that lead here. Computes an addend first that the program cannot push."""
        path, at = [self], self.source
        while isinstance(at, Node) and at.value is None:
            path.append(at)
            at = at.source
        path.reverse()
        pushed: Node | None = None
        added = {id(node.addend) for node in path}
        for node in path:
            addend = node.addend
            if isinstance(addend, Node) and addend.value is None and addend is not pushed:
                if path := addend.find_path():
                    addend.run(path, ())
                return self.pending_path()  # shorter: the addend was part of it
            if id(node) in added:
                pushed = node
        return path

    def fits(self, steps: int) -> bool:
        """Whether one call can carry this node's program and `steps` more."""
        return self.length + steps < MAX_LAYERS

    def leads_to(self, other: Node) -> bool:
        """Whether `other` is computed from this node."""
        at: Node | Tensor = other
        while isinstance(at, Node) and at.value is None and at is not self:
            at = at.source
        return at is self and self is not other


def build_program(path: Sequence[Node], push: ProgramOp) -> tuple[list[int], list[Tensor]]:
    """The layer program of a path, and the tensors it reads. `push` stores the rows that a later node adds."""
    first = path[0].source
    start = first.value if isinstance(first, Node) else first
    assert start is not None, "the first pending node starts from values"
    tensors, program, added = [start], list[int](), {id(node.addend) for node in path}
    for node in path:
        addend = node.addend
        if addend is None:
            program.append(node.step.handle)
        elif isinstance(addend, Node) and addend.value is None:
            program.append(ProgramOp.ADD_SAVED)
        else:
            program.append(node.step.handle)
            tensors.append(addend.value if isinstance(addend, Node) else addend)  # type: ignore[arg-type]
        if id(node) in added:
            program.append(push)
    return program, tensors
