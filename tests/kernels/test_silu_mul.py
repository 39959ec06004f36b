"""The kernel against its plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.silu_mul import reference, silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 1100), (33, 96), (0, 64)])
def test_halves_of_one_tensor_and_two_tensors(rows, width, dtype):
    torch.manual_seed(0)
    both = (3 * torch.randn(rows, 2 * width, device=DEVICE)).to(dtype)
    gate, up = both.split(width, dim=1)
    expected = reference(gate, up)
    for found in (silu_mul(gate, up), silu_mul(gate.contiguous(), up)):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        if dtype is torch.bfloat16 and rows:
            assert (found != expected).float().mean() < 0.01  # rounded at the same places


def test_large_numbers_and_nan():
    gate = torch.tensor([[-200.0, 200.0, float("nan"), float("-inf"), 0.0]], device=DEVICE)
    torch.testing.assert_close(silu_mul(gate, torch.ones_like(gate)), reference(gate, torch.ones_like(gate)), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 1100), (33, 96), (0, 64)])
def test_gradients_are_the_references(rows, width, dtype):
    torch.manual_seed(0)
    both, upstream = (3 * torch.randn(rows, n * width, device=DEVICE).to(dtype) for n in (2, 1))
    found = []
    for function in (silu_mul, reference):
        mine = both.clone().requires_grad_()
        function(*mine.split(width, dim=1)).backward(upstream)
        found.append(mine.grad)
    torch.testing.assert_close(*found, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
