"""The kernels against their plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.lora.grouped import GroupedRows, grouped_lora, reference
from symbiosis.kernels.tiles import Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Triton's interpreter cuts bfloat16 instead of rounding
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def both(counts, ranks, width, out, dtype, poison=None):
    """Results and gradients of the kernels, and of autograd; rank 0 is no delta."""
    torch.manual_seed(0)
    rows = sum(counts)
    x = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight = (torch.randn(out, width, device=DEVICE) / width**0.5).to(dtype)
    upstream = torch.randn(rows, out, device=DEVICE).to(dtype)
    starts = [sum(counts[:slot]) for slot in range(len(counts))]
    segments = [Segment(slot, start, count) for slot, (start, count) in enumerate(zip(starts, counts, strict=True))]
    if poison is not None:
        x[starts[poison] : starts[poison] + counts[poison]] = float("nan")
    operands = [
        (
            (torch.randn(rank, width, device=DEVICE) / width**0.5).requires_grad_(),
            torch.randn(out, rank, device=DEVICE).requires_grad_(),
            0.5 + slot,
        )
        for slot, rank in enumerate(ranks)
    ]
    gradients = [(torch.full_like(a, 7.0), torch.full_like(b, 7.0)) for a, b, _ in operands]
    table = torch.tensor(
        [
            [a.data_ptr(), b.data_ptr(), len(a), ga.data_ptr(), gb.data_ptr()]
            for (a, b, _), (ga, gb) in zip(operands, gradients, strict=True)
        ]
    ).to(DEVICE)
    scales = torch.tensor([scale for *_, scale in operands], device=DEVICE)
    anchor = torch.zeros((), device=DEVICE, requires_grad=True)
    plan = GroupedRows.of(segments, max(ranks), torch.device(DEVICE))
    mine = x.clone().requires_grad_()
    y = grouped_lora(mine, weight, None, table, scales, plan, anchor)
    y.backward(upstream)
    found = [y.detach(), mine.grad, *(g for pair in gradients for g in pair)]
    theirs = x.clone().requires_grad_()
    plain = reference(theirs, F.linear(theirs, weight), segments, operands)
    plain.backward(upstream)
    expected = [plain.detach(), theirs.grad, *(g for a, b, _ in operands for g in (a.grad, b.grad))]
    return found, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "ranks", "width", "out"),
    [
        ((70, 1, 33), (8, 3, 16), 96, 300),
        ((40,), (1,), 130, 17),
        ((5, 6), (0, 100), 64, 64),
        ((64, 0, 32), (8, 8, 24), 256, 32),
    ],
)
def test_forward_and_backward(counts, ranks, width, out, dtype):
    for found, expected in zip(*both(counts, ranks, width, out, dtype), strict=True):
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype] * max(scale, 1e-3))


def test_a_nan_stays_in_the_rows_of_its_adapter():
    clean, _ = both((40, 33, 20), (8, 4, 16), 96, 64, torch.float32)
    found, _ = both((40, 33, 20), (8, 4, 16), 96, 64, torch.float32, poison=1)
    for at, (mine, expected) in enumerate(zip(found, clean, strict=True)):
        if at < 2:
            keep = [*range(40), *range(73, 93)]
            assert torch.equal(mine[keep], expected[keep])
        elif at not in (4, 5):
            assert torch.equal(mine, expected)


def test_adapters_get_gradients_where_the_input_needs_none():
    anchor = torch.zeros((), device=DEVICE, requires_grad=True)
    a, b = torch.randn(8, 32, device=DEVICE), torch.randn(16, 8, device=DEVICE)
    ga, gb = torch.zeros_like(a), torch.zeros_like(b)
    table = torch.tensor([[t.data_ptr() if isinstance(t, torch.Tensor) else t for t in (a, b, 8, ga, gb)]]).to(DEVICE)
    plan = GroupedRows.of([Segment(0, 0, 20)], 8, torch.device(DEVICE))
    x, weight = torch.randn(20, 32, device=DEVICE), torch.randn(16, 32, device=DEVICE)
    y = grouped_lora(x, weight, None, table, torch.ones(1, device=DEVICE), plan, anchor)
    assert torch.autograd.grad(y.sum(), [anchor], allow_unused=True) == (None,)
    assert ga.abs().sum() > 0
    assert gb.abs().sum() > 0
