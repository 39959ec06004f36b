"""Deferral in training: from its attention to its end, a decoder layer is one call forward and one backward.

Between the two each row is computed alone: o, its adapter's delta, a sum, a norm,
the MLP, a sum. Under autograd o returns a `DeferredGradTensor`; sums with it, its norm
and the MLP's result are deferred too. The last sum ends the span: the executor
computes all of it in one call, and its gradient in another. Any other use of a
tensor of the span resolves the span: each step is computed with the history of
immediate execution, and every tensor of the span becomes a plain one in place.

A node holds copies, with their histories, of what it starts from. The last sum
runs the program only if no other tensor of the span is alive. Its two terms are
alive in the caller at that moment: reading one of them later is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms

from symbiosis.errors import BadCall
from symbiosis.split.client.autograd import LayerRef, call_layers, call_program
from symbiosis.split.client.deferred.graph import MAX_RESOLVED, Deferral, Node, build_program
from symbiosis.split.client.deferred.tensor import METADATA, DeferredTensor, is_ordinary
from symbiosis.split.client.session import ClientSession
from symbiosis.transport.messages import MAX_LAYERS
from symbiosis.types import LayerKind, LayerSpec, ProgramOp


class TrainDeferral(Deferral):
    has_history = True

    def __init__(self, session: ClientSession) -> None:
        super().__init__(session)
        self._starts: set[int] = set()
        """Handles of the layers that may start a span."""
        self.refusal_hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict({0: self._refuse_gradient})
        """Backward hooks of deferred tensors: a gradient reaches one only from a function that never read it."""

    def find_starts(self) -> None:
        """Let spans start at layers that have a norm and a block in an enclosing module."""
        specs = self.session.manifest.layers
        norms = [path for spec in specs if spec.kind is LayerKind.NORM for path in spec.paths]
        blocks = [path for spec in specs if spec.kind is LayerKind.BLOCK for path in spec.paths]
        for spec in specs:
            path = spec.paths[0]
            if spec.kind not in (LayerKind.LINEAR, LayerKind.CONV1D) or any(path.startswith(f"{block}.") for block in blocks):
                continue
            while "." in path:
                path = path.rpartition(".")[0]
                if all(any(each.startswith(f"{path}.") for each in paths) for paths in (norms, blocks)):
                    self._starts.add(spec.handle)

    def is_active(self) -> bool:
        return torch.is_grad_enabled() and is_ordinary() and not torch.compiler.is_compiling()

    def start(self, me: LayerRef, x: Tensor) -> DeferredGradTensor | None:
        """The layer's deferred result, which starts a span, or None if it must be computed now."""
        if not self.session.defer_training or type(x) is not Tensor or x.dtype is not self.dtype or x.numel() == 0:
            return None
        if me.layer.handle not in self._starts or self.resolved.get(me, 0) >= MAX_RESOLVED:
            return None
        # Hooks on saved tensors (checkpoints use them) may count them, and again when they recompute: both counts must match.
        if not self.is_active() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        return DeferredGradTensor(GradNode(self, me, x.clone(), me.layer.out_width))

    def can_defer(self, x: DeferredTensor) -> bool:
        """Whether the span may continue from `x`: a sum of an open span, or its start."""
        node: GradNode = x.node
        is_sum = node.addend is not None or node.step is node.span.start
        return is_sum and not (node.span.is_resolved or node.span.is_ended) and self.is_active()

    def defer_block(self, me: LayerRef, x: DeferredTensor) -> DeferredGradTensor | None:
        """The block's deferred result if `x` is that of a span's norm, else None."""
        if not self.owns(x) or not isinstance(x.node.step, LayerSpec) or x.shape[-1] != me.layer.in_width:
            return None
        if x.node.span.is_resolved or not self.is_active():
            return None
        return DeferredGradTensor(GradNode(self, me, x.node, me.layer.out_width))

    def end(self, block: GradNode, total: GradNode) -> Tensor | None:
        """The sum of a span's block and the sum before its norm, in one call. None if these are not its two terms,
        or if another tensor of the span is alive.
        """
        if not isinstance(block.step, LayerRef) or block.step.layer.kind is not LayerKind.BLOCK:
            return None
        normed, span, held = cast(GradNode, block.source), block.span, total.holder()
        if normed.source is not total or held is None or not self.can_defer(held) or block.shape != total.shape:
            return None
        if any(node.holder() is not None for node in span.alive() if node is not total and node is not block):
            return None
        last = Node(self, ProgramOp.ADD, block, block.shape[-1], total)
        program, rows = build_program(last.pending_path(), ProgramOp.SAVE)
        if len(program) > MAX_LAYERS:
            return None
        span.is_ended = True
        return call_program(self.session, tuple(program), tuple(rows), total.shape[-1])

    def refuse(self, what: str) -> NoReturn:
        """Raise where a history would be lost without notice."""
        self.session.defer_training = False
        raise BadCall(
            f"a tensor inside of a layer was {what}. deferred execution is now off for this session: call zero_grad() and run "
            "the step again. If this happens always, set model.symbiosis.defer_training = False before the first step"
        )

    def _refuse_gradient(self, _: Tensor) -> None:
        self.refuse("passed to an autograd function that did not read it, and returned a gradient for it")


class _Span:
    """The deferred steps of one layer. Reading one of its tensors computes all of them, before any write."""

    def __init__(self, deferral: TrainDeferral, start: LayerRef) -> None:
        self.deferral, self.start = deferral, start
        self.nodes: list[weakref.ref[GradNode]] = []
        self.is_resolved = False
        self.is_ended = False
        self.resolving = threading.RLock()

    def alive(self) -> list[GradNode]:
        """First to last: the nodes of tensors that are still referenced, and what leads to them."""
        return [node for node in [each() for each in self.nodes] if node is not None]

    def resolve(self) -> None:
        if not torch._C._is_fwd_grad_enabled():
            self.deferral.refuse("passed to an autograd function before its values existed")
        nodes = self.alive()
        if self.is_ended and any(node.requires_grad for node in nodes):
            self.deferral.refuse("stored, and read after the layer's end was computed without it")
        for node in nodes:
            node.check_unsaved()
        self.deferral.count_resolved(self.start)
        self.is_resolved = True
        # The reader's modes affect neither the values nor their history.
        no_autocast = torch.autocast(nodes[0].device.type, enabled=False)
        with torch.enable_grad(), outside_transforms(), _no_saved_tensor_hooks(), no_autocast:
            for node in nodes:
                if node.value is None:
                    node.become_plain(node.compute())


class GradNode(Node):
    """A step of a span, with the history of immediate execution once it is computed."""

    __slots__ = ("__weakref__", "holder", "norm_forward", "requires_grad", "span")

    span: _Span
    holder: Callable[[], DeferredGradTensor | None]
    """The deferred tensor of this node, while it is alive."""
    norm_forward: Callable[[Tensor], Tensor]
    """Of a norm's node: the tenant's own forward."""

    def __init__(self, deferral: TrainDeferral, step: Any, source: Any, width: int, addend: Any = None) -> None:
        super().__init__(deferral, step, source, width, addend)
        self.requires_grad: bool = source.requires_grad or (addend is not None and addend.requires_grad)
        self.span = source.span if isinstance(source, GradNode) else _Span(deferral, step)
        self.holder = lambda: None
        self.span.nodes.append(weakref.ref(self))

    def _resolve(self) -> None:
        with self.span.resolving:
            if self.value is None:
                self.span.resolve()

    def check_unsaved(self) -> None:
        """Raise `BadCall` if C++ code holds the tensor's implementation, which never gets values."""
        held = self.holder()
        if self.value is None and held is not None:
            with torch._C.DisableTorchFunctionSubclass():
                count = held._use_count()  # type: ignore[attr-defined]
            if count > 1:
                self.deferral.refuse("saved by an autograd function or a checkpoint before its values existed")

    def become_plain(self, value: Tensor) -> None:
        """Make the deferred tensor a plain one: neither Python nor C++ code can tell the difference."""
        held = self.holder()
        if held is not None:
            torch._C._swap_tensor_impl(held, value)
            held.__dict__.pop("node")
            held.__class__ = Tensor  # type: ignore[assignment]
            held._backward_hooks = None  # the refusal belongs to the Python object, not to the implementation
        self.value = self.exposed = value if held is None else held

    def compute(self) -> Tensor:
        """The result of this step alone."""
        x = self.source.expose() if isinstance(self.source, Node) else self.source
        if self.addend is not None:
            return (x + cast(Tensor, self.addend)).to(self.dtype)
        if isinstance(self.step, LayerRef):
            return call_layers(self.deferral.session, (self.step,), x)[0]
        return self.norm_forward(x)


class DeferredGradTensor(DeferredTensor):
    """A tensor of a span. Once read, it has its values and the history of immediate execution."""

    node: GradNode
    known: ClassVar[set[Any]] = METADATA

    @staticmethod
    def __new__(cls: Any, node: GradNode) -> DeferredGradTensor:
        made = cast(DeferredGradTensor, DeferredTensor.__new__(cls, node, requires_grad=node.requires_grad))
        node.holder = weakref.ref(made)
        if node.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made._backward_hooks = node.deferral.refusal_hooks
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        deferred = next(each for each in (*args, *(kwargs or {}).values()) if type(each) is DeferredGradTensor)
        deferred.node.deferral.refuse("passed to an autograd function, or to an extension, before its values existed")


@contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """Suspend hooks on saved tensors: immediate execution saved these tensors before the hooks were set."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
