"""Attention of an unmodified transformers model over pages of keys and values.

transformers lets a model name its attention function; ours writes the new
rows' keys and values to their pages and attends from each row to its own
sequence. All sequences of a pass lie behind each other as if they were one:
only this function knows where one ends.

R = rows of a pass, H = query heads, K = key heads, D = width of a head, P = pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from symbiosis import kernels
from symbiosis.errors import CannotServe
from symbiosis.kernels.cpu.attention import DecodeAttention, fits
from symbiosis.kernels.tiles import Span
from symbiosis.models.attention_checks import no_mask, unsupported_reason

NAME = "symbiosis_pages"
_KEYS_AT_ONCE = 16384  # gathered for prompts that are computed together


@dataclass(frozen=True, slots=True)
class Given:
    """Rows whose keys and values an adapter gives (prefix tuning): what the model computes for them is not kept."""

    start: int
    """The first of these rows in the pass."""
    keys_LTKD: Tensor
    values_LTKD: Tensor


class PagedKVCache:
    """Keys and values of all layers, in pages; and which pass is running."""

    def __init__(
        self, *, layers: int, heads: int, width: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        shape = (layers, 2, pages * page_size, heads, width)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self._by_kernels = kernels.run_on(device)
        self._pass: _Pass | _KernelPass | None = None

    def begin(self, spans: Sequence[Span], given: Sequence[Given] = ()) -> None:
        """The rows of the next pass through the model; and of which of them keys and values are given."""
        device = self._memory.device
        if not self._by_kernels:
            self._pass = _Pass(spans, given, self.page_size, device)
            return
        from symbiosis.kernels.paged_attention import AttentionBatch

        self._pass = _KernelPass(AttentionBatch.of(spans, self.page_size, device), given)

    def use(self, now: Any) -> None:
        """A pass of `kernels.paged_attention` that is filled again and again, for all passes until `begin`."""
        self._pass = _KernelPass(now, ())

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """(from, to): whole pages, all read before any is written."""
        if pages:
            shape = (*self._memory.shape[:2], -1, self.page_size, *self._memory.shape[3:])
            by_page = self._memory.view(shape)
            source, target = (torch.tensor(numbers, device=self._memory.device) for numbers in zip(*pages, strict=True))
            by_page[:, :, target] = by_page[:, :, source]

    def attend(
        self, layer: int, q_HRD: Tensor, k_KRD: Tensor, v_KRD: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """What each row reads from its sequence, [R, H, D]."""
        now = self._pass
        assert now is not None, "begin() comes first"
        keys, values = self._memory[layer, 0], self._memory[layer, 1]
        if isinstance(now, _KernelPass):
            q_RHD, k_RKD, v_RKD = (x.transpose(0, 1) for x in (q_HRD, k_KRD, v_KRD))
            return now.attend(layer, q_RHD, k_RKD, v_RKD, keys, values, scale=scale, window=window, cap=cap)
        keys.index_copy_(0, now.slots_R, k_KRD.transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, now.slots_R, v_KRD.transpose(0, 1).to(values.dtype))
        for slots, given in now.given:
            keys.index_copy_(0, slots, given.keys_LTKD[layer].to(keys.dtype))
            values.index_copy_(0, slots, given.values_LTKD[layer].to(values.dtype))
        heads, _, width = q_HRD.shape
        groups = heads // keys.shape[1]
        q_RHD = q_HRD.transpose(0, 1)
        if now.single is not None:
            found = now.attend(q_RHD, keys, values, scale=scale, window=window, cap=cap)
            if not now.several:
                return found
        out_RHD = torch.empty(q_HRD.shape[1], heads, v_KRD.shape[-1], dtype=q_HRD.dtype, device=q_HRD.device)
        if now.single is not None:
            out_RHD[now.single] = found
        for several in now.several:
            rows, count = slice(several.start, several.end), several.count
            q = q_RHD[rows].view(-1, count, keys.shape[1], groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
            k, v = several.gathered(keys).transpose(1, 2), several.gathered(values).transpose(1, 2)
            found = _attend(q, k, v, several.bias(window, q_HRD.dtype, groups), scale, cap)
            out_BcKGD = out_RHD[rows].view(-1, count, keys.shape[1], groups, v.shape[-1])
            out_BcKGD.copy_(found.view(*found.shape[:2], groups, count, -1).permute(0, 3, 1, 2, 4))
        return out_RHD

    def enter_and_attend(
        self,
        layer: int,
        qkv_RO: Tensor,
        embeddings: tuple[Tensor, Tensor],
        kept: Any = None,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        """The same by kernels, of queries, keys and values side by side and without their rotary positions yet.

        `embeddings` are the cosines and sines of these, [1, R, D]. Something of `kernels.kept` may be `kept` of the three.
        """
        assert isinstance(self._pass, _KernelPass), "begin() comes first"
        keys, values = self._memory[layer, 0], self._memory[layer, 1]
        return self._pass.enter_and_attend(layer, qkv_RO, embeddings, kept, keys, values, scale=scale, window=window, cap=cap)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """Attention of grouped queries, [B, K, rows of a group, D]; the bias is -inf where a row must not look."""
    if cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).to(v.dtype) @ v


def _slots(pages: Sequence[int], page_size: int, start: int, end: int) -> Tensor:
    """Where the tokens from `start` to `end` of a sequence lie."""
    at = torch.arange(start, end)
    return torch.tensor(pages)[at // page_size] * page_size + at % page_size


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class _Several:
    """Pieces of prompts: spans of as many rows each and as many tokens before, one behind the other."""

    def __init__(self, spans: Sequence[Span], page_size: int, device: torch.device) -> None:
        first, self._spans = spans[0], len(spans)
        self.start, self.count, self.end = first.start, first.count, first.start + first.count * len(spans)
        self._first = first.before
        slots = [_slots(span.block_table, page_size, 0, span.before + span.count) for span in spans]
        self._slots = torch.cat(slots).to(device)
        self._biases: dict[tuple[int | None, torch.dtype, int], Tensor] = {}

    def gathered(self, memory: Tensor) -> Tensor:
        """Keys or values of these sequences, [B, T, K, D]."""
        return memory.index_select(0, self._slots).view(self._spans, -1, *memory.shape[1:])

    def bias(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """Of the rows of any of them, once for every query head of a group."""
        key = (window, dtype, groups)
        if key not in self._biases:
            place = torch.arange(self._first, self._first + self.count, device=self._slots.device)[:, None]
            other = torch.arange(self._first + self.count, device=self._slots.device)[None, :]
            allowed = other <= place
            if window is not None:
                allowed &= other > place - window
            self._biases[key] = _bias(allowed, dtype).repeat(groups, 1)[None, None]
        return self._biases[key]


def _alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of several rows, those together that are computed as one."""
    found: list[list[Span]] = []
    for span in spans:
        if span.count == 1:
            continue
        last = found[-1][-1] if found else None
        kind = (span.start, span.count, span.before)
        follows = last is not None and (last.start + last.count, last.count, last.before) == kind
        if follows and len(found[-1]) * (span.before + span.count) < _KEYS_AT_ONCE:
            found[-1].append(span)
        else:
            found.append([span])
    return found


class _Pass:
    """What all layers of one pass need, made once."""

    def __init__(self, spans: Sequence[Span], given: Sequence[Given], page_size: int, device: torch.device) -> None:
        self.several = [_Several(alike, page_size, device) for alike in _alike(spans)]
        single = [span for span in spans if span.count == 1]
        if self.several:
            slots = [_slots(span.block_table, page_size, span.before, span.before + span.count) for span in spans]
            self.slots_R = torch.cat(slots).to(device)
        else:
            at = [span.block_table[span.before // page_size] * page_size + span.before % page_size for span in single]
            self.slots_R = torch.tensor(at, device=device)
        self.given = [(self.slots_R[each.start : each.start + each.keys_LTKD.shape[1]], each) for each in given]
        rows = torch.tensor([span.start for span in single], device=device)
        self.single = rows if single else None
        self._places = torch.tensor([span.before for span in single], device=device)
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._beyond_BT11: Tensor | None = None  # the places after the end of their sequences, if any
        self._page_size, self._longest = page_size, 0
        if single:
            self._longest = longest = max(span.before for span in single) + 1
            most = -(-longest // page_size)
            pages = [[*span.block_table[:most], *[0] * (most - len(span.block_table))] for span in single]
            self._pages = torch.tensor(pages, device=device)
            self._singles = DecodeAttention(rows, self._places, self._pages, page_size)
            if min(span.before for span in single) + 1 < longest:
                beyond = torch.arange(longest, device=device)[None, :] > self._places[:, None]
                self._beyond_BT11 = beyond[:, :, None, None]

    def attend(
        self, q_RHD: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """What the single rows read, [B, H, D]."""
        assert self.single is not None
        if fits(q_RHD, keys):
            return self._singles.attend(q_RHD, keys, values, scale=scale, window=window, cap=cap)
        q_BHD = q_RHD[self.single] if self.several else q_RHD
        q = q_BHD.reshape(len(q_BHD), keys.shape[1], -1, q_BHD.shape[-1])
        k, v = self.gathered(keys), self.gathered(values)
        bias_B11T = self.bias(window, q_RHD.dtype)
        return _attend(q, k.transpose(1, 2), v.transpose(1, 2), bias_B11T, scale, cap).reshape(*q_BHD.shape[:2], -1)

    def gathered(self, memory: Tensor) -> Tensor:
        """Keys or values of the single rows' sequences, [B, T, K, D]: whole pages, which is half again as fast as slots."""
        by_page = memory.view(-1, self._page_size * memory[0].numel()).index_select(0, self._pages.view(-1))
        found_BTKD = by_page.view(len(self._places), -1, *memory.shape[1:])[:, : self._longest]
        if self._beyond_BT11 is not None:  # what is there is another's, and may be no number: a bias of -inf is not enough
            found_BTKD.masked_fill_(self._beyond_BT11, 0.0)
        return found_BTKD

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Of each single row, [B, 1, 1, T]; None if each may look at all there is."""
        if self._beyond_BT11 is None and (window is None or window >= self._longest):
            return None
        if (window, dtype) not in self._biases:
            other = torch.arange(self._longest, device=self._places.device)[None, :]
            allowed = other <= self._places[:, None]
            if window is not None:
                allowed &= other > self._places[:, None] - window
            self._biases[window, dtype] = _bias(allowed, dtype)[:, None, None]
        return self._biases[window, dtype]


class _KernelPass:
    """The same by kernels."""

    def __init__(self, now: Any, given: Sequence[Given]) -> None:
        self._now = now
        self._given = [(now.slots_R[each.start : each.start + each.keys_LTKD.shape[1]].long(), each) for each in given]

    def attend(
        self,
        layer: int,
        q_RHD: Tensor,
        k_RKD: Tensor,
        v_RKD: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        from symbiosis.kernels.paged_attention import attend, store

        q_RHD, k_RKD, v_RKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_RHD, k_RKD, v_RKD))
        store(k_RKD, v_RKD, self._now.slots_R, keys, values)
        self._give(layer, keys, values)
        return attend(q_RHD, keys, values, self._now, scale=scale, window=window, cap=cap)

    def enter_and_attend(
        self,
        layer: int,
        qkv_RO: Tensor,
        embeddings: tuple[Tensor, Tensor],
        kept: Any,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        from symbiosis.kernels.paged_attention import attend
        from symbiosis.kernels.rope_and_store import rope_and_store

        q_RHD = rope_and_store(qkv_RO, embeddings[0][0], embeddings[1][0], self._now.slots_R, keys, values, kept)
        self._give(layer, keys, values)
        return attend(q_RHD, keys, values, self._now, scale=scale, window=window, cap=cap)

    def _give(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for slots, given in self._given:
            keys.index_copy_(0, slots, given.keys_LTKD[layer].to(keys.dtype))
            values.index_copy_(0, slots, given.values_LTKD[layer].to(values.dtype))


def use_pages(model: PreTrainedModel, memory: PagedKVCache) -> None:
    """Let every attention module of this model read and write this memory."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, no_mask)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "symbiosis_memory", memory)
    model.set_attn_implementation(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    reason = unsupported_reason(module, query, attention_mask, sliding_window, more)
    if reason is not None:
        raise CannotServe(f"{reason}, which pages do not have")
    memory: PagedKVCache = module.symbiosis_memory  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = memory.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        scale=scale,
        window=sliding_window,
        cap=softcap,
    )
    return found[None], None
