"""Fewer calls in training: half a layer, from its attention to its end, is one call forward and one backward.

Between the two every row goes its way alone: o, its adapter's change, a sum, a
norm, the MLP, a sum. Under autograd o gives a tensor that comes `DeferredGradTensor`; sums
with it, its norm and what the MLP makes of that come late too. The last sum is
what the layer gives: there the executor computes all of it in one call, and
all of its gradient in another. Whatever else is done with one of them before
needs its numbers: then each step is computed as if it never had been late, with
the history it would have had, and whoever has one of them has a plain tensor.

What comes late holds copies (and their histories) of what it starts from. What
lies between its start and its end is left out of the history only if nobody has
it any more; of the two parts of the last sum, which its caller has, that is not
known: who looks at one of them later is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch.nn import functional as F

from symbiosis.errors import BadCall
from symbiosis.split.client.autograd import call_block, call_half, call_matrices
from symbiosis.split.client.deferred.decode import LayerRef
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
from symbiosis.types import LayerKind, LayerSpec, ProgramOp

_TRIES = 4  # a layer after which something else came so often is computed at once


class TrainDeferral:
    """Makes what comes late in one session, where it is worth it."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.dtype = getattr(torch, session.manifest.dtype)
        self._broken: dict[LayerRef, int] = {}
        self._first: set[int] = set()
        """The layers with which a half may begin."""
        self.astray: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict({0: self._refuse_gradient})
        """What torch is to do with a gradient of what came late: whoever gives one never looked at it."""

    def find(self) -> None:
        """Let halves begin with layers that have norms and blocks beside them."""
        specs = self.session.manifest.layers
        norms = [path for spec in specs if spec.kind is LayerKind.NORM for path in spec.paths]
        blocks = [path for spec in specs if spec.kind is LayerKind.BLOCK for path in spec.paths]
        for spec in specs:
            if spec.kind not in (LayerKind.LINEAR, LayerKind.CONV1D) or any(_is_in(spec.paths[0], block) for block in blocks):
                continue
            if any(_has(at, norms) and _has(at, blocks) for at in _around(spec.paths[0])):
                self._first.add(spec.handle)

    def can_begin(self, me: LayerRef, x: Tensor) -> bool:
        """Whether half a layer may begin with what `me` makes of these rows."""
        if not self.session.computes_late or type(x) is not Tensor:
            return False
        if me.layer.handle not in self._first or self._broken.get(me, 0) >= _TRIES:
            return False
        # Whoever packs what is saved for gradients (checkpoints do) may count it, and count again: then nothing may depend on
        # who looks.
        if not _is_usual() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        return x.dtype is self.dtype and x.numel() > 0

    def begin(self, me: LayerRef, x: Tensor) -> DeferredGradTensor:
        return DeferredGradTensor(_Start(_Half(self, me), x.clone()))

    def can_norm(self, x: Any, norm: LayerSpec) -> TypeGuard[DeferredGradTensor]:
        return type(x) is DeferredGradTensor and _is_open(x.node) and x.shape[-1] == norm.in_width

    def norm(self, x: DeferredGradTensor, norm: LayerSpec, compute: Callable[[Tensor], Tensor]) -> DeferredGradTensor:
        """What the executor's norm makes of a sum; `compute` is the tenant's own."""
        return DeferredGradTensor(_Normed(cast(_Sum, x.node), norm, compute))

    def can_block(self, x: DeferredGradTensor, block: LayerSpec) -> bool:
        return type(x.node) is _Normed and not x.node.half.is_seen and x.shape[-1] == block.in_width and _is_usual()

    def block(self, x: DeferredGradTensor, block: LayerSpec) -> DeferredGradTensor:
        return DeferredGradTensor(_Made(cast(_Normed, x.node), block))

    def note_broken(self, me: LayerRef) -> None:
        """Somebody looked at what came late."""
        self._broken[me] = self._broken.get(me, 0) + 1

    def refuse(self, what: str) -> NoReturn:
        """Where a history would be lost, which nobody would notice."""
        self.session.computes_late = False
        raise BadCall(
            f"a tensor inside of a layer was {what}. From now on this session computes them at once: repeat the step, with its "
            "gradients at zero. Where that always happens, set model.symbiosis.computes_late = False before the first step"
        )

    def _refuse_gradient(self, _: Tensor) -> None:
        self.refuse("given to a function of autograd's that did not look at it, and has given it a gradient")

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainDeferral:
        return self


def _is_usual() -> bool:
    return torch.is_grad_enabled() and is_ordinary() and not torch.compiler.is_compiling()


def _is_in(path: str, module: str) -> bool:
    return path.startswith(f"{module}.")


def _has(module: str, paths: list[str]) -> bool:
    return any(_is_in(path, module) for path in paths)


def _around(path: str) -> Iterator[str]:
    """The modules around this one, from the inside."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


class _Half:
    """What has come late of half a layer so far. Once somebody looks at any of it, all of it is computed: before a write."""

    def __init__(self, halves: TrainDeferral, me: LayerRef) -> None:
        self.halves, self.me = halves, me
        self._nodes: list[weakref.ref[_Node]] = []
        self.is_seen = False
        self.is_over = False
        self.looking = threading.RLock()

    def add(self, node: _Node) -> None:
        self._nodes.append(weakref.ref(node))

    def alive(self) -> list[_Node]:
        """First to last: what others still have, and what led there."""
        return [node for node in [each() for each in self._nodes] if node is not None]

    def look(self) -> None:
        if not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()):
            self.halves.refuse("given to a function of autograd's before its numbers were there")
        nodes = self.alive()
        if self.is_over and any(node.requires_grad for node in nodes):
            self.halves.refuse("kept, and looked at after the layer's end was computed without it")
        for node in nodes:
            node.check_unsaved()
        self.halves.note_broken(self.me)
        self.is_seen = True
        # whoever looks, and from where, has no part in the numbers, nor in their history
        uncast = torch.autocast(nodes[0].device.type, enabled=False)
        with ordinary(), torch.enable_grad(), outside_transforms(), _unpacked(), uncast:
            for node in nodes:
                if node.value is None:
                    node.become_plain(node.compute())


class _Node:
    """How a tensor comes about by one step."""

    def __init__(self, half: _Half, like: Tensor | _Node, width: int) -> None:
        self.half = half
        self.shape: torch.Size = torch.Size((*like.shape[:-1], width))
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        self.requires_grad: bool = like.requires_grad
        self.holder: Callable[[], Tensor | None] = lambda: None
        """The tensor that others have."""
        self.value: Tensor | None = None
        """Its numbers, once somebody has looked."""
        half.add(self)

    @property
    def like(self) -> Tensor | _Node:
        return self if self.value is None else self.value

    def public(self) -> Tensor:
        with self.half.looking:
            if self.value is None:
                self.half.look()
            assert self.value is not None, "just computed"
            return self.value

    def check_unsaved(self) -> None:
        """Raise `BadCall` if somebody has kept what is below the tensor that others have: it would never have numbers."""
        held = self.holder()
        if self.value is None and held is not None:
            with torch._C.DisableTorchFunctionSubclass():
                count = held._use_count()  # type: ignore[attr-defined]
            if count > 1:
                self.half.halves.refuse("saved by a function of autograd's, or by a checkpoint, before its numbers were there")

    def become_plain(self, value: Tensor) -> None:
        """Make a plain tensor of what others have: no function, and nothing below torch's functions, can tell it from one."""
        held = self.holder()
        if held is not None:
            torch._C._swap_tensor_impl(held, value)
            held.__dict__.pop("node")
            held.__class__ = Tensor
            held._backward_hooks = None  # the refusal, which belongs to the tensor, not to what is below it
        self.value = value if held is None else held

    def compute(self) -> Tensor:
        """With the history it would have had at once."""
        raise NotImplementedError


class _Sum(_Node):
    """What a matrix makes of rows, and what is added to it."""

    def is_narrow(self) -> bool:
        """Whether it is in the executor's dtype."""
        return self.dtype is self.half.halves.dtype


class _Start(_Sum):
    def __init__(self, half: _Half, x: Tensor) -> None:
        super().__init__(half, x, half.me.layer.out_width)
        self.x = x

    def compute(self) -> Tensor:
        me = self.half.me
        return call_matrices(self.half.halves.session, (me.layer,), self.x, (me.with_bias,))[0]


class _Added(_Sum):
    """With an addend in float32 the sum is too, until it is rounded."""

    def __init__(self, source: _Sum, addend: Tensor, dtype: torch.dtype) -> None:
        super().__init__(source.half, source, source.shape[-1])
        self.source, self.addend, self.dtype = source, addend, dtype
        self.requires_grad = source.requires_grad or addend.requires_grad

    @property
    def turn(self) -> ProgramOp:
        return ProgramOp.ADD if self.addend.dtype is self.half.halves.dtype else ProgramOp.ADD_FLOAT

    def rounded(self) -> _Added:
        return _Added(self.source, self.addend, self.half.halves.dtype)

    def compute(self) -> Tensor:
        return (self.source.public() + self.addend).to(self.dtype)


class _Normed(_Node):
    """What a norm makes of the sum."""

    def __init__(self, source: _Sum, norm: LayerSpec, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source.half, source, norm.out_width)
        self.source, self.norm, self._compute = source, norm, compute

    def compute(self) -> Tensor:
        return self._compute(self.source.public())


class _Made(_Node):
    """What a block makes of that."""

    def __init__(self, source: _Normed, block: LayerSpec) -> None:
        super().__init__(source.half, source, block.out_width)
        self.source, self.block = source, block

    def compute(self) -> Tensor:
        return call_block(self.half.halves.session, self.block, self.source.public())


class DeferredGradTensor(LazyTensor):
    """A tensor inside of a layer that is computed when somebody looks at it, with the history it would have had."""

    node: _Node

    @staticmethod
    def __new__(cls: Any, node: _Node) -> DeferredGradTensor:
        made = cast(DeferredGradTensor, LazyTensor.__new__(cls, node, requires_grad=node.requires_grad))
        node.holder = weakref.ref(made)
        if node.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made._backward_hooks = node.half.halves.astray
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, x = kwargs or {}, args[0] if args else None
        if func in SUMS and len(args) == 2 and not kwargs:
            total = _sum(*args)
            if total is not None:
                return total
        if type(x) is DeferredGradTensor and x.node.value is None:
            if func in FACTS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is not F.dropout and changes_nothing(func, args, kwargs):
                return x  # of a dropout that does nothing others would have the very same
            if func is Tensor.to and len(args) == 2 and not kwargs and _is_rounded_by(x.node, args[1]):
                return DeferredGradTensor(cast(_Added, x.node).rounded())
        return func(*plain(args), **plain(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        late = next(each for each in (*args, *(kwargs or {}).values()) if type(each) is DeferredGradTensor)
        late.node.half.halves.refuse("given to a function of autograd's, or to an extension, before its numbers were there")


@contextmanager
def _unpacked() -> Iterator[None]:
    """Nobody packs what is saved for gradients in here: it is saved where it would have been, before anybody did."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _is_open(node: _Node) -> bool:
    """Whether half a layer may go on from this: a sum as the executor would have it, at which nobody has looked."""
    return isinstance(node, _Sum) and node.is_narrow() and not (node.half.is_seen or node.half.is_over) and _is_usual()


def _is_rounded_by(node: _Node, dtype: Any) -> bool:
    """Whether this rounds a sum in float32 to what it would have been without the adapter."""
    if type(node) is not _Added or node.is_narrow() or node.half.is_seen:
        return False
    return dtype is node.half.halves.dtype and _is_usual()


def _sum(one: Any, other: Any) -> Tensor | None:
    """The sum as a tensor that comes late, or the end of half a layer; None if it is any other."""
    if type(one) is DeferredGradTensor and type(other) is DeferredGradTensor:
        return _end(one.node, other.node) if type(other.node) is _Made else _end(other.node, one.node)
    late, addend = (one, other) if type(one) is DeferredGradTensor else (other, one)
    node: _Node = late.node
    if type(addend) is not Tensor or not _is_open(node):
        return None
    if addend.shape != node.shape or addend.device != node.device or addend.layout is not torch.strided:
        return None
    if addend.dtype is node.dtype or (addend.dtype is torch.float32 and node.dtype in HALVES):
        return DeferredGradTensor(_Added(cast(_Sum, node), addend.clone(), addend.dtype))
    return None


def _end(total: _Node, made: _Node) -> Tensor | None:
    """What half a layer gives, if these are its two parts and nobody has anything else of it."""
    if type(made) is not _Made or made.source.source is not total or not _is_open(total) or made.shape != total.shape:
        return None
    half = total.half
    if any(node.holder() is not None for node in half.alive() if node is not total and node is not made):
        return None
    turns, addends, at = list[ProgramOp](), list[Tensor](), made.source.source
    while type(at) is _Added:
        turns.append(at.turn)
        addends.append(at.addend)
        at = at.source
    program = (half.me.handle, *turns[::-1], ProgramOp.SAVE, made.source.norm.handle, made.block.handle, ProgramOp.ADD_SAVED)
    if len(program) > MAX_LAYERS:
        return None
    rows = cast(_Start, at).x, *addends[::-1]
    half.is_over = True
    return call_half(half.halves.session, program, rows, total.shape[-1])
