"""Which norms are patched, by a probe. Tests of the kernels: tests/kernels and tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from symbiosis.models.patches.fused_ops import FusedNorm, patch_fused_ops


class AtOnceRMSNorm(nn.Module):
    """Multiplies by the weight before it rounds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


class BareRMSNorm(AtOnceRMSNorm):
    """One class with and without a weight, as in some models."""

    def __init__(self, width: int, *, scaled: bool) -> None:
        super().__init__(width)
        if not scaled:
            del self.weight

    def forward(self, x):
        return super().forward(x) if hasattr(self, "weight") else x


class GatedRMSNorm(AtOnceRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


@pytest.mark.parametrize(
    ("norm", "dtype", "twice"),
    [
        (LlamaRMSNorm(64), torch.bfloat16, True),
        (LlamaRMSNorm(64), torch.float32, True),
        (AtOnceRMSNorm(64), torch.bfloat16, False),
        (Gemma2RMSNorm(64), torch.bfloat16, None),
        (GatedRMSNorm(64), torch.float32, None),
        (nn.RMSNorm(64), torch.float32, None),
        (nn.LayerNorm(64), torch.float32, None),
        (BareRMSNorm(64, scaled=False), torch.float32, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_norm_gets_the_kernel_with_its_rounding(norm, dtype, twice):
    patch_fused_ops(norm.to(dtype))
    assert isinstance(norm, FusedNorm) == (twice is not None)
    assert getattr(norm, "symbiosis_twice", None) is twice


def test_norms_of_one_class_are_probed_one_by_one_without_drawing_random_numbers():
    model = nn.Sequential(BareRMSNorm(8, scaled=True), BareRMSNorm(8, scaled=False))
    x = torch.randn(2, 8)
    expected = model(x)
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    patch_fused_ops(model)
    assert torch.equal(torch.rand(1), first)
    assert isinstance(model[0], FusedNorm)
    assert not isinstance(model[1], FusedNorm)
    assert torch.equal(model(x), expected)
