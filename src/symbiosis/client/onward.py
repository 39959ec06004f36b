"""Fewer calls in decoding: what follows a layer is computed in the same call, learned by watching.

From the attention of one layer to that of the next, every row goes its way
alone: o, a sum, a norm, the MLP, a sum, a norm, q, k and v. The first pass
shows which layers follow each other, by which norms; from then on the first of
them asks for all. The tenant goes the whole way itself, sums and norms
included, and takes a result that waits only if each tensor on the way is the
very one that had to come, unchanged. So a wrong guess costs a little work,
never a wrong result, and whoever looks at or changes what is between (hooks,
adapters, norms of its own) finds it as ever. A write through `.data` shows in no
tensor, so nothing is asked for ahead where anybody's hook stands on the way.

Only without gradients: those of the tensors on the way would have to know the
results that were handed out after them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from symbiosis.client.as_made import is_watched
from symbiosis.client.calls import call_onward
from symbiosis.client.session import Session
from symbiosis.messages import MAX_LAYERS
from symbiosis.types import LayerSpec

_ROWS = 512  # more take longer than their ways
_TRIES = 4  # a layer that has led nowhere so often leads nowhere
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


class Member(NamedTuple):
    """A layer as it is called: with the executor's bias or without."""

    layer: LayerSpec
    with_bias: bool


class Step(NamedTuple):
    """What comes after a layer: norms (the last is of the sum), and layers that read the same rows."""

    norms: tuple[LayerSpec, ...]
    members: tuple[Member, ...]


class Waiting(NamedTuple):
    """Results of a step for whoever comes to ask, and of those after it."""

    start: Member
    results: dict[Member, Tensor]
    coming: tuple[tuple[Step, dict[Member, Tensor]], ...]


class _Seen:
    """A tensor as it was, without keeping it."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def get(self) -> Tensor | None:
        """The tensor, if it is there and nobody has written to it."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor._version == self._version else None


@dataclass(slots=True)
class _Left:
    """A layer's result on its way to the next layer."""

    start: Member
    result: _Seen
    coming: tuple[tuple[Step, dict[Member, Tensor]], ...]
    norms: tuple[LayerSpec, ...] = ()
    total: _Seen | None = None


@dataclass(slots=True)
class _Entered:
    """Rows that came that way, and that no layer has read yet."""

    start: Member
    norms: tuple[LayerSpec, ...]
    rows: _Seen


@dataclass(slots=True)
class _Way:
    """Where one thread's pass is."""

    total: _Seen | None = None
    """The rows to which the next result will be added: what the last norm read."""
    left: _Left | None = None
    entered: _Entered | None = None


class OnTheWay(Tensor):
    """A layer's result, which notices to what it is added. Whatever else is done with it gives plain tensors."""

    onward: Onward

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not OnTheWay for kind in types):
            return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _SUMS and len(args) == 2 and not kwargs:
            for one, other in (args, args[::-1]):
                if type(one) is OnTheWay:
                    one.onward.added(one, other, result)
        return result


def _plain(value: Any) -> Any:
    if type(value) is OnTheWay:
        return value.as_subclass(Tensor)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


class Onward:
    """What one session has learned of which layer leads to which; each thread goes its own way."""

    def __init__(self, session: Session, group_of: Callable[[Member], tuple[Member, ...]]) -> None:
        self._session, self._group_of = session, group_of
        self._modules: dict[str, nn.Module] = {}
        self._local = threading.local()
        self._next: dict[Member, tuple[tuple[LayerSpec, ...], Member]] = {}
        self._failures: dict[Member, int] = {}
        self._chains: dict[Member, _Chain] = {}

    def know(self, model: nn.Module) -> None:
        """Whose layers these are: to see who may look at what is between them."""
        self._modules = dict(model.named_modules())

    def _between(self, layers: Sequence[LayerSpec]) -> tuple[nn.Module, ...]:
        """Modules that rows enter or leave on the way through these layers."""
        around = [{layer.paths[0].rsplit(".", n)[0] for n in range(layer.paths[0].count(".") + 1)} for layer in layers]
        return tuple(self._modules[path] for path in sorted(set[str].union(*around) - set[str].intersection(*around)))

    def is_way(self, x: Tensor) -> bool:
        """Whether these rows may go onward."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return False
        return 0 < x.numel() <= _ROWS * x.shape[-1]

    def call(self, me: Member, x: Tensor, plain: Callable[[], Tensor]) -> Tensor:
        """The result of one layer; of those that follow it too, if that is known."""
        way = self._way()
        total = None if way.total is None else way.total.get()
        if total is None or self._failures.get(me, 0) >= _TRIES or not self.is_way(x):
            return plain()
        if total.shape != (*x.shape[:-1], me.layer.out_width) or (total.dtype, total.device) != (x.dtype, x.device):
            return plain()
        chain = self._chains.get(me) or self._chain(me)
        if not chain.steps or _has_any_global_hook() or any(map(is_watched, chain.passes)):  # type: ignore[no-untyped-call]
            return self.leave(me, plain(), ())
        results = iter(call_onward(self._session, chain.layers, x, total, chain.with_bias))
        mine = next(results)
        coming = tuple((step, dict(zip(step.members, results, strict=False))) for step in chain.steps)
        return self.leave(me, mine, coming)

    def leave(self, me: Member, result: Tensor, coming: tuple[tuple[Step, dict[Member, Tensor]], ...]) -> Tensor:
        """A result goes on its way to what follows."""
        if self._failures.get(me, 0) >= _TRIES:
            return result
        way = self._way()
        self._give_up(way)
        result = self._watched(result)
        way.left = _Left(me, _Seen(result), coming)
        return result

    def added(self, result: Tensor, other: Any, total: Any) -> None:
        way = self._way()
        if way.left is None or way.total is None or type(total) is not Tensor:
            return
        if way.left.result.get() is result and way.total.get() is other:
            way.left.total = _Seen(total)

    def normed(self, norm: LayerSpec, x: Tensor, rows: Tensor, *, is_shared: bool) -> tuple[Tensor, Waiting | None]:
        """What a norm gave for `x`, the executor's norm if it is shared; and what waits for the layers that read it."""
        way = self._way()
        left = way.left
        if left is not None and left.result.get() is x and is_shared:
            left.norms += (norm,)
            rows = self._watched(rows)
            left.result = _Seen(rows)
            return rows, None
        came = left is not None and left.total is not None and left.total.get() is x and is_shared
        if not came:
            self._give_up(way)
        way.left, way.total = None, _Seen(x)
        if left is None or not came:
            return rows, None
        norms = (*left.norms, norm)
        if not left.coming:
            self._give_up(way)
            way.entered = _Entered(left.start, norms, _Seen(rows))
            return rows, None
        (step, results), *after = left.coming
        if step.norms != norms:
            self.fail(left.start)
            return rows, None
        return rows, Waiting(left.start, results, tuple(after))

    def read(self, me: Member, rows: Tensor) -> None:
        """A layer reads rows that nobody expected: perhaps they came from another one."""
        way = self._way()
        entered = way.entered
        if entered is not None and entered.rows.get() is rows:
            way.entered = None
            self._next[entered.start] = (entered.norms, me)
            self._chains.clear()

    def fail(self, start: Member) -> None:
        """What was thought to follow this layer did not."""
        self._failures[start] = self._failures.get(start, 0) + 1
        self._next.pop(start, None)
        self._chains.clear()

    def forget_chains(self) -> None:
        """Other layers travel together now."""
        self._chains.clear()

    def _give_up(self, way: _Way) -> None:
        for begun in (way.left, way.entered):
            if begun is not None:
                self.fail(begun.start)
        way.left = way.entered = None

    def _chain(self, start: Member) -> _Chain:
        steps, layers, with_bias, me = list[Step](), [start.layer], [start.with_bias], start
        while me in self._next:
            norms, first = self._next[me]
            members = self._group_of(first)
            if len(layers) + len(norms) + len(members) > MAX_LAYERS:
                break
            steps.append(Step(norms, members))
            layers += [*norms, *(member.layer for member in members)]
            with_bias += [*(False for _ in norms), *(member.with_bias for member in members)]
            if len(members) > 1:
                break
            me = first
        made = self._chains[start] = _Chain(tuple(steps), tuple(layers), tuple(with_bias), self._between(layers))
        return made

    def _watched(self, result: Tensor) -> Tensor:
        watched: OnTheWay = result.as_subclass(OnTheWay)
        watched.onward = self
        return watched

    def _way(self) -> _Way:
        way: _Way | None = getattr(self._local, "way", None)
        if way is None:
            way = self._local.way = _Way()
        return way

    def __deepcopy__(self, memo: dict[int, Any]) -> Onward:
        return self


class _Chain(NamedTuple):
    """A layer and all that follows it in one call."""

    steps: tuple[Step, ...]
    layers: tuple[LayerSpec, ...]
    with_bias: tuple[bool, ...]
    passes: tuple[nn.Module, ...]
