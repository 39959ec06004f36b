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
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.models.patches.mixin import mix_in
from symbiosis.models.rms_norms import TRITON, apply_rms_norm, epsilon_of, rounds_twice

_ROTARY = "apply_rotary_pos_emb"


def fuse(model: nn.Module) -> None:
    """Let the parts of this model, and of no other, use the kernels."""
    attentions: dict[type, Any] = {}
    for module in list(model.modules()):
        norm = _norm_like(module)
        if norm is not None:
            mix_in(module, norm)
            continue
        kind = type(module)
        if kind not in attentions:
            attentions[kind] = _with_fused_rotary(kind) if TRITON else None
        if attentions[kind] is not None:
            module.__class__ = attentions[kind]


class FusedNorm(nn.Module):
    """Mixed into the class of an RMS norm that rounds before the product with its weight, and again after it."""

    weight: nn.Parameter
    symbiosis_twice = True

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        if not x.is_cuda or x.dtype is not weight.dtype or torch.is_autocast_enabled("cuda"):
            return super().forward(x)
        return apply_rms_norm(x, weight, epsilon_of(self), twice=self.symbiosis_twice)


class FusedNormForward(FusedNorm):
    """Of one that rounds once."""

    symbiosis_twice = False


def _norm_like(module: nn.Module) -> type[FusedNorm] | None:
    """The kernel that computes what this module computes, rounding included; None if none does."""
    twice = rounds_twice(module)
    return None if twice is None else FusedNorm if twice else FusedNormForward


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
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, 3, 8), (2, 1, 3, 8), (2, 3, 8), (2, 3, 8)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    try:
        return all(torch.equal(ours, theirs) for ours, theirs in zip(plain(*inputs), reference(*inputs), strict=True))
    except (RuntimeError, TypeError, ValueError):  # it takes tensors of other shapes
        return False


def _or_plain(plain: Callable[..., Any]) -> Callable[..., Any]:
    from symbiosis.kernels.rotary import fits, rotary

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if more or named or not q.is_cuda or not fits(q, k, cos, sin):
            return plain(q, k, cos, sin, *more, **named)
        return rotary(q, k, cos, sin)

    return rotated
