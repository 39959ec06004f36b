"""RMS norms and rotary embeddings of a model as fused kernels.

A step of a small model is bound by kernel launches, and a third of them are norms and rotary embeddings. Names only select
candidates. A module is patched if the kernel reproduces its result on a probe; others (Gemma's norms, interleaved rotary
embeddings) and calls that the kernel does not support run the model's own code.
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


def patch_fused_ops(model: nn.Module) -> None:
    """Let the modules of this model, and of no other, use the kernels."""
    attentions: dict[type, Any] = {}
    for module in list(model.modules()):
        twice = rounds_twice(module)
        if twice is not None:
            mix_in(module, FusedNorm, symbiosis_twice=twice)
            continue
        kind = type(module)
        if kind not in attentions:
            attentions[kind] = _with_fused_rotary(kind) if TRITON else None
        if attentions[kind] is not None:
            module.__class__ = attentions[kind]


class FusedNorm(nn.Module):
    """In front of the class of an RMS norm."""

    weight: nn.Parameter
    symbiosis_twice: bool
    """Whether it rounds before the product with its weight, and again after it."""

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        if not x.is_cuda or x.dtype is not weight.dtype or torch.is_autocast_enabled("cuda"):
            return super().forward(x)
        return apply_rms_norm(x, weight, epsilon_of(self), twice=self.symbiosis_twice)


def _with_fused_rotary(kind: type) -> type | None:
    """A subclass whose `forward` calls the kernel under the original's name; None if the class has no such call."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(_ROTARY)
    if not isinstance(original, types.FunctionType) or not _is_half_rotary(original):
        return None
    names = {**forward.__globals__, _ROTARY: _with_fallback(original)}
    patched = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    patched.__kwdefaults__, patched.__doc__ = forward.__kwdefaults__, forward.__doc__
    patched.__annotations__ = forward.__annotations__
    return type(kind.__name__, (kind,), {"forward": patched, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _is_half_rotary(original: Callable[..., Any]) -> bool:
    """Whether this function computes what the kernel's reference computes."""
    from symbiosis.kernels.rotary import reference

    parameters = list(inspect.signature(original).parameters.values())
    if [p.name for p in parameters[:4]] != ["q", "k", "cos", "sin"] or any(p.default is p.empty for p in parameters[4:]):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 2, 3, 8), (2, 1, 3, 8), (2, 3, 8), (2, 3, 8)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    try:
        return all(torch.equal(ours, theirs) for ours, theirs in zip(original(*inputs), reference(*inputs), strict=True))
    except (RuntimeError, TypeError, ValueError):  # it expects other shapes
        return False


def _with_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, or the original where the kernel does not support the call."""
    from symbiosis.kernels.rotary import fits, rotary

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not q.is_cuda or not fits(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin)

    return rotate
