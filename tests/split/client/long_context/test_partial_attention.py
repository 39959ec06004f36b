"""Attention over segments of the context against attention over all of it; int8 numbers against the numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from symbiosis.split.client.long_context.partial_attention import (
    PartialAttention,
    attend_segment,
    attend_segment_reference,
)
from symbiosis.split.client.long_context.quantization import dequantize, quantize

SCALE = 0.3


def inputs(rows=5, tokens=37, heads=4, key_heads=2, width=16):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, heads, rows, width), *torch.randn(2, 2, key_heads, tokens, width)
    return q, k, v


@pytest.mark.parametrize("bounds", [(0, 37), (0, 1, 37), (0, 10, 20, 36, 37)], ids=str)
@pytest.mark.parametrize("attend", [attend_segment, attend_segment_reference])
def test_segments_combine_to_the_whole(attend, bounds):
    q, k, v = inputs()
    expected = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)
    found = None
    for start, end in pairwise(bounds):
        part = attend(q, k[:, :, start:end], v[:, :, start:end], scale=SCALE, cap=None, allowed_BRS=None)
        found = part if found is None else found.combine(part)
    torch.testing.assert_close(found.out_BHRD, expected, rtol=0, atol=1e-5)


def test_causal_rows():
    q, k, v = inputs(rows=37)
    expected = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True, is_causal=True)
    for cap in (None, 1e6):  # by flash attention, and by the plain reference
        found = attend_segment(q, k, v, scale=SCALE, cap=cap, causal=True)
        torch.testing.assert_close(found.out_BHRD, expected, rtol=0, atol=1e-4)


def test_rows_that_attend_to_nothing_are_zero_and_change_nothing():
    q, k, v = inputs()
    allowed = torch.zeros(1, 5, 37, dtype=torch.bool)
    allowed[:, 2:] = True
    found = attend_segment(q, k, v, scale=SCALE, allowed_BRS=allowed)
    assert (found.out_BHRD[:, :, :2] == 0).all()
    assert found.logsum_BHR[:, :, :2].isneginf().all()
    whole = attend_segment(q, k, v, scale=SCALE)
    both = found.combine(PartialAttention(torch.zeros_like(found.out_BHRD), torch.full_like(found.logsum_BHR, -torch.inf)))
    torch.testing.assert_close(both.out_BHRD[:, :, 2:], whole.out_BHRD[:, :, 2:], rtol=0, atol=1e-5)
    assert not both.out_BHRD.isnan().any()


def test_few_rows_at_a_time(monkeypatch):
    from symbiosis.split.client.long_context import partial_attention

    q, k, v = inputs()
    expected = attend_segment_reference(q, k, v, scale=SCALE, cap=2.0, allowed_BRS=None)
    monkeypatch.setattr(partial_attention, "_MAX_SCORES", 2 * 4 * 37 * 2)
    found = attend_segment_reference(q, k, v, scale=SCALE, cap=2.0, allowed_BRS=None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_int8_is_within_half_a_step_and_keeps_nan():
    numbers = torch.randn(3, 5, 16) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None]
    numbers[0, 0] = 0
    found = dequantize(*quantize(numbers), torch.float32)
    assert ((found - numbers).abs() <= numbers.abs().amax(-1, keepdim=True) / 127 / 2 * 1.001).all()
    numbers[1, 2, 3] = float("nan")
    numbers[2, 4, 0] = float("inf")
    broken = dequantize(*quantize(numbers), torch.float32).isnan().any(-1)
    assert broken.nonzero().tolist() == [[1, 2], [2, 4]]
