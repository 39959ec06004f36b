"""Call grouping: layers that read the same rows become one call, learned by observation.

When q is called, k and v follow with the same tensor. The first pass records
which layers follow each other. From then on the first of them requests all
results, and the others find theirs waiting. A wrong guess costs a little work,
never a wrong result: a result is used only for the same tensor object, unchanged
since, under the same modes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symbiosis.split.client.autograd import LayerRef, call_layers
from symbiosis.split.client.deferred.decode import DecodeDeferral
from symbiosis.split.client.deferred.tensor import DeferredTensor, plain
from symbiosis.split.client.deferred.train import DeferredGradTensor, TrainDeferral
from symbiosis.split.client.session import ClientSession
from symbiosis.transport.messages import MAX_LAYERS
from symbiosis.types import WITH_BIAS, LayerKind, LayerSpec

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Run:
    """Consecutive calls that read the same tensor."""

    tensor: Callable[[], Tensor | None] = lambda: None
    key: _Key = ()
    members: list[LayerRef] = field(default_factory=list)
    waiting: dict[LayerRef, Tensor] = field(default_factory=dict)
    guessed: bool = False


def _key(seen: Tensor, x: Tensor) -> _Key:
    """Equal for two calls that read the same rows under the same modes."""
    if type(seen) is not DeferredTensor:
        return seen._version, seen.data_ptr(), x.dtype, x.requires_grad, seen.is_leaf, torch.is_grad_enabled()
    like = seen.node.like
    if isinstance(like, Tensor):
        return seen.node.count_writes(), 0, x.dtype, like.requires_grad, like.is_leaf, torch.is_grad_enabled()
    return 0, 0, x.dtype, False, True, torch.is_grad_enabled()  # equal to the key of its values once they are exposed


class CallGroups:
    """The groups that one session has learned. Each thread observes its own calls."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.decode = DecodeDeferral(session)
        self.train = TrainDeferral(session)
        self._local = threading.local()
        self._learned: dict[LayerRef, tuple[LayerRef, ...]] = {}
        self._refs: dict[int, LayerRef] = {}

    def call(self, layer: LayerSpec, x: Tensor, seen: Tensor, *, with_bias: bool) -> Tensor:
        """x @ Wᵀ, plus the bias if `with_bias`; or a block's result. The tensor may be deferred.

        `seen` is the layer's input, `x` the same after any cast.
        """
        handle = layer.handle | (WITH_BIAS * with_bias)
        me = self._refs.get(handle) or self._refs.setdefault(handle, LayerRef(layer, with_bias=with_bias))
        if type(seen) is DeferredGradTensor:
            if layer.kind is LayerKind.BLOCK and (block := self.train.defer_block(me, seen)) is not None:
                return block
            x, seen = plain(x), plain(seen)
        if type(seen) is not DeferredTensor and (seen.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(seen)):
            # Without a version counter a write between two calls is invisible; a wrapped tensor has no values of its own.
            return self._request((me,), x)[0]
        run: _Run = getattr(self._local, "run", None) or _Run()
        key = _key(seen, x)
        if run.tensor() is seen and run.key == key:
            run.members.append(me)
            result = run.waiting.pop(me, None)
            return result if result is not None else self._request((me,), x)[0]
        self._learn(run)
        group = self._learned.get(me, (me,))
        if len(group) == 1:
            deferred = self.decode.defer_layer(me, x)
            if deferred is None and x is seen:
                deferred = self.train.start(me, x)
            if deferred is not None:
                self._local.run = _Run(weakref.ref(seen), key, [me])
                return deferred
        waiting = dict(zip(group, self._request(group, x), strict=True))
        mine = waiting.pop(me)
        self._local.run = _Run(weakref.ref(seen), key, [me], waiting, len(group) > 1)
        return mine

    def _request(self, refs: tuple[LayerRef, ...], x: Tensor) -> tuple[Tensor, ...]:
        if self.decode.owns(x) and not torch.is_grad_enabled() and x.node.fits(len(refs)) and (path := x.node.find_path()):
            return x.node.run(path, refs)  # type: ignore[no-any-return]
        return call_layers(self.session, refs, plain(x))

    def _learn(self, run: _Run) -> None:
        if not run.members or (run.guessed and not run.waiting):
            return
        first = run.members[0]
        alike = [m for m in run.members if m.layer.in_width == first.layer.in_width and m.layer.kind is not LayerKind.BLOCK]
        group = (first,) if first.layer.kind is LayerKind.BLOCK else tuple(dict.fromkeys(alike))[:MAX_LAYERS]
        self._learned[first] = group

    def __deepcopy__(self, memo: dict[int, Any]) -> CallGroups:
        return self
