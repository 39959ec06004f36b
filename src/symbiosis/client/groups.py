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

from symbiosis.client.calls import call_block, call_matrices
from symbiosis.client.onward import Member, Onward, Waiting
from symbiosis.client.session import Session
from symbiosis.messages import MAX_LAYERS
from symbiosis.types import LayerKind, LayerSpec

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Run:
    """Calls in a row that read the same tensor."""

    tensor: Callable[[], Tensor | None] = lambda: None
    key: _Key = ()
    members: list[Member] = field(default_factory=list)
    waiting: dict[Member, Tensor] = field(default_factory=dict)
    guessed: bool = False
    onward: Waiting | None = None
    """Where the waiting results come from, if from a layer before."""


def _key(seen: Tensor, x: Tensor) -> _Key:
    return (seen._version, seen.data_ptr(), x.dtype, x.requires_grad, seen.is_leaf, torch.is_grad_enabled())


class Groups:
    """What one session has learned; each thread watches its own calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = threading.local()
        self._learned: dict[Member, tuple[Member, ...]] = {}
        self.onward = Onward(session, lambda member: self._learned.get(member, (member,)))

    def call(self, layer: LayerSpec, x: Tensor, seen: Tensor, *, with_bias: bool) -> Tensor:
        """x @ Wᵀ, plus the bias if asked for; or a block of x.

        `seen` is what the layer was called with, `x` the same after any cast.
        """
        me = Member(layer, with_bias)
        if seen.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(seen):
            # no version counter: a change in place between two calls could not be seen; or no numbers of its own
            return self._ask((me,), x)[0]
        run: _Run = getattr(self._local, "run", None) or _Run()
        key = _key(seen, x)
        if run.tensor() is seen and run.key == key:
            run.members.append(me)
            result = run.waiting.pop(me, None)
            if result is None:
                return self._ask((me,), x)[0]
            if run.onward is None or len(run.onward.results) > 1:
                return result
            return self.onward.leave(me, result, run.onward.coming)
        self._learn(run)
        self.onward.read(me, seen)
        group = self._learned.get(me, (me,))
        if len(group) == 1:
            self._local.run = _Run(weakref.ref(seen), key, [me])
            return self.onward.call(me, x, lambda: self._ask(group, x)[0])
        waiting = dict(zip(group, self._ask(group, x), strict=True))
        mine = waiting.pop(me)
        self._local.run = _Run(weakref.ref(seen), key, [me], waiting, guessed=True)
        return mine

    def normed(self, norm: LayerSpec, x: Tensor, rows: Tensor, *, is_shared: bool) -> Tensor:
        """What one of the tenant's norms gave for `x`; it is the executor's too if it is shared."""
        rows, onward = self.onward.normed(norm, x, rows, is_shared=is_shared)
        if onward is not None:
            self._learn(getattr(self._local, "run", None) or _Run())
            waiting = dict(onward.results)
            self._local.run = _Run(weakref.ref(rows), _key(rows, rows), [], waiting, guessed=True, onward=onward)
        return rows

    def _ask(self, members: tuple[Member, ...], x: Tensor) -> tuple[Tensor, ...]:
        if members[0].layer.kind is LayerKind.BLOCK:
            return (call_block(self._session, members[0].layer, x),)
        layers, with_bias = tuple(m.layer for m in members), tuple(m.with_bias for m in members)
        return call_matrices(self._session, layers, x, with_bias)

    def _learn(self, run: _Run) -> None:
        if run.onward is not None and run.waiting:
            self.onward.fail(run.onward.start)
        if not run.members or (run.guessed and not run.waiting):
            return
        first = run.members[0].layer
        alike = [m for m in run.members if m.layer.in_width == first.in_width and m.layer.kind is not LayerKind.BLOCK]
        group = tuple(dict.fromkeys(alike))[:MAX_LAYERS] if first.kind is not LayerKind.BLOCK else run.members[:1]
        if self._learned.get(run.members[0]) != tuple(group):
            self._learned[run.members[0]] = tuple(group)
            self.onward.forget_chains()

    def __deepcopy__(self, memo: dict[int, Any]) -> Groups:
        return self
