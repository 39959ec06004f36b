"""Decode attention over a long KV cache against plain attention in float64."""

from __future__ import annotations

import pytest
import torch

from symbiosis.kernels.cpu import flash_decoding
from symbiosis.kernels.cpu.flash_decoding import KVRange, attend, attend_reference, fits, read_memory
from symbiosis.kernels.cpu.library import is_compiled

needs_kernels = pytest.mark.skipif(not is_compiled(), reason="not compiled")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def cache(batch, key_heads, tokens, width, dtype, ranges):
    """Random keys and values; whatever no sequence attends to is NaN, or an extreme scale."""
    torch.manual_seed(0)
    numbers = torch.randn(2, batch, key_heads, tokens, width)
    scales = None
    if dtype is torch.int8:
        scales = numbers.abs().amax(-1) / 127
        numbers = (numbers / scales[..., None]).round().to(torch.int8)
    else:
        numbers = numbers.to(dtype)
    for index, (start, end) in enumerate(ranges):
        outside = [token for token in range(tokens) if not start <= token < end]
        if dtype is torch.int8:
            scales[:, index, :, outside] = float("nan")
        else:
            numbers[:, index, :, outside] = float("nan")
    starts, ends = zip(*ranges, strict=True)
    return KVRange(numbers[0], numbers[1], starts, ends, *([] if scales is None else scales))


def plain(q_BHD, kv, scale, cap=None):
    found = []
    for index, (start, end) in enumerate(zip(kv.starts, kv.ends, strict=True)):
        k, v = (each[index, :, start:end].double() for each in (kv.keys_BKTD, kv.values_BKTD))
        if kv.key_scales_BKT is not None:
            k = k * kv.key_scales_BKT[index, :, start:end, None].double()
            v = v * kv.value_scales_BKT[index, :, start:end, None].double()
        groups = q_BHD.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = torch.einsum("hd,htd->ht", q_BHD[index].double(), k) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        found.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(found)


def assert_close(found, expected, dtype):
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found.double(), expected, **close)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(
    ("key_heads", "group", "width"), [(3, 1, 32), (2, 2, 64), (1, 3, 80), (2, 4, 128), (1, 7, 96), (1, 16, 256)]
)
def test_equal_to_plain_attention(key_heads, group, width, cap, q_dtype, dtype):
    ranges = [(0, 1), (0, 200), (13, 64), (3, 68), (199, 200), (128, 191)]
    kv = cache(len(ranges), key_heads, 200, width, dtype, ranges)
    q = (2 * torch.randn(len(ranges), key_heads * group, width)).to(q_dtype)
    assert fits(q, kv)
    found = attend(q, kv, scale=width**-0.5, cap=cap)
    assert found.dtype is q_dtype
    assert_close(found, plain(q, kv, width**-0.5, cap), q_dtype)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 511, 512, 513, 1500])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_odd_lengths_split_among_threads(tokens, threads, monkeypatch):
    monkeypatch.setattr(flash_decoding, "_MIN_SPLIT", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kv = cache(1, 2, tokens + 5, 64, torch.bfloat16, [(2, tokens + 2)])
    q = torch.randn(1, 6, 64)
    assert_close(attend(q, kv, scale=0.3), plain(q, kv, 0.3), torch.float32)


@needs_kernels
@pytest.mark.parametrize("size", [1e-4, 1.0, 60.0])
def test_scores_of_any_size(size):
    kv = cache(1, 2, 200, 32, torch.float32, [(0, 200)])
    q = size * torch.randn(1, 4, 32)
    assert_close(attend(q, kv, scale=1.0), plain(q, kv, 1.0), torch.float32)


@needs_kernels
@pytest.mark.parametrize("first", [0, 3, 60, 500])
def test_scores_of_minus_infinity(first, monkeypatch):
    """They have no weight at any position, and others lose none."""
    monkeypatch.setattr(flash_decoding, "_MIN_SPLIT", 64)
    kv = cache(1, 1, 640, 16, torch.float32, [(0, 640)])
    kv.keys_BKTD[0, 0, first : first + 130] = float("-inf")
    q = torch.rand(1, 2, 16) + 1
    assert_close(attend(q, kv, scale=1.0), plain(q, kv, 1.0), torch.float32)


@needs_kernels
def test_a_nan_stays_with_its_sequence_and_head():
    kv = cache(2, 2, 100, 16, torch.float32, [(0, 100), (0, 100)])
    kv.keys_BKTD[1, 0, 50] = float("nan")
    found = attend(torch.randn(2, 4, 16), kv, scale=1.0)
    assert found[1, :2].isnan().all()
    assert not found[0].isnan().any()
    assert not found[1, 2:].isnan().any()


@needs_kernels
def test_strided_caches_and_queries():
    """A cache whose memory is larger than its tokens, one by tokens first, and queries of a larger tensor."""
    memory = torch.randn(2, 2, 3, 96, 32)
    q = torch.randn(2, 5, 6, 32).transpose(1, 2)[:, :, 2]
    for keys, values in ((memory[0, :, :, 5:90], memory[1, :, :, 5:90]), tuple(memory.view(2, 2, 96, 3, 32).transpose(2, 3))):
        kv = KVRange(keys, values, (0, 10), (80, 85))
        assert fits(q, kv)
        assert_close(attend(q, kv, scale=0.2), plain(q, kv, 0.2), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_reference_is_plain_attention(dtype, cap):
    kv = cache(2, 2, 40, 24, dtype, [(0, 40), (7, 22)])
    q = torch.randn(2, 6, 24)
    assert not fits(q, kv), "no whole columns"
    assert_close(attend(q, kv, scale=0.5, cap=cap), plain(q, kv, 0.5, cap), torch.float32)
    assert_close(attend_reference(q, kv, scale=0.5, cap=cap), plain(q, kv, 0.5, cap), torch.float32)


def test_unsupported_shapes_and_dtypes():
    def kv(dtype=torch.float32, width=16, value_width=16):
        return KVRange(torch.zeros(1, 2, 8, width).to(dtype), torch.zeros(1, 2, 8, value_width).to(dtype), [0], [8])

    assert not fits(torch.zeros(1, 4, 16).half(), kv())
    assert not fits(torch.zeros(1, 4, 16), kv(torch.float16))
    assert not fits(torch.zeros(1, 4, 16), kv(torch.int8)), "no scales"
    assert not fits(torch.zeros(1, 4, 16), kv(value_width=32))
    assert not fits(torch.zeros(1, 3, 16), kv()), "no whole groups"


@needs_kernels
def test_read_memory_sums_all_words():
    memory = torch.randint(0, 1 << 20, ((1 << 20) * 3 // 8,))
    assert read_memory(memory) == int(memory.sum())
