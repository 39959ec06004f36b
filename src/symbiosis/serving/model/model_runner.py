"""Computes a pass: the rows of all its sequences as one, through the unmodified model."""

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
from symbiosis.serving.lora.lora_layers import install_lora_layers
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter, VirtualTokens
from symbiosis.serving.lora.slot_table import SlotTable
from symbiosis.serving.model.cuda_graphs import DecodeGraphs
from symbiosis.serving.model.decoder_layer import is_close, restore
from symbiosis.serving.model.decoder_layer_cpu import straighten
from symbiosis.serving.model.decoder_layer_gpu import shorten
from symbiosis.serving.model.paged_attention import Given, PagedKVCache, use_pages
from symbiosis.serving.scheduling.batch import Batch, Chunk

_PROBE = 12
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.1


class ModelRunner:
    """Owns the model from now on: it serves passes and nothing else."""

    def __init__(self, model: PreTrainedModel, memory: PagedKVCache) -> None:
        """Raises `CannotServe` if the model computes something else over pages than by itself."""
        if any(hasattr(module, "symbiosis_memory") for module in model.modules()):
            raise CannotServe("this model is served by an engine already: give each engine a model of its own")
        self.model, self.memory, self._bank = model, memory, ActiveAdapters()
        self._decoder: DecodeGraphs | None = None
        with torch.inference_mode():
            ids = torch.arange(_PROBE, device=model.device).remainder(model.config.get_text_config().vocab_size)
            expected = model(input_ids=ids[None], use_cache=False).logits[0, -1]
            use_pages(model, memory)
            install_lora_layers(model, self._bank)
            if kernels.run_on(model.device):
                patch_fused_ops(model)
                patch_gated_mlps(model)
            found = self._probe(ids)
            if kernels.run_on(model.device):
                shorten(model, self._bank)
            elif model.device.type == "cpu":
                straighten(model, self._bank)
            if not is_close(self._probe(ids), found):
                restore(model)
        room = _TOLERANCE.get(model.dtype, _COARSE) * float(expected.abs().max())
        if not torch.allclose(found.float(), expected.float(), rtol=0, atol=room):
            raise CannotServe(
                f"{type(model).__name__} computes something else when its sequences lie behind each other: it cannot be served"
            )

    def _probe(self, ids: Tensor) -> Tensor:
        """The last logits of a sequence that comes in pieces, beside another."""
        pages, others = range(-(-_PROBE // self.memory.page_size) + 1), -(-_PROBE // self.memory.page_size) + 1
        for start, end in ((0, 5), (5, _PROBE - 1), (_PROBE - 1, _PROBE)):
            spans = [Span(0, 1, 0, [others]), Span(1, end - start, start, pages)]
            self.memory.begin(spans)
            self._bank.begin_batch((), ())
            rows, places = torch.cat([ids[:1], ids[start:end]]), torch.arange(start, end, device=ids.device)
            output = self.model(
                input_ids=rows[None], position_ids=torch.cat([places.new_zeros(1), places])[None], use_cache=False
            )
        last: Tensor = output.logits[0, -1]
        return last

    def forget(self, adapter: EngineAdapter) -> None:
        """Its memory is about to be another's. Between passes."""
        self._bank.forget(adapter)

    def use_kernels(self, table: SlotTable, max_pages: int) -> None:
        """Let kernels apply adapters, by this table, and passes that only decode be CUDA graphs."""
        self._bank.table = table
        self._decoder = DecodeGraphs(self.model, self.memory, self._bank, max_pages)

    @torch.inference_mode()
    def compute(self, made: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        """The logits of `made.sampled`, [B, V]. `adapters` has those of its sequences, by hash."""
        self.memory.copy(made.copies)
        found = None
        if self._decoder is not None and all(chunk.count == 1 and chunk.samples for chunk in made.chunks):
            ids = [chunk.sequence.tokens[chunk.start] for chunk in made.chunks]
            found = self._decoded(made.chunks, ids, adapters)
        return self._computed(made, adapters) if found is None else found

    @property
    def can_run_ahead(self) -> bool:
        """Whether a pass can be launched without waiting for its tokens."""
        return self._decoder is not None

    @torch.inference_mode()
    def compute_next(self, chunks: Seq[Chunk], tokens_B: Tensor, adapters: Mapping[str, EngineAdapter]) -> Tensor | None:
        """The logits after tokens that only the device knows, one for each chunk, if that can be launched at once."""
        return self._decoded(chunks, tokens_B, adapters)

    def _decoded(self, chunks: Seq[Chunk], ids: Seq[int] | Tensor, adapters: Mapping[str, EngineAdapter]) -> Tensor | None:
        """Rows of one token each as a CUDA graph, if all of it can be one."""
        spans: list[Span] = []
        segments: list[AdapterSegment] = []
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            adapter = adapters[sequence.adapter] if sequence.adapter else None
            if adapter is not None:
                if not adapter.decodes_by_table or (adapter.virtual is not None and chunk.start < adapter.virtual.count):
                    return None
                _extend(segments, adapter, row, row + 1)
            spans.append(Span(row, 1, chunk.start, sequence.pages))
        assert self._decoder is not None
        return self._decoder.compute(ids, spans, segments)

    def _computed(self, made: Batch, adapters: Mapping[str, EngineAdapter]) -> Tensor:
        spans: list[Span] = []
        given: list[Given] = []
        segments: list[AdapterSegment] = []
        heads: list[AdapterSegment] = []
        embeds: list[tuple[int, Tensor]] = []
        wanted: list[int] = []
        ids: list[int] = []
        places: list[int] = []
        for chunk in made.chunks:
            row, sequence = len(ids), chunk.sequence
            end = chunk.start + chunk.count
            ids += sequence.tokens[chunk.start : end]
            places += range(chunk.start, end)
            spans.append(Span(row, chunk.count, chunk.start, sequence.pages))
            adapter = adapters[sequence.adapter] if sequence.adapter else None
            if adapter is not None:
                _extend(segments, adapter, row, row + chunk.count)
                if chunk.samples:
                    _extend(heads, adapter, len(wanted), len(wanted) + 1)
                if adapter.virtual is not None and chunk.start < adapter.virtual.count:
                    _add_virtual(chunk, row, adapter.virtual, given, embeds)
            if chunk.samples:
                wanted.append(row + chunk.count - 1)
        self.memory.begin(spans, given)
        self._bank.begin_batch(segments, heads, (len(ids), len(wanted)))
        device = self.model.device
        inputs = {"input_ids": torch.tensor(ids, device=device)[None]}
        if embeds:
            rows = self.model.get_input_embeddings()(inputs.pop("input_ids"))
            for start, values in embeds:
                rows[0, start : start + len(values)] = values
            inputs["inputs_embeds"] = rows
        output = self.model(
            **inputs,
            position_ids=torch.tensor(places, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, device=device, dtype=torch.int64),
        )
        logits: Tensor = output.logits[0]
        return logits


def _extend(segments: list[AdapterSegment], adapter: EngineAdapter, start: int, end: int) -> None:
    """Rows of one adapter lie together: one segment for all of them."""
    if segments and segments[-1].adapter is adapter and segments[-1].end == start:
        segments[-1] = AdapterSegment(adapter, segments[-1].start, end)
    else:
        segments.append(AdapterSegment(adapter, start, end))


def _add_virtual(chunk: Chunk, row: int, virtual: VirtualTokens, given: list[Given], embeds: list[tuple[int, Tensor]]) -> None:
    """The virtual tokens among a chunk's rows."""
    start, end = chunk.start, min(virtual.count, chunk.start + chunk.count)
    if virtual.embeddings_TD is not None:
        embeds.append((row, virtual.embeddings_TD[start:end]))
    else:
        assert virtual.keys_LTKD is not None
        assert virtual.values_LTKD is not None
        given.append(Given(row, virtual.keys_LTKD[:, start:end], virtual.values_LTKD[:, start:end]))
