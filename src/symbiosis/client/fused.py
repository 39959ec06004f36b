"""The tenant's own part on a GPU in fewer launches: norms and rotary positions by fused kernels.

A step of a small model is bound by launches, and plain norms and rotary
positions are a third of them. Names only suggest where a kernel may stand;
whether it computes what the model's own code computes is tried out first, and
where it does not (Gemma's norms, interleaved rotary positions), or where a
call is unusual, the model's own code runs.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.client.mixing import mix_in
from symbiosis.kernels.plain_norm import plain_norm

_TRITON = find_spec("triton") is not None
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
            attentions[kind] = _with_fused_rotary(kind) if _TRITON else None
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
        return _normalised(x, weight, epsilon_of(self), twice=self.symbiosis_twice)


class FusedNormAtOnce(FusedNorm):
    """Of one that rounds once."""

    symbiosis_twice = False


def _normalised(x: Tensor, weight: Tensor, epsilon: float, *, twice: bool) -> Tensor:
    if _TRITON and not (torch.is_grad_enabled() and weight.requires_grad):
        from symbiosis.kernels.rms_norm import fits, rms_norm

        if fits(x, weight):
            return rms_norm(x, weight, epsilon, twice=twice)
    return plain_norm(x, weight, epsilon, twice=twice)


def epsilon_of(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def _norm_like(module: nn.Module) -> type[FusedNorm] | None:
    """The kernel that computes what this module computes, rounding included; None if none does."""
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
    probe._parameters = {"weight": nn.Parameter(torch.rand(len(weight), generator=generator).to(weight), requires_grad=False)}
    expected = probe(x)
    for kind in (FusedNorm, FusedNormAtOnce):
        found = plain_norm(x, probe._parameters["weight"], epsilon_of(module), twice=kind.symbiosis_twice)  # type: ignore[arg-type]
        if found.dtype is expected.dtype and _alike(found, expected):
            return kind
    return None


def _alike(found: Tensor, expected: Tensor) -> bool:
    """Equal, but for few numbers that were just between two roundings."""
    if found.dtype is torch.float32:
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    return bool((found != expected).float().mean() < 0.02) and torch.allclose(found, expected, rtol=0.02, atol=0.02)


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
