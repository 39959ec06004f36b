"""Fewer calls: layers that read the same rows travel together, learned by watching.

When q is called, k and v will be called next with the very same tensor. The
first pass shows who follows whom; from then on the first of them asks for
all, and the others find their result waiting. A wrong guess costs a little
work, never a wrong result: a result is used only for the same tensor object,
unchanged since, under the same modes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symbiosis.split.client.autograd import call_block, call_matrices
from symbiosis.split.client.deferred.decode import DecodeDeferral, DeferredTensor, LayerRef
from symbiosis.split.client.deferred.tensor import plain
from symbiosis.split.client.deferred.train import DeferredGradTensor, TrainDeferral
from symbiosis.split.client.session import ClientSession
from symbiosis.transport.messages import MAX_LAYERS
from symbiosis.types import WITH_BIAS, LayerKind, LayerSpec

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Run:
    """Calls in a row that read the same tensor."""

    tensor: Callable[[], Tensor | None] = lambda: None
    key: _Key = ()
    members: list[LayerRef] = field(default_factory=list)
    waiting: dict[LayerRef, Tensor] = field(default_factory=dict)
    guessed: bool = False


def _key(seen: Tensor, x: Tensor) -> _Key:
    """What has to be the same for two calls to have read the same rows."""
    if type(seen) is not DeferredTensor:
        return seen._version, seen.data_ptr(), x.dtype, x.requires_grad, seen.is_leaf, torch.is_grad_enabled()
    like = seen.node.like
    if isinstance(like, Tensor):
        return seen.node.writes(), 0, x.dtype, like.requires_grad, like.is_leaf, torch.is_grad_enabled()
    return 0, 0, x.dtype, False, True, torch.is_grad_enabled()  # the same as of its numbers when they are there


class CallGroups:
    """What one session has learned; each thread watches its own calls."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self.promises = DecodeDeferral(session)
        self.halves = TrainDeferral(session)
        self._local = threading.local()
        self._learned: dict[LayerRef, tuple[LayerRef, ...]] = {}
        self._members: dict[int, LayerRef] = {}

    def call(self, layer: LayerSpec, x: Tensor, seen: Tensor, *, with_bias: bool) -> Tensor:
        """x @ Wᵀ, plus the bias if asked for; or what a block makes of x. Perhaps a promise of it, or it comes late.

        `seen` is what the layer was called with, `x` the same after any cast.
        """
        if type(seen) is DeferredGradTensor:
            if layer.kind is LayerKind.BLOCK and self.halves.can_block(seen, layer):
                return self.halves.block(seen, layer)
            x, seen = plain(x), plain(seen)
        me = self._members.get(layer.handle | (WITH_BIAS * with_bias)) or self._member(layer, with_bias=with_bias)
        if type(seen) is not DeferredTensor and (seen.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(seen)):
            # no version counter: a change in place between two calls could not be seen; or no numbers of its own
            return self._ask((me,), x)[0]
        run: _Run = getattr(self._local, "run", None) or _Run()
        key = _key(seen, x)
        if run.tensor() is seen and run.key == key:
            run.members.append(me)
            result = run.waiting.pop(me, None)
            return result if result is not None else self._ask((me,), x)[0]
        self._learn(run)
        group = self._learned.get(me, (me,))
        if len(group) == 1 and self.promises.can_layer(me, x):
            self._local.run = _Run(weakref.ref(seen), key, [me])
            return self.promises.layer(me, x)
        if len(group) == 1 and x is seen and self.halves.can_begin(me, x):
            self._local.run = _Run(weakref.ref(seen), key, [me])
            return self.halves.begin(me, x)
        waiting = dict(zip(group, self._ask(group, x), strict=True))
        mine = waiting.pop(me)
        self._local.run = _Run(weakref.ref(seen), key, [me], waiting, len(group) > 1)
        return mine

    def _ask(self, members: tuple[LayerRef, ...], x: Tensor) -> tuple[Tensor, ...]:
        if self.promises.made(x) and not torch.is_grad_enabled() and x.node.fits(len(members)) and (way := x.node.way()):
            return x.node.compute(way, members)
        x = plain(x)
        if members[0].layer.kind is LayerKind.BLOCK:
            return (call_block(self._session, members[0].layer, x),)
        layers, with_bias = tuple(m.layer for m in members), tuple(m.with_bias for m in members)
        return call_matrices(self._session, layers, x, with_bias)

    def _member(self, layer: LayerSpec, *, with_bias: bool) -> LayerRef:
        made = LayerRef(layer, with_bias=with_bias)
        return self._members.setdefault(made.handle, made)

    def _learn(self, run: _Run) -> None:
        if not run.members or (run.guessed and not run.waiting):
            return
        first = run.members[0]
        alike = [m for m in run.members if m.layer.in_width == first.layer.in_width and m.layer.kind is not LayerKind.BLOCK]
        group = (first,) if first.layer.kind is LayerKind.BLOCK else tuple(dict.fromkeys(alike))[:MAX_LAYERS]
        self._learned[first] = group

    def __deepcopy__(self, memo: dict[int, Any]) -> CallGroups:
        return self
