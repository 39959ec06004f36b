"""The engine of a shard that follows the first one: it computes each pass with it and knows no requests."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from symbiosis import kernels
from symbiosis.distributed import dora_norms
from symbiosis.distributed.operations import Handler, follow_start
from symbiosis.distributed.parallel_model import ParallelModel
from symbiosis.serving.lora.converter import Converter
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.model.paged_attention import create_kv_cache
from symbiosis.serving.sharding.messages import decode_adapter, decode_batch, decode_numbers
from symbiosis.serving.sharding.sharded_runner import COPY, EVICT, FORWARD, LOAD, START
from symbiosis.types import LayerKind


class EngineWorker:
    """Does this shard's part of the first shard's operations. Used by one thread."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel
        self._runner: ModelRunner | None = None
        self._converter = Converter(parallel.model)
        self._hashes: dict[int, str] = {}
        self._adapters: dict[str, EngineAdapter] = {}
        self._slots: SlotTable | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            START: self._start,
            FORWARD: self._forward,
            COPY: self._copy_blocks,
            LOAD: self._load,
            EVICT: self._evict,
            **dora_norms.handler(self._parallel),
        }

    def _start(self, content: bytes) -> None:
        follow_start(self._parallel, lambda: self._prepare(*decode_numbers(content)))

    def _prepare(self, num_blocks: int, block_size: int, slots: int) -> None:
        parallel = self._parallel
        kv_cache = create_kv_cache(parallel.model, parallel.facts, parallel.local_kv_heads, num_blocks, block_size)
        self._runner = ModelRunner(parallel.model.eval(), kv_cache, parallel)
        if kernels.run_on(parallel.model.device):
            linear = (LayerKind.LINEAR, LayerKind.CONV1D)
            layers = [path for path, module in parallel.facts.modules.items() if module.kind in linear]
            self._slots = SlotTable(slots, layers, parallel.model.device)
            self._runner.use_table(self._slots)

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "start comes first"
        return self._runner

    def _forward(self, content: bytes) -> None:
        self.runner.forward(decode_batch(content, self._hashes), self._adapters)

    def _copy_blocks(self, content: bytes) -> None:
        numbers = decode_numbers(content)
        self.runner.copy_blocks(list(zip(numbers[::2], numbers[1::2], strict=True)))

    @torch.no_grad()
    def _load(self, content: bytes) -> None:
        (number,) = decode_numbers(content[:8])
        packed = self._converter.convert_part(*decode_adapter(content[8:]))
        device = self._parallel.model.device
        if device.type != "cpu":
            packed = packed.rebase(packed.memory.to(device))
        self._hashes[number] = packed.adapter.hash
        self._adapters[packed.adapter.hash] = packed.adapter
        if self._slots is not None:
            self._slots.assign(packed.adapter.hash, self._slots.build_entries(packed.adapter))

    def _evict(self, content: bytes) -> None:
        (number,) = decode_numbers(content)
        adapter = self._adapters.pop(self._hashes.pop(number))
        self.runner.forget(adapter)
        if self._slots is not None:
            self._slots.clear(adapter.hash)
