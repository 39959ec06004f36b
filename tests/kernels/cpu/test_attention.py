"""Decode attention over blocks against gathered keys and values.

Models with windows, caps and groups of heads: `tests/serving/model/test_paged_attention` has them with and without the kernel.
"""

from __future__ import annotations

import pytest
import torch

from symbiosis.kernels.cpu.attention import DecodeAttention, fits
from symbiosis.kernels.cpu.library import is_compiled

pytestmark = pytest.mark.skipif(not is_compiled(), reason="not compiled")
BLOCK_SIZE = 4


def plain(q_HD, keys_TKD, values_TKD, scale, window, cap):
    groups = q_HD.shape[0] // keys_TKD.shape[1]
    keys_THD, values_THD = (x.double().repeat_interleave(groups, 1) for x in (keys_TKD, values_TKD))
    scores_HT = torch.einsum("hd,thd->ht", q_HD.double(), keys_THD) * scale
    if cap is not None:
        scores_HT = cap * torch.tanh(scores_HT / cap)
    if window is not None:
        scores_HT[:, : max(0, len(keys_TKD) - window)] = float("-inf")
    return torch.einsum("ht,thd->hd", scores_HT.softmax(-1), values_THD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (17, 3.0), (None, 0.5)])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 8), (9, 3, 64), (10, 2, 24), (7, 1, 256)])
def test_equal_to_attention_over_gathered_blocks(heads, key_heads, width, window, cap, dtype):
    torch.manual_seed(0)
    positions = [0, 1, 3, 4, 15, 16, 40]
    blocks = torch.randperm(100)[: len(positions) * 11].view(len(positions), 11)
    memory = torch.full(
        (2, 100 * BLOCK_SIZE, key_heads, width), float("nan"), dtype=dtype
    )  # slots of no sequence must not be read
    rows = torch.tensor([2, 0, 8, 1, 5, 6, 9])
    q = (3 * torch.randn(heads, 10, width)).to(dtype).transpose(0, 1)
    expected = []
    for row, position, own in zip(rows, positions, blocks, strict=True):
        slots = (own[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[: position + 1]
        memory[:, slots] = torch.randn(2, position + 1, key_heads, width).to(dtype)
        expected.append(plain(q[row], *memory[:, slots], 0.3, window, cap))
    assert fits(q, memory[0])
    decode = DecodeAttention(rows, torch.tensor(positions), blocks, BLOCK_SIZE)
    found = decode.attend(q, memory[0], memory[1], scale=0.3, window=window, cap=cap)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found.double(), torch.stack(expected), **close)


@pytest.mark.parametrize("size", [1e-4, 1.0, 60.0])
def test_scores_of_any_size(size):
    torch.manual_seed(0)
    memory, q = torch.randn(2, 64, 2, 16), size * torch.randn(1, 4, 16)
    decode = DecodeAttention(torch.tensor([0]), torch.tensor([63]), torch.arange(16)[None], BLOCK_SIZE)
    found = decode.attend(q, memory[0], memory[1], scale=1.0, window=None, cap=None)
    torch.testing.assert_close(found[0].double(), plain(q[0], *memory, 1.0, None, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 3, 20])
def test_scores_of_minus_infinity(first):
    """They have no weight at any position, and others lose none."""
    torch.manual_seed(0)
    memory, q = torch.randn(2, 64, 1, 8), torch.rand(1, 2, 8) + 1
    memory[0, first : first + 17] = float("-inf")
    decode = DecodeAttention(torch.tensor([0]), torch.tensor([63]), torch.arange(16)[None], BLOCK_SIZE)
    found = decode.attend(q, memory[0], memory[1], scale=1.0, window=None, cap=None)
    torch.testing.assert_close(found[0].double(), plain(q[0], *memory, 1.0, None, None), rtol=1e-4, atol=1e-5)


def test_unsupported_shapes_and_dtypes():
    memory = torch.zeros(8, 2, 12)
    assert not fits(torch.zeros(1, 4, 12), memory), "no whole vectors"
    assert not fits(torch.zeros(1, 2, 264), torch.zeros(8, 2, 264)), "too wide"
    assert not fits(torch.zeros(1, 4, 16).half(), torch.zeros(8, 2, 16).half())
    assert not fits(torch.zeros(1, 4, 16), torch.zeros(8, 2, 16).bfloat16())
