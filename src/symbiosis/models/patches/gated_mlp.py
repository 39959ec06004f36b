"""Gated MLPs with their middle, silu(gate) * up, as one kernel.

Names only suggest where it may stand; whether it computes what the model's own
code computes is tried out first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.models.patches.mixin import mix_in

_NAMES = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_CLOSE = 0.02


class GatedMlp(nn.Module):
    """Mixed into the class of an MLP."""

    def forward(self, x: Tensor) -> Any:
        from symbiosis.kernels.silu_mul import silu_mul

        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
        rows = silu_mul(gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]))
        return self.down_proj(rows.view(gate.shape))  # type: ignore[operator]


def is_silu(function: Any) -> bool:
    """Small numbers alone would not tell it from others."""
    numbers = torch.linspace(-12, 12, 97)
    return torch.allclose(function(numbers), F.silu(numbers), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def gate(model: PreTrainedModel) -> None:
    """Let the MLPs of this model use the kernel."""
    for module in list(model.modules()):
        if {name for name, _ in module.named_children()} != _NAMES or not isinstance(module.gate_proj, nn.Linear):
            continue
        if not is_silu(module.act_fn):
            continue
        x = 8 * torch.randn(2, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).to(
            module.gate_proj.weight
        )
        expected, plain = module(x), type(module)
        mix_in(module, GatedMlp)
        if not torch.allclose(module(x), expected, rtol=_CLOSE, atol=_CLOSE * float(expected.abs().max())):
            module.__class__ = plain
