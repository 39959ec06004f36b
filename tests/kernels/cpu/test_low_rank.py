"""The low-rank kernel for processors against two products for each adapter."""

from __future__ import annotations

import random

import pytest
import torch

from symbiosis.kernels.cpu.library import is_compiled
from symbiosis.kernels.cpu.low_rank import Change, Changes, fits, reference

pytestmark = pytest.mark.skipif(not is_compiled(), reason="not compiled")
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1}}


def change(rows, columns, rank, inputs, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((inputs, rank), (rank, columns.stop - columns.start))
    )
    return Change(rows, columns, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_many_adapters_at_once(seed, dtype):
    """Ranks, widths and numbers of rows that fill no vector and no tile too."""
    choose = random.Random(seed)
    inputs, widths = choose.choice([1, 7, 64, 577]), [choose.choice([1, 5, 8, 64, 515, 1030]) for _ in range(3)]
    changes, row = [], choose.randrange(3)
    for adapter in range(5):
        rows = slice(row, row + choose.choice([1, 2, 3, 4, 5, 9, 16]))
        row = rows.stop + choose.randrange(2)
        column = 0
        for width in widths:
            if choose.random() < 0.7:
                rank = choose.choice([1, 2, 3, 4, 8, 13, 16, 33, 64])
                changes.append(change(rows, slice(column, column + width), rank, inputs, dtype, seed=adapter))
            column += width
    x, y = torch.randn(row + 2, inputs + 3).to(dtype)[:, :inputs], torch.randn(row + 2, column + 5).to(dtype)
    expected, sums = y.float(), y.clone()
    for each in changes:
        assert fits(each)
        precise = Change(each.rows, each.columns, each.a_Ir.float(), each.b_rO.float())
        reference(precise, x.float(), expected)
    Changes(changes).add(x, sums)
    torch.testing.assert_close(sums.float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    x = torch.randn(11, 96).to(dtype)
    together, alone = torch.zeros(11, 40, dtype=dtype), torch.zeros(11, 40, dtype=dtype)
    whole = change(slice(0, 11), slice(0, 40), 19, 96, dtype)
    Changes([whole]).add(x, together)
    for row in range(11):
        Changes([Change(slice(0, 1), whole.columns, whole.a_Ir, whole.b_rO)]).add(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)


def test_any_number_of_threads_gives_the_same_bits():
    changes = [change(slice(4 * i, 4 * i + 4), slice(0, 200), 16, 100, seed=i) for i in range(9)]
    x, before = torch.randn(36, 100), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(torch.zeros(36, 200))
            Changes(changes).add(x, found[-1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_does_not_fit():
    fitting = change(slice(0, 4), slice(0, 8), 3, 5)
    assert fits(fitting)
    assert not fits(change(slice(0, 4), slice(0, 8), 513, 5))
    assert not fits(change(slice(0, 65), slice(0, 8), 16, 5)), "the reference is faster"
    assert not fits(Change(fitting.rows, fitting.columns, torch.randn(3, 5).T, fitting.b_rO)), "another layout"
    assert not fits(change(slice(0, 4), slice(0, 8), 3, 5, torch.float16))
