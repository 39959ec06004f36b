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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symbiosis.client.calls import call_matrices
from symbiosis.client.session import Session
from symbiosis.messages import MAX_LAYERS
from symbiosis.types import LayerSpec

_Key = tuple[object, ...]


class _Member(NamedTuple):
    """A layer as it is called: with the executor's bias or without."""

    layer: LayerSpec
    with_bias: bool


@dataclass(slots=True)
class _Run:
    """Calls in a row that read the same tensor."""

    tensor: Callable[[], Tensor | None] = lambda: None
    key: _Key = ()
    members: list[_Member] = field(default_factory=list)
    waiting: dict[_Member, Tensor] = field(default_factory=dict)
    guessed: bool = False


class Groups:
    """What one session has learned; each thread watches its own calls."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = threading.local()
        self._learned: dict[_Member, tuple[_Member, ...]] = {}

    def call(self, layer: LayerSpec, x: Tensor, seen: Tensor, *, with_bias: bool) -> Tensor:
        """x @ Wᵀ, plus the bias if asked for. `seen` is what the layer was called with, `x` the same after any cast."""
        me = _Member(layer, with_bias)
        if seen.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(seen):
            # no version counter: a change in place between two calls could not be seen; or no numbers of its own
            return self._ask((me,), x)[0]
        run: _Run = getattr(self._local, "run", None) or _Run()
        key = (seen._version, seen.data_ptr(), x.dtype, x.requires_grad, seen.is_leaf, torch.is_grad_enabled())
        if run.tensor() is seen and run.key == key:
            run.members.append(me)
            result = run.waiting.pop(me, None)
            return result if result is not None else self._ask((me,), x)[0]
        self._learn(run)
        group = self._learned.get(me, (me,))
        waiting = dict(zip(group, self._ask(group, x), strict=True))
        mine = waiting.pop(me)
        self._local.run = _Run(weakref.ref(seen), key, [me], waiting, len(group) > 1)
        return mine

    def _ask(self, members: tuple[_Member, ...], x: Tensor) -> tuple[Tensor, ...]:
        layers, with_bias = tuple(m.layer for m in members), tuple(m.with_bias for m in members)
        return call_matrices(self._session, layers, x, with_bias)

    def _learn(self, run: _Run) -> None:
        if not run.members or (run.guessed and not run.waiting):
            return
        distinct = dict.fromkeys(m for m in run.members if m.layer.in_width == run.members[0].layer.in_width)
        self._learned[run.members[0]] = tuple(distinct)[:MAX_LAYERS]

    def __deepcopy__(self, memo: dict[int, Any]) -> Groups:
        return self
