"""Computes batches of several chains. Each chain has a model runner of its own, over one KV cache.

A batch of one chain is computed by its runner, as in an engine of that model alone. A batch of several chains runs through
a grouped model (`grouped_module`): what they share is computed once for all their rows. Chains that share nothing run one
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.distributed.parallel_model import PROBE_TOKENS, probe_ids
from symbiosis.errors import CannotServe
from symbiosis.serving.chains.chain import Chain, state_key
from symbiosis.serving.chains.grouped_module import graft_chains
from symbiosis.serving.chains.row_groups import ChainChunk, RowGroups
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import PackedKey
from symbiosis.serving.lora.lora_ops import FusedProjection
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.model_input import InputChunk
from symbiosis.serving.model.model_runner import ModelRunner, are_close_logits, run_model
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.scheduling.batch import Batch, Chunk

_CACHED_GROUPS = 8  # for each chain: lists of adapters' segments


class ChainRunner(ModelRunner):
    """Owns the models of all chains. It is the runner of the first one, and has those of the others."""

    def __init__(self, chains: Seq[Chain], facts: ModelFacts, kv_cache: PagedKVCache) -> None:
        """Raises `CannotServe` if a chain cannot be served, or not together with the others."""
        adapters = ActiveAdapters(_CACHED_GROUPS * len(chains))
        packed: dict[PackedKey, FusedProjection] = {}
        super().__init__(chains[0].model, kv_cache, adapters=adapters, packed=packed)
        self._own = chains[0].hash
        self._others = {
            chain.hash: ModelRunner(chain.model, kv_cache, adapters=adapters, packed=packed) for chain in chains[1:]
        }
        self.packed_bytes += sum(runner.packed_bytes for runner in self._others.values())
        self._numbers = {chain.hash: number for number, chain in enumerate(chains)}
        self._tensors = [frozenset(state_key(chain.model)) for chain in chains]
        self._groups = RowGroups(kv_cache, adapters)
        self._grouped = graft_chains([chain.model for chain in chains], facts.layers, self._groups)
        with torch.inference_mode():
            self._verify(chains)

    def _verify(self, chains: Seq[Chain]) -> None:
        """Compare each chain in a batch with another one to the chain alone."""
        num_blocks = -(-PROBE_TOKENS // self.kv_cache.block_size)
        for number, chain in enumerate(chains):
            ids = probe_ids(chain.model).tolist()
            probe = InputChunk(0, ids, range(num_blocks), "", True)
            other = InputChunk(0, ids[:1], [num_blocks], "", True)
            expected = self._runner_of(chain.hash).forward([probe], {})[0]
            found = self._forward([ChainChunk((number + 1) % len(chains), other), ChainChunk(number, probe)], {})[-1]
            if not are_close_logits(found, expected):
                raise CannotServe(
                    f"{type(chain.model).__name__} cannot be served with other chains: its results differ when rows are grouped"
                )

    def forget(self, adapter: EngineAdapter) -> None:
        super().forget(adapter)
        self._groups.clear()

    def use_kernels(self, table: SlotTable, max_blocks: int) -> None:
        super().use_kernels(table, max_blocks)
        for runner in self._others.values():
            runner.use_kernels(table, max_blocks)

    @torch.inference_mode()
    def compute(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        chains = [chain for chain, _ in groupby(chunk.sequence.chain for chunk in batch.chunks)]
        if len(chains) == 1:
            return self._compute_alone(chains[0], batch, adapters)
        self.copy_blocks(batch.copies)
        if self._share_nothing(chains):
            parts = [
                self._compute_alone(chain, replace(batch, chunks=tuple(chunks), copies=()), adapters).clone()
                for chain, chunks in groupby(batch.chunks, lambda chunk: chunk.sequence.chain)
            ]
            return torch.cat(parts)
        return self._forward(
            [ChainChunk(self._numbers[chunk.sequence.chain], InputChunk.of(chunk)) for chunk in batch.chunks], adapters
        )

    @torch.inference_mode()
    def compute_next(self, chunks: Seq[Chunk], tokens_B: Tensor, adapters: Mapping[str, EngineAdapter]) -> Tensor | None:
        """None for several chains, too: they have no CUDA graph."""
        chains = {chunk.sequence.chain for chunk in chunks}
        if len(chains) > 1:
            return None
        chain = chains.pop()
        if chain == self._own:
            return super().compute_next(chunks, tokens_B, adapters)
        return self._others[chain].compute_next(chunks, tokens_B, adapters)

    def _compute_alone(self, chain: str, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        if chain == self._own:
            return super().compute(batch, adapters)
        return self._others[chain].compute(batch, adapters)

    def _runner_of(self, chain: str) -> ModelRunner:
        return self if chain == self._own else self._others[chain]

    def _forward(self, chunks: Seq[ChainChunk], adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of the last token of each chunk that samples."""
        return run_model(self._grouped, self._groups.begin(chunks, adapters))

    def _share_nothing(self, chains: Seq[str]) -> bool:
        """Whether each of these chains is alone at every block."""
        tensors = [self._tensors[self._numbers[chain]] for chain in dict.fromkeys(chains)]
        return len(frozenset().union(*tensors)) == sum(map(len, tensors))
