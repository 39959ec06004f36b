"""RMS norms of models as one kernel. A probe, not the name, decides whether the kernel computes what a module computes."""

from __future__ import annotations

import copy
import inspect
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from symbiosis.kernels.rms_norm_reference import rms_norm_reference

TRITON = find_spec("triton") is not None


def apply_rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, twice: bool) -> Tensor:
    """`twice`: round before the product with the weight, and again after it."""
    if TRITON and x.is_cuda and not (torch.is_grad_enabled() and weight.requires_grad):
        from symbiosis.kernels.rms_norm import fits, rms_norm

        if fits(x, weight):
            return rms_norm(x, weight, epsilon, twice=twice)
    return rms_norm_reference(x, weight, epsilon, twice=twice)


def epsilon_of(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def rounds_twice(module: nn.Module) -> bool | None:
    """How the kernel must round to compute what this module computes; None if neither way matches."""
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"] or len(inspect.signature(module.forward).parameters) != 1:
        return None
    if getattr(module, "variance_epsilon", None) is None and getattr(module, "eps", None) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, len(weight), generator=generator).to(weight)
    probe = copy.copy(module)
    probe_weight = nn.Parameter(torch.rand(len(weight), generator=generator).to(weight), requires_grad=False)
    probe._parameters = {"weight": probe_weight}
    expected = probe(x)
    for twice in (True, False):
        found = rms_norm_reference(x, probe_weight, epsilon_of(module), twice=twice)
        if found.dtype is expected.dtype and _is_close(found, expected):
            return twice
    return None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Equal, except for a few values between two roundings."""
    if found.dtype is torch.float32:
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    return bool((found != expected).float().mean() < 0.02) and torch.allclose(found, expected, rtol=0.02, atol=0.02)
