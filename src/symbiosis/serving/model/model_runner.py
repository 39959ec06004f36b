"""Computes a batch: the rows of all its sequences concatenated, through the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.errors import CannotServe
from symbiosis.kernels.tiles import Span
from symbiosis.models.patches.fused_ops import patch_fused_ops
from symbiosis.models.patches.gated_mlp import patch_gated_mlps
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import install_lora_layers, pack_projections
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter, VirtualTokens
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.cuda_graphs import DecodeGraphs
from symbiosis.serving.model.decoder_layer import is_close, unfuse_layers
from symbiosis.serving.model.decoder_layer_cpu import fuse_layers_cpu
from symbiosis.serving.model.decoder_layer_gpu import fuse_layers_gpu
from symbiosis.serving.model.paged_attention import PagedKVCache, PrefixKV, use_paged_attention
from symbiosis.serving.scheduling.batch import Batch, Chunk

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.1


class ModelRunner:
    """Owns the model, which serves nothing else from now on."""

    def __init__(self, model: PreTrainedModel, kv_cache: PagedKVCache) -> None:
        """Raises `CannotServe` if the model's results over a paged KV cache differ from its own."""
        if any(hasattr(module, "symbiosis_kv_cache") for module in model.modules()):
            raise CannotServe("this model is served by an engine already: give each engine a model of its own")
        self.model, self.kv_cache, self._adapters = model, kv_cache, ActiveAdapters()
        self._decode_graphs: DecodeGraphs | None = None
        self.packed_bytes = 0
        """Of packed copies of weights."""
        with torch.inference_mode():
            ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(model.config.get_text_config().vocab_size)
            expected = model(input_ids=ids[None], use_cache=False).logits[0, -1]
            use_paged_attention(model, kv_cache)
            install_lora_layers(model, self._adapters)
            if kernels.run_on(model.device):
                patch_fused_ops(model)
                patch_gated_mlps(model)
            found = self._probe(ids)
            if kernels.run_on(model.device):
                fuse_layers_gpu(model, self._adapters)
            elif model.device.type == "cpu":
                self.packed_bytes = pack_projections(model)
                fuse_layers_cpu(model, self._adapters)
            if not is_close(self._probe(ids), found):
                unfuse_layers(model)
        tolerance = _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE) * float(expected.abs().max())
        if not torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance):
            raise CannotServe(
                f"{type(model).__name__} cannot be served: its results differ when several sequences share a batch"
            )

    def _probe(self, ids: Tensor) -> Tensor:
        """The last logits of a sequence in three chunks, batched with another sequence."""
        num_blocks = -(-_PROBE_TOKENS // self.kv_cache.block_size) + 1
        for start, end in ((0, 5), (5, _PROBE_TOKENS - 1), (_PROBE_TOKENS - 1, _PROBE_TOKENS)):
            self.kv_cache.begin([Span(0, 1, 0, [num_blocks]), Span(1, end - start, start, range(num_blocks))])
            self._adapters.begin_batch((), ())
            rows, positions = torch.cat([ids[:1], ids[start:end]]), torch.arange(start, end, device=ids.device)
            output = self.model(
                input_ids=rows[None], position_ids=torch.cat([positions.new_zeros(1), positions])[None], use_cache=False
            )
        last: Tensor = output.logits[0, -1]
        return last

    def forget(self, adapter: EngineAdapter) -> None:
        """Drop references to an adapter whose memory is about to be reused. Between steps only."""
        self._adapters.forget(adapter)

    def use_kernels(self, table: SlotTable, max_blocks: int) -> None:
        """Apply adapters by kernels, with weights from this table, and decode by CUDA graphs."""
        self._adapters.table = table
        self._decode_graphs = DecodeGraphs(self.model, self.kv_cache, self._adapters, max_blocks)

    @torch.inference_mode()
    def compute(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `batch.sampled`, [B, V]. `adapters` has those of its sequences, by hash."""
        self.kv_cache.copy(batch.copies)
        logits_BV = None
        if self._decode_graphs is not None and all(chunk.count == 1 and chunk.samples for chunk in batch.chunks):
            ids = [chunk.sequence.tokens[chunk.start] for chunk in batch.chunks]
            logits_BV = self._decode(batch.chunks, ids, adapters)
        return self._forward(batch, adapters) if logits_BV is None else logits_BV

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step can be launched before its tokens are on the host."""
        return self._decode_graphs is not None

    @torch.inference_mode()
    def compute_next(self, chunks: Seq[Chunk], tokens_B: Tensor, adapters: Mapping[str, EngineAdapter]) -> Tensor | None:
        """The logits after tokens on the device, one for each chunk; None if no CUDA graph fits."""
        return self._decode(chunks, tokens_B, adapters)

    def _decode(self, chunks: Seq[Chunk], ids: Seq[int] | Tensor, adapters: Mapping[str, EngineAdapter]) -> Tensor | None:
        """Replay a CUDA graph over rows of one token each; None if no graph fits."""
        segments: list[AdapterSegment] = []
        for row, chunk in enumerate(chunks):
            if chunk.sequence.adapter:
                adapter = adapters[chunk.sequence.adapter]
                if not adapter.decodes_by_table or (adapter.virtual is not None and chunk.start < adapter.virtual.count):
                    return None
                _extend(segments, adapter, row, row + 1)
        assert self._decode_graphs is not None
        before = [chunk.start for chunk in chunks]
        return self._decode_graphs.compute(ids, before, [chunk.sequence.block_table for chunk in chunks], segments)

    def _forward(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        spans: list[Span] = []
        prefixes: list[PrefixKV] = []
        segments: list[AdapterSegment] = []
        head_segments: list[AdapterSegment] = []
        embeds: list[tuple[int, Tensor]] = []
        sampled_rows: list[int] = []
        ids: list[int] = []
        positions: list[int] = []
        for chunk in batch.chunks:
            row, sequence = len(ids), chunk.sequence
            end = chunk.start + chunk.count
            ids += sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            spans.append(Span(row, chunk.count, chunk.start, sequence.block_table))
            adapter = adapters[sequence.adapter] if sequence.adapter else None
            if adapter is not None:
                _extend(segments, adapter, row, row + chunk.count)
                if chunk.samples:
                    _extend(head_segments, adapter, len(sampled_rows), len(sampled_rows) + 1)
                if adapter.virtual is not None and chunk.start < adapter.virtual.count:
                    _add_virtual_tokens(chunk, row, adapter.virtual, prefixes, embeds)
            if chunk.samples:
                sampled_rows.append(row + chunk.count - 1)
        self.kv_cache.begin(spans, prefixes)
        self._adapters.begin_batch(segments, head_segments, (len(ids), len(sampled_rows)))
        device = self.model.device
        inputs = {"input_ids": torch.tensor(ids, device=device)[None]}
        if embeds:
            rows = self.model.get_input_embeddings()(inputs.pop("input_ids"))
            for start, values in embeds:
                rows[0, start : start + len(values)] = values
            inputs["inputs_embeds"] = rows
        output = self.model(
            **inputs,
            position_ids=torch.tensor(positions, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(sampled_rows, device=device, dtype=torch.int64),
        )
        logits_BV: Tensor = output.logits[0]
        return logits_BV


def _extend(segments: list[AdapterSegment], adapter: EngineAdapter, start: int, end: int) -> None:
    """Add rows of an adapter: adjacent rows of one adapter are one segment."""
    if segments and segments[-1].adapter is adapter and segments[-1].end == start:
        segments[-1] = AdapterSegment(adapter, segments[-1].start, end)
    else:
        segments.append(AdapterSegment(adapter, start, end))


def _add_virtual_tokens(
    chunk: Chunk, row: int, virtual: VirtualTokens, prefixes: list[PrefixKV], embeds: list[tuple[int, Tensor]]
) -> None:
    """Add what the adapter supplies for the virtual tokens among a chunk's rows."""
    start, end = chunk.start, min(virtual.count, chunk.start + chunk.count)
    if virtual.embeddings_TD is not None:
        embeds.append((row, virtual.embeddings_TD[start:end]))
    else:
        assert virtual.keys_LTKD is not None
        assert virtual.values_LTKD is not None
        prefixes.append(PrefixKV(row, virtual.keys_LTKD[:, start:end], virtual.values_LTKD[:, start:end]))
