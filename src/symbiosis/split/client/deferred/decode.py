"""Fewer calls in decoding: results that are computed when somebody looks at them, with all that led there in one call.

From the attention of one layer to that of the next, every row goes its way
alone: o, its adapter's change, a sum, a norm, the MLP, a sum, a norm, q, k and
v. A layer that is called without gradients gives a `DeferredTensor`: a tensor that
knows how it comes about. Sums with it and norms of it are promises too. Whatever
else is done with one needs its numbers: then the executor computes the whole
way in one call onward.

A promise holds copies of what it starts from, so nobody can change what it
will be; and that is what it would have been at once: the same operations in
the same order, rounded alike.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from symbiosis.split.client.deferred.tensor import (
    FACTS,
    HALVES,
    SUMS,
    LazyTensor,
    changes_nothing,
    is_ordinary,
    ordinary,
    plain,
)
from symbiosis.split.client.session import ClientSession
from symbiosis.transport.messages import MAX_LAYERS
from symbiosis.types import WITH_BIAS, LayerSpec, ProgramOp

_ROWS = 512  # more take longer than their ways
_FEW = 8  # rows that come again in any shape: a token, or a few drafts of one
_TRIES = 4  # a layer whose promise was looked at so often at once is computed at once
_FACTS = {
    *FACTS,
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")),
    Tensor.is_inference,
}


class LayerRef:
    """A layer as it is called: with the executor's bias or without. `Groups` makes one of each."""

    __slots__ = ("handle", "layer", "with_bias")

    def __init__(self, layer: LayerSpec, *, with_bias: bool) -> None:
        self.layer, self.with_bias = layer, with_bias
        self.handle = layer.handle | (WITH_BIAS * with_bias)


class DecodeDeferral:
    """Makes a session's promises, where they are worth it."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.dtype = getattr(torch, session.manifest.dtype)
        self._broken: dict[LayerRef, int] = {}
        self.publishing = threading.Lock()

    def can(self, x: Tensor) -> bool:
        """Whether what becomes of these rows may be promised."""
        if not _may_promise():
            return False
        like = x.node.like if type(x) is DeferredTensor else x
        if like.dtype is not self.dtype:  # in other dtypes than the executor's, its sums are rounded otherwise
            return False
        if isinstance(like, Node):
            return True  # as what led there could, which has the same rows
        return is_worth_it(like.shape, on_gpu=like.device.type == "cuda") and not like.is_inference()

    def can_layer(self, me: LayerRef, x: Tensor) -> bool:
        return self._broken.get(me, 0) < _TRIES and self.can(x) and (not self.made(x) or x.node.fits(1))

    def made(self, x: Any) -> TypeGuard[DeferredTensor]:
        """Whether this is a promise of this session's, of which more may be made."""
        return is_pending(x) and x.node.promises is self

    def layer(self, me: LayerRef, x: Tensor) -> DeferredTensor:
        """What a layer makes of `x`."""
        source = x.node if self.made(x) else plain(x).clone()
        return DeferredTensor(Node(self, me, source, me.layer.out_width))

    def norm(self, norm: LayerSpec, x: DeferredTensor) -> DeferredTensor:
        """What the executor's norm makes of a promise that is pending."""
        return DeferredTensor(Node(self, norm, x.node, norm.out_width))

    def note_broken(self, me: LayerRef) -> None:
        """Somebody looked at a layer's own result."""
        self._broken[me] = self._broken.get(me, 0) + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeDeferral:
        return self


class Node:
    """How a tensor comes about: by a step from another node, or from rows that nobody else has."""

    __slots__ = (
        *("promises", "step", "shape", "dtype", "device", "value", "is_used"),
        *("_source", "_addend", "_public", "_published", "_length"),
    )

    def __init__(
        self,
        promises: DecodeDeferral,
        step: LayerRef | LayerSpec | ProgramOp,
        source: Node | Tensor,
        width: int,
        addend: Node | Tensor | None = None,
    ) -> None:
        """A step is a layer, a norm, or that something is added.

        A sum with float32 has the addend's dtype, and is a step only when it is rounded (`rounded`).
        """
        self.promises, self.step = promises, step
        self.shape: torch.Size = source.shape
        if width != self.shape[-1]:
            self.shape = torch.Size((*self.shape[:-1], width))
        self.dtype: torch.dtype = source.dtype if not isinstance(addend, Tensor) else addend.dtype
        self.device: torch.device = source.device
        self._source = source
        self._addend = addend
        self.value: Tensor | None = None
        """Its numbers once they are computed, and"""
        self._public: Tensor | None = None
        """those that others have got: the same, or a copy if other nodes count on these."""
        self._length: int = (source._length if isinstance(source, Node) else 1) + (2 if isinstance(addend, Node) else 1)
        """At most so many words are what leads here, and a `HEADS` after it."""
        self._published = 0
        self.is_used = False
        for used in (source, addend):
            if isinstance(used, Node):
                used.is_used = True

    @property
    def is_wide(self) -> bool:
        return self.step is ProgramOp.ADD_FLOAT and self.dtype is torch.float32

    def rounded(self) -> Node:
        """A wide sum in the dtype of its rows."""
        made = Node(self.promises, ProgramOp.ADD_FLOAT, self._source, self.shape[-1], self._addend)
        made.dtype = self._source.dtype
        return made

    @property
    def like(self) -> Node | Tensor:
        """What knows its shape, dtype and device: its numbers, where others have them and may have changed them."""
        return self if self._public is None else self._public

    @property
    def is_public(self) -> bool:
        return self._public is not None

    def public(self) -> Tensor:
        """Its numbers, for whatever somebody does with them."""
        if self._public is None:
            with ordinary():
                self._publish()
        assert self._public is not None, "just published"
        return self._public

    def _publish(self) -> None:
        if self.value is None:
            self._look()
        assert self.value is not None, "just computed"
        with self.promises.publishing:
            if self._public is None:
                public = self.value.clone() if self.is_used else self.value
                self._published, self._public = public._version, public

    def _look(self) -> None:
        if isinstance(self.step, LayerRef):
            self.promises.note_broken(self.step)
            source = self._source
            if isinstance(source, Node) and source.value is None and (way := source.way()):
                (self.value,) = source.compute(way, (self.step,))  # what it reads will be wanted too
                return
        if way := self.way():
            self.compute(way, ())

    def writes(self) -> int:
        """How often others have written to its numbers."""
        return 0 if self._public is None else self._public._version - self._published

    def as_it_is(self) -> Tensor:
        """Its numbers as they are now, whatever somebody does with them later. They must be there."""
        if self._public is not None:
            return self._public.clone()
        assert self.value is not None, "whoever asks has looked"
        self.is_used = True
        return self.value

    def compute(self, way: Sequence[Node], readers: Sequence[LayerRef]) -> tuple[Tensor, ...]:
        """Its numbers, by its `way`; the results are those of layers that read them."""
        first = way[0]._source
        start = first.value if isinstance(first, Node) else first
        assert start is not None, "the first that is to be computed has what it starts from"
        tensors, program, added = [start], list[int](), {id(node._addend) for node in way}
        for node in way:
            addend = node._addend
            if addend is None:
                program.append(node.step.handle)
            elif isinstance(addend, Node) and addend.value is None:
                program.append(ProgramOp.ADD_SAVED)
            else:
                program.append(node.step.handle)
                tensors.append(addend.value if isinstance(addend, Node) else addend)  # type: ignore[arg-type]
            if id(node) in added:
                program.append(ProgramOp.PUSH)
        if readers:
            program += [ProgramOp.HEADS, *[reader.handle for reader in readers]]
        is_norm = isinstance(self.step, LayerSpec)
        widths = [self.shape[-1]] * (2 if is_norm else 1) + [reader.layer.out_width for reader in readers]
        with ordinary(), torch._C._DisableFuncTorch():  # whoever looks, and from where, has no part in the numbers
            results = list(self.promises.session.onward(tuple(program), widths, tuple(tensors)))
        source = self._source
        self.value = results.pop(0)
        if is_norm:
            before = results.pop(0)
            if isinstance(source, Node) and source.value is None:
                source.value = before
        return tuple(results)

    def way(self) -> list[Node]:
        """What the executor is to compute for this, first to last: what needs none, since what it is added to is there, is
        added here. Nothing is left if that was all.
        """
        if self.is_wide:
            source = cast(Node, self._source)
            if source.value is None and (way := source.way()):
                source.compute(way, ())
        path = self._path()
        for done, node in enumerate(path):
            before, addend = node._source, node._addend
            if addend is None or not isinstance(before, Node) or before.value is None:
                return path[done:]
            if isinstance(addend, Node):
                addend = addend.value
            with ordinary():
                node.value = (before.value + cast(Tensor, addend)).to(node.dtype)
        return []

    def _path(self) -> list[Node]:
        """All that has no numbers yet and leads here. What is added, and cannot be kept on the way, is computed before."""
        path, at = [self], self._source
        while isinstance(at, Node) and at.value is None:
            path.append(at)
            at = at._source
        path.reverse()
        kept: Node | None = None
        added = {id(node._addend) for node in path}
        for node in path:
            addend = node._addend
            if isinstance(addend, Node) and addend.value is None and addend is not kept:
                if way := addend.way():
                    addend.compute(way, ())
                return self._path()  # shorter, since that was on the way
            if id(node) in added:
                kept = node
        return path

    def fits(self, steps: int) -> bool:
        """Whether so many steps more can be computed in one call with this one."""
        return self._length + steps < MAX_LAYERS

    def leads_to(self, other: Node) -> bool:
        """Whether this is on the way to another, before it."""
        at: Node | Tensor = other
        while isinstance(at, Node) and at.value is None and at is not self:
            at = at._source
        return at is self and self is not other


class DeferredTensor(LazyTensor):
    """A tensor that is computed when somebody looks at its numbers."""

    node: Node

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and func in _FACTS and not args[0].node.is_public:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in SUMS and len(args) == 2 and not kwargs:
            total = _sum(*args)
            if total is not None:
                return total
        if args and is_pending(args[0]) and changes_nothing(func, args, kwargs):
            return args[0]
        if func is Tensor.to and _rounds(*args, **kwargs):
            return DeferredTensor(args[0].node.rounded())
        return func(*plain(args), **plain(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*plain(args), **plain(kwargs or {}))


def _may_promise() -> bool:
    """Whether tensors are nothing but their numbers here and now, and are computed with as they are."""
    return not torch.is_grad_enabled() and is_ordinary()


def is_worth_it(shape: torch.Size, *, on_gpu: bool) -> bool:
    """Whether one call for a long way is better than several for so many rows.

    On a GPU it is one launch once it has come a few times, as it does when
    sequences go on by one token each. The many kernels of one that comes once, such as a
    prompt's, are in the way of the tenant's own.
    """
    rows = math.prod(shape[:-1])
    if not 0 < rows <= _ROWS or shape[-1] == 0:
        return False
    return not on_gpu or rows <= _FEW or (len(shape) > 2 and shape[-2] == 1)


def is_pending(x: Any) -> TypeGuard[DeferredTensor]:
    """Whether this is a promise that nobody has looked at, and of which more may be made."""
    return type(x) is DeferredTensor and x.node.value is None and not x.node.is_wide


def _sum(one: Any, other: Any) -> DeferredTensor | None:
    """The sum as a promise, if it can be one. Of two that are pending one has to lead to the other."""
    if not is_pending(one) or (is_pending(other) and one.node.leads_to(other.node)):
        one, other = other, one
    if not is_pending(one) or type(other) not in (Tensor, DeferredTensor):
        return None
    promises = one.node.promises
    if (
        type(other) is DeferredTensor
        and other.node.value is None
        and not (promises.made(other) and other.node.leads_to(one.node))
    ):
        other = plain(other)
    if not is_pending(one) or not promises.can(one) or not one.node.fits(2):
        return None
    if one.shape != other.shape or one.device != other.device or (type(other) is Tensor and other.layout is not torch.strided):
        return None
    if other.dtype is not one.dtype:  # adapters in float32 beside a model in half of it
        if other.dtype is not torch.float32 or one.dtype not in HALVES or type(other) is DeferredTensor or other.is_inference():
            return None
        return DeferredTensor(Node(promises, ProgramOp.ADD_FLOAT, one.node, one.shape[-1], other.clone()))
    if not is_pending(other) and not promises.can(other):
        return None
    return DeferredTensor(Node(promises, ProgramOp.ADD, one.node, one.shape[-1], _addend(other)))


def _addend(x: Tensor) -> Node | Tensor:
    """What a sum may count on, whatever becomes of `x`."""
    if type(x) is not DeferredTensor:
        return x.clone()
    return x.node if x.node.value is None else x.node.as_it_is()


def _rounds(x: Any, dtype: Any = None, *more: Any, **named: Any) -> bool:
    """Whether this rounds a wide sum, that nobody has looked at, to the dtype of its rows."""
    if type(x) is not DeferredTensor or more or named or not x.node.is_wide or x.node.value is not None:
        return False
    return dtype is x.node.promises.dtype and not torch.is_grad_enabled()
