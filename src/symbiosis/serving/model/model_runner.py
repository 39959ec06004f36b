"""Computes a batch: the rows of all its sequences concatenated, through the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.distributed.parallel_model import PROBE_TOKENS, ParallelModel, probe_ids
from symbiosis.errors import CannotServe
from symbiosis.kernels.tiles import Span
from symbiosis.models.device_dtype import is_device_alive
from symbiosis.models.patches.fused_ops import patch_fused_ops
from symbiosis.models.patches.gated_mlp import patch_gated_mlps
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import PackedKey, install_lora_layers, pack_projections
from symbiosis.serving.lora.lora_ops import FusedProjection
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.cuda_graphs import DecodeGraphs
from symbiosis.serving.model.decoder_layer import is_close, unfuse_layers
from symbiosis.serving.model.decoder_layer_cpu import fuse_layers_cpu
from symbiosis.serving.model.decoder_layer_gpu import fuse_layers_gpu
from symbiosis.serving.model.model_input import InputChunk, ModelInput, extend_segments
from symbiosis.serving.model.paged_attention import PagedKVCache, use_paged_attention
from symbiosis.serving.model.pass_capture import PassCapture
from symbiosis.serving.model.prefill_graphs import PrefillGraphs
from symbiosis.serving.scheduling.batch import Batch, Chunk
from symbiosis.serving.scheduling.block_manager import BlockCopy

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.1


class ModelRunner:
    """Owns the model, which serves nothing else from now on."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv_cache: PagedKVCache,
        parallel: ParallelModel | None = None,
        *,
        adapters: ActiveAdapters | None = None,
        packed: dict[PackedKey, FusedProjection] | None = None,
    ) -> None:
        """`parallel`, if the model is this shard's part of one.

        `adapters` and `packed` are shared with runners of other models.

        Raises `CannotServe` if the model's results over a paged KV cache differ from its own.
        """
        if any(hasattr(module, "symbiosis_kv_cache") for module in model.modules()):
            raise CannotServe("this model is served by an engine already: give each engine a model of its own")
        self.model, self.kv_cache, self._adapters = model, kv_cache, adapters or ActiveAdapters()
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self.packed_bytes = 0
        """Of packed copies of weights."""
        with torch.inference_mode():
            ids = probe_ids(model)
            if parallel is None:
                expected = model(input_ids=ids[None], use_cache=False).logits[0, -1]
            else:
                expected = parallel.probe_logits[-1]
            use_paged_attention(model, kv_cache)
            install_lora_layers(model, self._adapters, {} if parallel is None else parallel.layers)
            if kernels.run_on(model.device):
                patch_fused_ops(model)
                patch_gated_mlps(model)
            found = self._probe(ids)
            if kernels.run_on(model.device):
                fuse_layers_gpu(model, self._adapters)
            elif model.device.type == "cpu":
                self.packed_bytes = pack_projections(model, packed)
                fuse_layers_cpu(model, self._adapters)
            if not is_close(self._probe(ids), found):
                unfuse_layers(model)
        if not are_close_logits(found, expected):
            when = "several sequences share a batch" if parallel is None else "shards share its layers"
            raise CannotServe(f"{type(model).__name__} cannot be served: its results differ when {when}")

    def _probe(self, ids: Tensor) -> Tensor:
        """The last logits of a sequence in three chunks, batched with another sequence."""
        num_blocks = -(-PROBE_TOKENS // self.kv_cache.block_size) + 1
        for start, end in ((0, 5), (5, PROBE_TOKENS - 1), (PROBE_TOKENS - 1, PROBE_TOKENS)):
            self.kv_cache.begin([Span(0, 1, 0, [num_blocks]), Span(1, end - start, start, range(num_blocks))])
            self._adapters.begin_batch((), ())
            rows, positions = torch.cat([ids[:1], ids[start:end]]), torch.arange(start, end, device=ids.device)
            output = self.model(
                input_ids=rows[None], position_ids=torch.cat([positions.new_zeros(1), positions])[None], use_cache=False
            )
        last: Tensor = output.logits[0, -1]
        return last

    def add(self, packed: PackedAdapter) -> None:
        """An adapter has become resident. Between steps only."""

    def forget(self, adapter: EngineAdapter) -> None:
        """Drop references to an adapter whose memory is about to be reused. Between steps only."""
        self._adapters.forget(adapter)

    def use_table(self, table: SlotTable) -> None:
        """Apply adapters by kernels, with weights from this table."""
        self._adapters.table = table

    def use_kernels(self, table: SlotTable, max_blocks: int) -> None:
        """Apply adapters by kernels, with weights from this table, and run batches as CUDA graphs."""
        self.use_table(table)
        arguments, device = (self.model, self.kv_cache, self._adapters, max_blocks), self.model.device
        # memory of their own: a capture that fails may make it unusable
        self._decode_graphs = DecodeGraphs(*arguments, PassCapture(device))
        self._prefill_graphs = PrefillGraphs(*arguments, PassCapture(device))

    @torch.inference_mode()
    def compute(self, batch: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `batch.sampled`, [B, V], valid until the next call. `adapters` has those of its sequences, by hash."""
        self.copy_blocks(batch.copies)
        logits_BV = None
        if self._decode_graphs is not None and all(chunk.count == 1 and chunk.samples for chunk in batch.chunks):
            ids = [chunk.sequence.tokens[chunk.start] for chunk in batch.chunks]
            logits_BV = self._decode(batch.chunks, ids, adapters)
        elif self._prefill_graphs is not None:
            made = ModelInput.of([InputChunk.of(chunk) for chunk in batch.chunks], adapters)
            logits_BV = self._prefill_graphs.compute(made)
            return self._run(made) if logits_BV is None else logits_BV
        return self.forward([InputChunk.of(chunk) for chunk in batch.chunks], adapters) if logits_BV is None else logits_BV

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks of the KV cache, (source, destination); all are read before any is written."""
        self.kv_cache.copy(copies)

    def is_sound(self) -> bool:
        """Whether the device still computes: some CUDA errors are permanent."""
        return is_device_alive(self.model.device)

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
                extend_segments(segments, adapter, row, row + 1)
        assert self._decode_graphs is not None
        before = [chunk.start for chunk in chunks]
        return self._decode_graphs.compute(ids, before, [chunk.sequence.block_table for chunk in chunks], segments)

    @torch.inference_mode()
    def forward(self, chunks: Seq[InputChunk], adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of the last token of each chunk that samples."""
        return self._run(ModelInput.of(chunks, adapters))

    def _run(self, made: ModelInput) -> Tensor:
        """The same without a CUDA graph."""
        self.kv_cache.begin(made.spans, made.prefixes)
        self._adapters.begin_batch(made.segments, made.head_segments, (len(made.ids), len(made.sampled_rows)))
        return run_model(self.model, made)


def are_close_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether both are equal up to the rounding of a whole model."""
    tolerance = _TOLERANCE.get(expected.dtype, _LOW_PRECISION_TOLERANCE) * float(expected.abs().max())
    return torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance)


def run_model(model: PreTrainedModel, made: ModelInput) -> Tensor:
    """The logits of the rows that the head reads, of a batch that was begun."""
    device = model.device
    inputs = {"input_ids": torch.tensor(made.ids, device=device)[None]}
    if made.embeds:
        rows = model.get_input_embeddings()(inputs.pop("input_ids"))
        for start, values in made.embeds:
            rows[0, start : start + len(values)] = values
        inputs["inputs_embeds"] = rows
    output = model(
        **inputs,
        position_ids=torch.tensor(made.positions, device=device)[None],
        use_cache=False,
        logits_to_keep=torch.tensor(made.sampled_rows, device=device, dtype=torch.int64),
    )
    logits_BV: Tensor = output.logits[0]
    return logits_BV
