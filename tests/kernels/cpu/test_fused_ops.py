"""Ops of a decoder layer between its products, against torch."""

from __future__ import annotations

import pytest
import torch

from symbiosis.kernels.cpu import fused_ops
from symbiosis.kernels.cpu.library import is_compiled

pytestmark = pytest.mark.skipif(not is_compiled(), reason="not compiled")
ROWS = [1, 5, 40]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 48, 577])
def test_norm(rows, width):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width + 3)[:, :width], torch.randn(width)
    x *= torch.tensor([1e-6, 1e-3, 1.0, 1e4, 0.0])[torch.arange(rows) % 5][:, None]
    expected = fused_ops.rms_norm_reference(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(fused_ops.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 48, 577])
def test_residual_norm(rows, width):
    torch.manual_seed(0)
    x, delta, weight = torch.randn(rows, width + 3)[:, :width], torch.randn(rows, width), torch.randn(width)
    total = x + delta
    expected = fused_ops.rms_norm_reference(total.double(), weight.double(), 1e-5)
    found = fused_ops.residual_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, total)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(1, 1, 2), (6, 2, 10), (9, 3, 64)])
def test_rope_and_store(rows, heads, key_heads, width):
    torch.manual_seed(0)
    qkv = torch.randn(rows, heads + 2 * key_heads, width)
    embeddings = tuple(torch.randn(2, rows, width))
    slots = torch.randperm(100)[:rows]
    caches = [torch.randn(2, 100, key_heads, width)] * 2
    caches[1] = caches[0].clone()
    found = fused_ops.rope_and_store(qkv, embeddings, slots, *caches[0])
    expected = fused_ops.rope_and_store_reference(qkv, embeddings, slots, *caches[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0][1], caches[1][1])  # values are copied


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 96, 1030])
def test_silu_mul(rows, width):
    torch.manual_seed(0)
    x = 30 * torch.randn(rows, 2 * width)
    torch.testing.assert_close(fused_ops.silu_mul(x), fused_ops.silu_mul_reference(x), rtol=1e-5, atol=1e-6)


def test_gates_that_are_nan_or_too_large():
    gates = torch.tensor([float("inf"), 3e38, 200.0, 88.0, 0.0, -0.0, -88.0, -200.0, -3e38, float("nan"), 1e-40, -1e-40])
    x = torch.cat((gates, torch.ones(12)))[None]
    torch.testing.assert_close(fused_ops.silu_mul(x), fused_ops.silu_mul_reference(x), rtol=1e-5, atol=1e-35, equal_nan=True)


def test_other_dtypes_use_the_reference():
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(16).bfloat16()
    assert torch.equal(fused_ops.rms_norm(x, weight, 1e-5), fused_ops.rms_norm_reference(x, weight, 1e-5))
    assert torch.equal(fused_ops.silu_mul(x), fused_ops.silu_mul_reference(x))
