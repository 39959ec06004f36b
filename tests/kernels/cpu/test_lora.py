"""The LoRA kernel for CPUs against two products for each adapter."""

from __future__ import annotations

import random

import pytest
import torch

from symbiosis.kernels.cpu.library import is_compiled
from symbiosis.kernels.cpu.lora import LoraBatchCpu, LoraRow, reference

pytestmark = pytest.mark.skipif(not is_compiled(), reason="not compiled")
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1}}


def weights(rank, inputs, width, dtype=torch.float32, seed=0):
    """As they are loaded on a CPU: columns first."""
    generator = torch.Generator().manual_seed(seed)
    a_Ir, b_rO = (torch.randn(shape, generator=generator).to(dtype) for shape in ((inputs, rank), (rank, width)))
    return a_Ir.T, b_rO.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_many_adapters_at_once(seed, dtype):
    """Ranks, widths and numbers of rows that fill no vector and no tile too."""
    choose = random.Random(seed)
    inputs, widths = choose.choice([1, 7, 64, 577]), [choose.choice([1, 5, 8, 64, 515, 1030]) for _ in range(3)]
    deltas, row = [], choose.randrange(3)
    for adapter in range(5):
        rows = slice(row, row + choose.choice([1, 2, 3, 4, 5, 9, 16]))
        row = rows.stop + choose.randrange(2)
        column = 0
        for width in widths:
            if choose.random() < 0.7:
                rank = choose.choice([1, 2, 3, 4, 8, 13, 16, 33, 64])
                deltas.append((rows, slice(column, column + width), weights(rank, inputs, width, dtype, seed=adapter)))
            column += width
    x, y = torch.randn(row + 2, inputs + 3).to(dtype)[:, :inputs], torch.randn(row + 2, column + 5).to(dtype)
    expected, found = y.float(), y.clone()
    for rows, columns, (a_rI, b_Or) in deltas:
        reference(x.float(), expected, rows, columns, a_rI.float(), b_Or.float())
    LoraBatchCpu([(rows, columns, LoraRow.of(*both)) for rows, columns, both in deltas], inputs).add(x, found)
    torch.testing.assert_close(found.float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    x, both = torch.randn(11, 96).to(dtype), weights(19, 96, 40, dtype)
    together, alone = torch.zeros(11, 40, dtype=dtype), torch.zeros(11, 40, dtype=dtype)
    LoraBatchCpu([(slice(0, 11), slice(0, 40), LoraRow.of(*both))], 96).add(x, together)
    for row in range(11):
        LoraBatchCpu([(slice(0, 1), slice(0, 40), LoraRow.of(*both))], 96).add(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)


def test_any_number_of_threads_gives_the_same_bits():
    held = [weights(16, 100, 200, seed=i) for i in range(9)]
    deltas = [(slice(4 * i, 4 * i + 4), slice(0, 200), LoraRow.of(*both)) for i, both in enumerate(held)]
    x, before = torch.randn(36, 100), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(torch.zeros(36, 200))
            LoraBatchCpu(deltas, 100).add(x, found[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_unsupported_weights():
    a_rI, b_Or = weights(3, 5, 8)
    assert LoraRow.of(a_rI, b_Or) is not None
    assert LoraRow.of(a_rI.contiguous(), b_Or) is None, "another layout"
    assert LoraRow.of(*weights(513, 5, 8)) is None
    assert LoraRow.of(*weights(3, 5, 8, torch.float16)) is None
    assert LoraRow.of(a_rI.bfloat16(), b_Or) is None
    line = LoraRow.of(*weights(16, 5, 8))
    assert line.is_for(64)
    assert not line.is_for(65), "the reference is faster"
