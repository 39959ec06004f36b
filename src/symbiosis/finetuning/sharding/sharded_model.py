"""The packed model of the first shard: the others compute each pass with it.

The first shard owns adapters and optimizer states. It sends the adapters' values with each pass, and gets gradients back.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from symbiosis.distributed.dora_norms import LoraMatrices, compute_norms
from symbiosis.distributed.operations import FirstShard
from symbiosis.finetuning.adapters.lora_math import TrainableLora
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.packed.batch import SessionSlice
from symbiosis.finetuning.packed.model import LaunchedPass, PackedModel
from symbiosis.finetuning.sharding.gradients import flatten, unflatten
from symbiosis.finetuning.sharding.messages import encode_pass, values_of

START, OPEN, PASS = (f"training: {name}" for name in ("start", "open adapter", "pass"))


class ShardedPackedModel(PackedModel):
    """Announces every pass, with the values of its adapters."""

    def __init__(self, shard: FirstShard) -> None:
        """Raises `CannotTrain` or `ShardLost`."""
        self._shard = shard
        self._numbers: weakref.WeakKeyDictionary[TrainedAdapter, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._closed: list[int] = []
        prepare = super().__init__
        shard.start(START, b"", lambda: prepare(shard.parallel.model, parallel=shard.parallel))

    def launch(self, slices: Sequence[SessionSlice]) -> LaunchedPass:
        mesh = self._shard.parallel.mesh
        numbers = [self._number(each.adapter) for each in slices]
        closed, self._closed = self._closed, []
        with self._shard.leader.operation(PASS, encode_pass(slices, numbers, closed)):
            works = [work for rank in mesh.others for work in mesh.send(values_of(slices), rank)]
            for each in slices:
                each.adapter.clear_caches()  # as the others do: all compute norms together
            launched = super().launch(slices)
            for work in works:
                work.wait()
            return launched

    def is_sound(self) -> bool:
        return not self._shard.leader.is_lost and super().is_sound()

    def compute_magnitudes(self, adapter: TrainedAdapter) -> None:
        """Set DoRA's magnitudes to the norms of the whole weights, as PEFT starts them. Thread-safe."""
        doras = {
            path: part
            for path, part in adapter.parts.items()
            if isinstance(part, TrainableLora) and part.magnitude_O is not None
        }
        loras = {path: LoraMatrices(part.a_rI, part.b_Or, part.scale) for path, part in doras.items()}
        norms = compute_norms(loras, self._shard.parallel, self._shard.leader)
        for path, part in doras.items():
            assert part.magnitude_O is not None
            part.magnitude_O.data.copy_(norms[path].view(part.magnitude_O.shape))

    def _number(self, adapter: TrainedAdapter) -> int:
        """Of an adapter that the others know."""
        if adapter not in self._numbers:
            number = self._numbers[adapter] = next(self._count)
            weakref.finalize(adapter, partial(self._closed.append, number))
            about = {"number": number, "config": adapter.config}
            with self._shard.leader.operation(OPEN, json.dumps(about).encode()):
                pass
        return self._numbers[adapter]

    def _sum(
        self,
        slices: Sequence[SessionSlice],
        named: Sequence[tuple[int, str, nn.Parameter]],
        found: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        parameters = [parameter for *_, parameter in named]
        if not parameters:
            return found
        mesh = self._shard.parallel.mesh
        total = flatten(parameters, found, set())
        received = [mesh.receive([((total.numel(),), total.dtype)], rank) for rank in mesh.others]
        for each in received:
            total += each.wait()[0]
        summed = unflatten(total, parameters)
        return [None if own is None else each for own, each in zip(found, summed, strict=True)]
