"""Which activations count as silu."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from symbiosis.models.patches.gated_mlp import is_silu


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_silu_by_any_name(name):
    assert is_silu(ACT2FN[name])


@pytest.mark.parametrize(
    "function", [ACT2FN["gelu"], ACT2FN["gelu_pytorch_tanh"], ACT2FN["relu"], lambda x: F.silu(x.clamp(max=7.0)), torch.sigmoid]
)
def test_functions_close_to_silu_near_zero_only_are_not_silu(function):
    assert not is_silu(function)
