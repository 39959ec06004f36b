"""The tenant's own part on a GPU in fewer launches: norms and rotary positions by fused kernels.

A step of a small model is bound by launches, and plain norms and rotary
positions are a third of them. Names only suggest where a kernel may stand;
whether it computes what the model's own code computes is tried out first, and
where it does not (Gemma's norms, interleaved rotary positions), or where a
call is unusual, the model's own code runs.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.client.layers import mix_in

_TRITON = find_spec("triton") is not None
_ROTARY = "apply_rotary_pos_emb"


def fuse(model: nn.Module) -> None:
    """Let the parts of this model, and of no other, use the kernels."""
    norms: dict[type, bool] = {}
    attentions: dict[type, Any] = {}
    for module in list(model.modules()):
        kind = type(module)
        if kind not in norms:
            norms[kind] = _is_rms_norm(module)
            attentions[kind] = _with_fused_rotary(kind) if _TRITON else None
        if norms[kind]:
            mix_in(module, FusedNorm)
        elif (fused := attentions[kind]) is not None:
            module.__class__ = fused


class FusedNorm(nn.Module):
    """Mixed into the class of an RMS norm."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        if not x.is_cuda or x.dtype is not weight.dtype or torch.is_autocast_enabled("cuda"):
            return super().forward(x)
        # times the weight by itself, as the model's own code has it: a product in the kernel would round once less
        return F.rms_norm(x, weight.shape, None, _epsilon(self)) * weight


def _epsilon(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return False
    if [name for name, _ in module.named_parameters()] != ["weight"] or len(inspect.signature(module.forward).parameters) != 1:
        return False
    if not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return False
    x = torch.randn(2, 3, len(weight), device=weight.device)
    fused = F.rms_norm(x, weight.shape, None, _epsilon(module)) * weight.float()
    return torch.allclose(module(x).float(), fused, rtol=1e-4, atol=1e-5)


def _with_fused_rotary(kind: type) -> type | None:
    """The same class, whose `forward` finds the kernel under the name it calls; None where there is nothing to gain."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    plain = forward.__globals__.get(_ROTARY)
    if not isinstance(plain, types.FunctionType) or not _turns_halves(plain):
        return None
    names = {**forward.__globals__, _ROTARY: _or_plain(plain)}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__, made.__doc__, made.__annotations__ = forward.__kwdefaults__, forward.__doc__, forward.__annotations__
    return type(kind.__name__, (kind,), {"forward": made, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _turns_halves(plain: Callable[..., Any]) -> bool:
    """Whether this function is the kernel's reference under another name."""
    from symbiosis.kernels.rotary import reference

    parameters = list(inspect.signature(plain).parameters.values())
    if [p.name for p in parameters[:4]] != ["q", "k", "cos", "sin"] or any(p.default is p.empty for p in parameters[4:]):
        return False
    inputs = torch.randn(2, 2, 3, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    try:
        pairs = zip(plain(*inputs), reference(*inputs), strict=True)
        return all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5) for ours, theirs in pairs)
    except (RuntimeError, TypeError, ValueError):  # it takes tensors of other shapes
        return False


def _or_plain(plain: Callable[..., Any]) -> Callable[..., Any]:
    from symbiosis.kernels.rotary import rotary

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        usual = q.is_cuda and q.dim() == cos.dim() + 1 == 4 and q.dtype is k.dtype is cos.dtype is sin.dtype
        if more or named or not usual or cos.shape[-1] != q.shape[-1] or cos.shape[-2] != q.shape[-2]:
            return plain(q, k, cos, sin, *more, **named)
        return rotary(q, k, cos, sin)

    return rotated
