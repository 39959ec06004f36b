"""The model runner of the first shard: the others compute each pass with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from symbiosis.adapters.parts import Adapter, LoraPart
from symbiosis.distributed.dora_norms import LoraMatrices, compute_norms
from symbiosis.distributed.operations import FirstShard
from symbiosis.serving.lora.converter import DividedAdapter
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.model_input import InputChunk
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.scheduling.block_manager import BlockCopy
from symbiosis.serving.sharding.adapter_division import divide_adapter
from symbiosis.serving.sharding.messages import encode_adapter, encode_batch, encode_numbers

START, FORWARD, COPY, LOAD, EVICT = (
    f"serving: {name}" for name in ("start", "forward", "copy blocks", "load adapter", "evict adapter")
)


class ShardedRunner(ModelRunner):
    """Announces every pass, and every adapter that comes or goes."""

    def __init__(self, shard: FirstShard, kv_cache: PagedKVCache, num_blocks: int, slots: int) -> None:
        """`slots`: of adapters on the device. Raises `CannotServe` or `ShardLost`."""
        self._parallel, self._leader = shard.parallel, shard.leader
        self._numbers: dict[str, int] = {}  # of loaded adapters, by hash
        self._count = itertools.count()
        prepare = super().__init__
        arguments = encode_numbers(num_blocks, kv_cache.block_size, slots)
        shard.start(START, arguments, lambda: prepare(shard.parallel.model, kv_cache, shard.parallel))

    def use_kernels(self, table: SlotTable, max_blocks: int) -> None:
        """Without CUDA graphs: the others do not replay them."""
        self.use_table(table)

    def forward(self, chunks: Seq[InputChunk], adapters: Mapping[str, EngineAdapter]) -> Tensor:
        with self._leader.operation(FORWARD, encode_batch(chunks, self._numbers, self.kv_cache.block_size)):
            return super().forward(chunks, adapters)

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        if copies:
            with self._leader.operation(COPY, encode_numbers(*itertools.chain.from_iterable(copies))):
                super().copy_blocks(copies)

    def add(self, packed: PackedAdapter) -> None:
        number = self._numbers[packed.adapter.hash] = next(self._count)
        first = encode_numbers(number)
        with self._leader.operation(LOAD, [first + other for other in packed.others]):
            pass

    def forget(self, adapter: EngineAdapter) -> None:
        super().forget(adapter)
        with self._leader.operation(EVICT, encode_numbers(self._numbers.pop(adapter.hash))):
            pass

    def is_sound(self) -> bool:
        return not self._leader.is_lost and super().is_sound()

    def divide(self, adapter: Adapter) -> DividedAdapter:
        """The parts of all shards. Thread-safe."""
        parallel = self._parallel
        divided = [divide_adapter(adapter, parallel.layers, heads, rank) for rank, heads in enumerate(parallel.kv_heads)]
        doras = {
            path: LoraMatrices(part.a_RI, part.b_OR, part.scale)
            for path, found in adapter.parts.items()
            for part in found
            if isinstance(part, LoraPart) and part.magnitude_O is not None
        }
        norms = compute_norms(doras, parallel, self._leader)
        return DividedAdapter(
            divided[0],
            self._norms_of(norms, 0),
            tuple(self._encode(each, norms, rank) for rank, each in enumerate(divided) if rank),
        )

    def _encode(self, adapter: Adapter, norms: Mapping[str, Tensor], rank: int) -> bytes:
        return encode_adapter(adapter, self._norms_of(norms, rank))

    def _norms_of(self, norms: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """Of a rank's outputs."""
        layers = self._parallel.layers
        is_divided = {path: path in layers and layers[path].style.divides_outputs for path in norms}
        return {path: norm[layers[path].slices[rank]] if is_divided[path] else norm for path, norm in norms.items()}
