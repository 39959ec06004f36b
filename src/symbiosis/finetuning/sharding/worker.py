"""The packed model of a shard that follows the first one: it computes each pass with it and owns no session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from symbiosis.distributed import dora_norms
from symbiosis.distributed.operations import Handler, follow_start
from symbiosis.distributed.parallel_model import ParallelModel
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.packed.batch import SessionSlice
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.sharding.gradients import flatten, replicated_parameters
from symbiosis.finetuning.sharding.messages import decode_pass, parameters_of, shapes_of
from symbiosis.finetuning.sharding.sharded_model import OPEN, PASS, START


class TrainingWorker:
    """Does this shard's part of the first shard's operations. Used by one thread."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel
        self._factory = AdapterFactory(parallel.skeleton(), flat=False)
        self._packed: _FollowingModel | None = None
        self._adapters: dict[int, TrainedAdapter] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {START: self._start, OPEN: self._open, PASS: self._run_pass, **dora_norms.handler(self._parallel)}

    def _start(self, content: bytes) -> None:
        def prepare() -> None:
            self._packed = _FollowingModel(self._parallel)

        follow_start(self._parallel, prepare)

    def _open(self, content: bytes) -> None:
        about = json.loads(content)
        self._adapters[about["number"]] = self._factory.create(json.loads(about["config"]), seed=0)

    def _run_pass(self, content: bytes) -> None:
        slices, closed = decode_pass(content, self._adapters)
        values = self._parallel.mesh.receive(shapes_of(slices), 0).wait()
        with torch.no_grad():
            for parameter, value in zip(parameters_of(slices), values, strict=True):
                parameter.copy_(value)
        for each in slices:
            each.adapter.clear_caches()
        assert self._packed is not None, "start comes first"
        self._packed.launch(slices)
        for number in closed:
            self._adapters.pop(number, None)


class _FollowingModel(PackedModel):
    """Sends its gradients to the first shard."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__(parallel.model, parallel=parallel)
        self._shard = parallel

    def _sum(
        self,
        slices: Sequence[SessionSlice],
        named: Sequence[tuple[int, str, nn.Parameter]],
        found: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        parameters = [parameter for *_, parameter in named]
        if parameters:
            skipped = {each for one in slices for each in replicated_parameters(one.adapter, self._shard.layers)}
            for work in self._shard.mesh.send([flatten(parameters, found, skipped)], 0):
                work.wait()
        return found
