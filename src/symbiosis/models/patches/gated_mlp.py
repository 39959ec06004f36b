"""Gated MLPs whose activation, silu(gate) * up, is one kernel.

Child names only select candidates. A module is patched if the kernel reproduces its result on a probe.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.models.patches.mixin import mix_in

GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""Children of one."""
_TOLERANCE = 0.02


class GatedMlp(nn.Module):
    """In front of the class of an MLP."""

    def forward(self, x: Tensor) -> Any:
        from symbiosis.kernels.silu_mul import silu_mul

        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
        rows = silu_mul(gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]))
        return self.down_proj(rows.view(gate.shape))  # type: ignore[operator]


def is_silu(function: Any) -> bool:
    """Whether a function is silu from -12 to 12; near zero alone, others are close to it."""
    x = torch.linspace(-12, 12, 97)
    return torch.allclose(function(x), F.silu(x), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def patch_gated_mlps(model: PreTrainedModel) -> None:
    """Let the MLPs of this model use the kernel."""
    for module in list(model.modules()):
        if {name for name, _ in module.named_children()} != GATED_MLP or not isinstance(module.gate_proj, nn.Linear):
            continue
        if not is_silu(module.act_fn):
            continue
        x = 8 * torch.randn(2, module.gate_proj.in_features, generator=torch.Generator().manual_seed(0)).to(
            module.gate_proj.weight
        )
        expected, original = module(x), type(module)
        mix_in(module, GatedMlp)
        if not torch.allclose(module(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())):
            module.__class__ = original
