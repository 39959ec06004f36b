"""`linear` against `F.linear`, over all row counts where they may differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symbiosis.models.patches.linear import linear, patch_linears


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 31, 64, 96, 97, 200])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear_equals_the_reference(rows, bias, dtype):
    torch.manual_seed(rows)
    x, layer = torch.randn(rows, 48, dtype=dtype), nn.Linear(48, 80, bias=bias, dtype=dtype)
    with torch.no_grad():
        result = linear(x, layer.weight, layer.bias)
        assert result.is_contiguous()
        torch.testing.assert_close(result, layer(x), rtol=1e-5, atol=1e-6)


def test_patched_linears_have_equal_results_and_gradients():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(20, 16, requires_grad=True)
    plain = block(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    patch_linears(block)
    with torch.no_grad():
        torch.testing.assert_close(block(x), plain)
    (actual,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
