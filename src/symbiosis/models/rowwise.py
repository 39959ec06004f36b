"""Probes for row-wise modules: each row of the result depends on that row alone.

Rows of many tenants are batched before a hosted layer runs, so only a row-wise module can be hosted as one block. The
structure does not show it (attention over one input looks like an MLP). A probe runs the module on random rows, together and
one by one, and compares the results.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.types import ExpertCall

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_COARSE = 5e-2  # half precision rounds differently for different shapes; mixed rows differ far more


@dataclass(frozen=True, slots=True)
class BlockShape:
    in_width: int
    out_width: int
    train_safe: bool


def probe_block(module: nn.Module, widths: list[int], dtype: torch.dtype, device: torch.device) -> BlockShape | None:
    """The shape of a row-wise module with one input; None for other modules."""
    if not _takes_one_tensor(module):
        return None
    was_training = module.training
    try:
        for width in dict.fromkeys(widths):
            generator = torch.Generator().manual_seed(width)
            x = torch.randn(2, 5, width, generator=generator).to(device, dtype)
            out_width = _rowwise_width(module.eval(), x)
            if out_width is not None:
                with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                    expected = module.eval()(x)
                    train_safe = all([_is_equal(expected, module.train()(x)) for _ in range(2)])
                return BlockShape(width, out_width, train_safe)
        return None
    finally:
        module.train(was_training)


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 1 and len(parameters) == 1


@torch.no_grad()
def _rowwise_width(module: nn.Module, x: Tensor) -> int | None:
    try:
        together = module(x)
        if not isinstance(together, Tensor) or together.shape[:-1] != x.shape[:-1] or together.dtype != x.dtype:
            return None
        flat = module(x.reshape(-1, x.shape[-1]))
        alone = torch.stack([torch.stack([module(row.reshape(1, 1, -1)).reshape(-1) for row in seq]) for seq in x])
    except Exception:  # noqa: BLE001 - wrong width, another rank, hidden inputs: not a row-wise block of this width
        return None
    if not isinstance(flat, Tensor) or flat.shape != (x.shape[0] * x.shape[1], together.shape[-1]):
        return None
    if not _is_close(together, alone) or not _is_close(flat.reshape_as(together), alone):
        return None
    return int(together.shape[-1])


@torch.no_grad()
def probe_linear(module: nn.Module) -> bool:
    """Whether a module with a weight and a bias is x @ Wᵀ + b, in evaluation and in training mode."""
    weight, bias, was_training = module.weight, getattr(module, "bias", None), module.training
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not _takes_one_tensor(module):
        return False
    generator = torch.Generator().manual_seed(weight.shape[1])
    x = torch.randn(2, 5, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    expected = F.linear(x, weight, bias if isinstance(bias, Tensor) else None)
    try:
        results = [module.train(mode)(x) for mode in (True, False)]
    except Exception:  # noqa: BLE001 - another calling convention
        return False
    finally:
        module.train(was_training)
    return all(isinstance(result, Tensor) and _is_close(result, expected) for result in results)


@torch.no_grad()
def probe_experts(
    module: nn.Module, width: int, experts: int, dtype: torch.dtype, device: torch.device, call: ExpertCall
) -> bool:
    """Whether `module(rows, indices, weights)` is row-wise and returns rows of the same width."""
    if device.type == "meta":  # which experts run depends on values: the signature decides
        return len(inspect.signature(module.forward).parameters) == 3
    lead = (1,) if call is ExpertCall.SEQUENCES else ()
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(6, width, generator=generator).to(device, dtype)
    chosen = min(2, experts)
    index = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(6)]).to(device)
    weight = torch.rand(6, chosen, generator=generator).to(device, dtype)
    try:
        together = module(x.view(*lead, *x.shape), index, weight)
        rows = [(x[i : i + 1].view(*lead, 1, width), index[i : i + 1], weight[i : i + 1]) for i in range(6)]
        alone = torch.cat([module(*row) for row in rows], dim=len(lead))
    except Exception:  # noqa: BLE001 - another calling convention: the module is not hosted
        return False
    return isinstance(together, Tensor) and together.shape == (*lead, *x.shape) and _is_close(together, alone)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape if a.is_meta else torch.equal(a, b)


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.is_meta:  # a model without weights, of a plan: its shapes are checked
        return a.shape == b.shape
    tolerance = _TOLERANCE.get(a.dtype, _COARSE)
    scale = float(b.abs().max())
    return a.shape == b.shape and scale > 0 and float((a - b).abs().max()) <= tolerance * scale
