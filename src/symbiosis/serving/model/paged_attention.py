"""Attention of an unmodified transformers model over a paged KV cache.

transformers lets a model name its attention function. The function here writes the new rows' keys and values to their
blocks and attends from each row to its own sequence. The sequences of a batch are concatenated; only this function
distinguishes them.

R = rows of a batch, H = query heads, K = key heads, D = width of a head, P = blocks of a sequence.
B = sequences, T = tokens of a sequence, L = layers. A slot is a token's place in the cache: block x block size + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.errors import CannotServe
from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.cpu import fused_ops
from symbiosis.kernels.cpu.attention import DecodeAttention, fits
from symbiosis.kernels.tiles import Span
from symbiosis.models.attention_registry import register_attention

NAME = "symbiosis_paged"
_MAX_GATHERED_KEYS = 16384  # of prefill chunks that are computed together


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values that an adapter supplies for some rows (prefix tuning), instead of those the model computes."""

    start: int
    """The first of these rows in the batch."""
    keys_LTKD: Tensor
    values_LTKD: Tensor


class PagedKVCache:
    """Keys and values of all layers, in blocks; and the batch that is computed."""

    def __init__(
        self, *, layers: int, heads: int, width: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shape = (layers, 2, num_blocks * block_size, heads, width)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self._has_kernels = kernels.run_on(device)
        self._batch: _TorchBatch | _KernelBatch | None = None

    @property
    def batch(self) -> Any:
        """What the layers read of the current batch. May be set again while its keys and values are valid."""
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch = batch

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def by_block(self) -> Tensor:
        """Keys and values as [layers, 2, blocks, tokens of a block, K, D]."""
        return self._memory.view(*self._memory.shape[:2], -1, self.block_size, *self._memory.shape[3:])

    def begin(self, spans: Sequence[Span], prefixes: Sequence[PrefixKV] = ()) -> None:
        """Set the rows of the next forward pass."""
        device = self._memory.device
        if not self._has_kernels:
            self._batch = _TorchBatch(spans, prefixes, self.block_size, device)
            return
        self._batch = _KernelBatch(AttentionBatch.of(spans, self.block_size, device), prefixes)

    def use(self, batch: AttentionBatch) -> None:
        """Use this batch, which is refilled in place, until the next `begin`."""
        self._batch = _KernelBatch(batch, ())

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination); all are read before any is written."""
        if blocks:
            by_block = self.by_block
            source, target = (torch.tensor(numbers, device=self._memory.device) for numbers in zip(*blocks, strict=True))
            by_block[:, :, target] = by_block[:, :, source]

    def attend(
        self, layer: int, q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Store the rows' keys and values, and attend from each row to its sequence: [R, H, D]."""
        batch = self._batch
        assert batch is not None, "begin() must precede"
        keys, values = self._memory[layer, 0], self._memory[layer, 1]
        if isinstance(batch, _KernelBatch):
            from symbiosis.kernels.paged_attention import attend, store

            by_row = (x.transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
            q_RHD, k_RKD, v_RKD = (x if x.stride(-1) == 1 else x.contiguous() for x in by_row)
            store(k_RKD, v_RKD, batch.slots_R, keys, values)
            _store_prefixes(batch.prefixes, layer, keys, values)
            return attend(q_RHD, keys, values, batch.attention, scale=scale, window=window, cap=cap)
        keys.index_copy_(0, batch.slots_R, k_KRD.transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, batch.slots_R, v_KRD.transpose(0, 1).to(values.dtype))
        _store_prefixes(batch.prefixes, layer, keys, values)
        return batch.attend(q_HRD.transpose(0, 1), keys, values, scale=scale, window=window, cap=cap)

    def rotate_store_attend_cpu(self, layer: int, qkv_RAD: Tensor, embeddings: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        """`attend` from concatenated queries, keys and values before rotary embedding, without a GPU.

        `embeddings` are its cosines and sines, [1, R, D]. `options` are those of `attend`.
        """
        batch = self._batch
        assert isinstance(batch, _TorchBatch), "begin() must precede"
        keys, values = self._memory[layer, 0], self._memory[layer, 1]
        q_RHD = fused_ops.rope_and_store(qkv_RAD, (embeddings[0][0], embeddings[1][0]), batch.slots_R, keys, values)
        _store_prefixes(batch.prefixes, layer, keys, values)
        return batch.attend(q_RHD, keys, values, **options)

    def rotate_store_attend(
        self, layer: int, qkv_RO: Tensor, embeddings: tuple[Tensor, Tensor], delta: Any = None, **options: Any
    ) -> Tensor:
        """The same by GPU kernels.

        `embeddings` are its cosines and sines, [1, R, D]. `delta` is a deferred LoRA delta of the three, if any. `options`
        are those of `attend`.
        """
        from symbiosis.kernels.paged_attention import attend
        from symbiosis.kernels.rope_and_store import rope_and_store

        batch = self._batch
        assert isinstance(batch, _KernelBatch), "begin() must precede"
        keys, values = self._memory[layer, 0], self._memory[layer, 1]
        q_RHD = rope_and_store(qkv_RO, embeddings[0][0], embeddings[1][0], batch.slots_R, keys, values, delta)
        _store_prefixes(batch.prefixes, layer, keys, values)
        return attend(q_RHD, keys, values, batch.attention, **options)


def create_kv_cache(model: PreTrainedModel, facts: ModelFacts, kv_heads: int, num_blocks: int, block_size: int) -> PagedKVCache:
    """The cache of a model, or of a shard's part of it with so many key-value heads."""
    return PagedKVCache(
        layers=facts.layers,
        heads=kv_heads,
        width=facts.head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Attention of grouped queries, [B, K, rows of a group, D]; the bias is -inf for masked tokens."""
    if cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).to(v.dtype) @ v


def _slots(block_table: Sequence[int], block_size: int, start: int, end: int) -> Tensor:
    """The slots of the tokens from `start` to `end` of a sequence."""
    positions = torch.arange(start, end)
    return torch.tensor(block_table)[positions // block_size] * block_size + positions % block_size


def _store_prefixes(prefixes: Sequence[tuple[Tensor, PrefixKV]], layer: int, keys: Tensor, values: Tensor) -> None:
    for slots, prefix in prefixes:
        keys.index_copy_(0, slots, prefix.keys_LTKD[layer].to(keys.dtype))
        values.index_copy_(0, slots, prefix.values_LTKD[layer].to(values.dtype))


def _mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """The causal bias of rows at these positions over `length` tokens, -inf where masked: [rows, T]."""
    other = torch.arange(length, device=positions.device)[None, :]
    allowed = other <= positions[:, None]
    if window is not None:
        allowed &= other > positions[:, None] - window
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class _PrefillGroup:
    """Adjacent prefill chunks with equal numbers of rows and of earlier tokens, computed as one."""

    def __init__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> None:
        first, self._num_spans = spans[0], len(spans)
        self.start, self.count, self.end = first.start, first.count, first.start + first.count * len(spans)
        self._num_before = first.before
        slots = [_slots(span.block_table, block_size, 0, span.before + span.count) for span in spans]
        self._slots = torch.cat(slots).to(device)
        self._biases: dict[tuple[int | None, torch.dtype, int], Tensor] = {}

    def gather(self, memory: Tensor) -> Tensor:
        """Keys or values of these sequences, [B, T, K, D]."""
        return memory.index_select(0, self._slots).view(self._num_spans, -1, *memory.shape[1:])

    def bias(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """The causal mask of one chunk's rows, once for each query head of a group."""
        key = (window, dtype, groups)
        if key not in self._biases:
            end = self._num_before + self.count
            positions = torch.arange(self._num_before, end, device=self._slots.device)
            self._biases[key] = _mask(positions, end, window, dtype).repeat(groups, 1)[None, None]
        return self._biases[key]


def _group_prefills(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of several rows, grouped for `_PrefillGroup`."""
    groups: list[list[Span]] = []
    for span in spans:
        if span.count == 1:
            continue
        last = groups[-1][-1] if groups else None
        kind = (span.start, span.count, span.before)
        follows = last is not None and (last.start + last.count, last.count, last.before) == kind
        if follows and len(groups[-1]) * (span.before + span.count) < _MAX_GATHERED_KEYS:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


class _TorchBatch:
    """What all layers of one forward pass share, by torch operations."""

    def __init__(self, spans: Sequence[Span], prefixes: Sequence[PrefixKV], block_size: int, device: torch.device) -> None:
        self.prefills = [_PrefillGroup(group, block_size, device) for group in _group_prefills(spans)]
        decodes = [span for span in spans if span.count == 1]
        if self.prefills:
            slots = [_slots(span.block_table, block_size, span.before, span.before + span.count) for span in spans]
            self.slots_R = torch.cat(slots).to(device)
        else:
            at = [span.block_table[span.before // block_size] * block_size + span.before % block_size for span in decodes]
            self.slots_R = torch.tensor(at, device=device)
        self.prefixes = [(self.slots_R[each.start : each.start + each.keys_LTKD.shape[1]], each) for each in prefixes]
        rows = torch.tensor([span.start for span in decodes], device=device)
        self.decode_rows = rows if decodes else None
        self._positions = torch.tensor([span.before for span in decodes], device=device)
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._padding_BT11: Tensor | None = None  # tokens after the end of their sequences, if any
        self._block_size, self._max_length = block_size, 0
        if decodes:
            self._max_length = length = max(span.before for span in decodes) + 1
            num_blocks = -(-length // block_size)
            tables = [[*span.block_table[:num_blocks], *[0] * (num_blocks - len(span.block_table))] for span in decodes]
            self._block_tables = torch.tensor(tables, device=device)
            self._decode_attention = DecodeAttention(rows, self._positions, self._block_tables, block_size)
            if min(span.before for span in decodes) + 1 < length:
                padding = torch.arange(length, device=device)[None, :] > self._positions[:, None]
                self._padding_BT11 = padding[:, :, None, None]

    def attend(
        self, q_RHD: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attention of all rows, [R, H, D]."""
        if self.decode_rows is not None:
            found = self._attend_decodes(q_RHD, keys, values, scale=scale, window=window, cap=cap)
            if not self.prefills:
                return found
        heads, width = q_RHD.shape[1:]
        groups = heads // keys.shape[1]
        out_RHD = torch.empty(len(q_RHD), heads, values.shape[-1], dtype=q_RHD.dtype, device=q_RHD.device)
        if self.decode_rows is not None:
            out_RHD[self.decode_rows] = found
        for prefill in self.prefills:
            rows, count = slice(prefill.start, prefill.end), prefill.count
            q = q_RHD[rows].view(-1, count, keys.shape[1], groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
            k, v = prefill.gather(keys).transpose(1, 2), prefill.gather(values).transpose(1, 2)
            found = _attend(q, k, v, prefill.bias(window, q_RHD.dtype, groups), scale, cap)
            out_BcKGD = out_RHD[rows].view(-1, count, keys.shape[1], groups, v.shape[-1])
            out_BcKGD.copy_(found.view(*found.shape[:2], groups, count, -1).permute(0, 3, 1, 2, 4))
        return out_RHD

    def _attend_decodes(
        self, q_RHD: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attention of the decode rows, [B, H, D]."""
        assert self.decode_rows is not None
        if fits(q_RHD, keys):
            return self._decode_attention.attend(q_RHD, keys, values, scale=scale, window=window, cap=cap)
        q_BHD = q_RHD[self.decode_rows] if self.prefills else q_RHD
        q = q_BHD.reshape(len(q_BHD), keys.shape[1], -1, q_BHD.shape[-1])
        k, v = self.gather(keys), self.gather(values)
        bias_B11T = self.bias(window, q_RHD.dtype)
        return _attend(q, k.transpose(1, 2), v.transpose(1, 2), bias_B11T, scale, cap).reshape(*q_BHD.shape[:2], -1)

    def gather(self, memory: Tensor) -> Tensor:
        """Keys or values of the decoding sequences, [B, T, K, D]. Whole blocks: 1.5 times as fast as single slots."""
        by_block = memory.view(-1, self._block_size * memory[0].numel()).index_select(0, self._block_tables.view(-1))
        found_BTKD = by_block.view(len(self._positions), -1, *memory.shape[1:])[:, : self._max_length]
        if self._padding_BT11 is not None:  # it may hold NaN, for which a bias of -inf is not enough
            found_BTKD.masked_fill_(self._padding_BT11, 0.0)
        return found_BTKD

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask of each decode row, [B, 1, 1, T]; None if nothing is masked."""
        if self._padding_BT11 is None and (window is None or window >= self._max_length):
            return None
        if (window, dtype) not in self._biases:
            self._biases[window, dtype] = _mask(self._positions, self._max_length, window, dtype)[:, None, None]
        return self._biases[window, dtype]


class _KernelBatch:
    """The same for kernels."""

    def __init__(self, attention: AttentionBatch, prefixes: Sequence[PrefixKV]) -> None:
        self.attention, self.slots_R = attention, attention.slots_R
        self.prefixes = [(self.slots_R[p.start : p.start + p.keys_LTKD.shape[1]].long(), p) for p in prefixes]


def use_paged_attention(model: PreTrainedModel, kv_cache: PagedKVCache) -> None:
    """Make every attention module of this model use this KV cache."""
    register_attention(NAME, _attend_layer, CannotServe)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "symbiosis_kv_cache", kv_cache)
    model.set_attn_implementation(NAME)


def _attend_layer(
    module: nn.Module, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None, cap: float | None
) -> Tensor:
    kv_cache: PagedKVCache = module.symbiosis_kv_cache  # type: ignore[assignment]
    return kv_cache.attend(layer, *qkv, scale=scale, window=window, cap=cap)
