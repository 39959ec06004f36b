"""The kernel against its plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.rotary import reference, rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []


def both(compute, q, k, cos, sin):
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    results = compute(q, k, cos, sin)
    generator = torch.Generator(DEVICE).manual_seed(1)
    upstream = [torch.randn(r.shape, device=DEVICE, generator=generator).to(r.dtype) for r in results]
    return *results, *torch.autograd.grad(results, (q, k), upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "kv_heads"), [((2, 5, 4, 8), 2), ((1, 1, 3, 20), 3), ((3, 7, 6, 64), 1), ((2, 0, 4, 8), 2)])
@pytest.mark.parametrize("one_table", [False, True])
def test_results_and_gradients_are_those_of_the_reference(shape, kv_heads, dtype, one_table):
    torch.manual_seed(0)
    batch, tokens, heads, width = shape
    q = torch.randn(batch, tokens, heads, width, device=DEVICE, dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, tokens, kv_heads, width, device=DEVICE, dtype=dtype).transpose(1, 2)
    cos, sin = (torch.randn(1 if one_table else batch, tokens, width, device=DEVICE, dtype=dtype) for _ in range(2))
    for ours, plain in zip(both(rotary, q, k, cos, sin), both(reference, q, k, cos, sin), strict=True):
        # rounded where the reference rounds; but Triton's interpreter cuts instead of rounding
        tolerance = 1e-5 if dtype is torch.float32 else 8e-3 if DEVICE == "cuda" else 6e-2
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_queries_that_are_a_part_of_a_fused_projection():
    fused = torch.randn(2, 5, 3, 4, 16, device=DEVICE)
    q, k = fused[:, :, 0].transpose(1, 2), fused[:, :, 1].transpose(1, 2)
    cos, sin = torch.randn(2, 5, 16, device=DEVICE), torch.randn(2, 5, 16, device=DEVICE)
    for ours, plain in zip(rotary(q, k, cos, sin), reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, plain)
