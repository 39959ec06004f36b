"""Stacked experts of any calling convention, as modules that take rows, indices and weights.

The executor joins calls of many tenants, in which the experts of rows are mixed. E = experts, R = rows, K = experts per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.models.patches.mixin import mix_in
from symbiosis.types import ExpertCall

_ROWS = 3  # of each expert in a probe


class _GroupedExperts(nn.Module):
    """Mixed into the class of the experts."""

    def forward(self, x: Tensor, index_RK: Tensor, weight_RK: Tensor) -> Tensor:
        chosen = index_RK.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=next(self.parameters()).shape[0])
        results = self._call_groups(x[order // index_RK.shape[1]], chosen[order], counts)
        results = results * weight_RK.reshape(-1, 1)[order]
        unsorted = torch.zeros_like(results).index_copy(0, order, results)
        return unsorted.view(*index_RK.shape, -1).sum(dim=1)

    def _call_groups(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        """The results of rows that are sorted by expert."""
        raise NotImplementedError


class _EqualGroups(_GroupedExperts):
    def _call_groups(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        most = int(counts.max())
        starts = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(expert), device=x.device) - starts[expert] + expert * most
        padded = x.new_zeros(len(counts) * most, x.shape[1]).index_copy(0, place, x)
        results: Tensor = super(_GroupedExperts, self).forward(padded)
        return results[place]


class _SizedGroups(_GroupedExperts):
    def _call_groups(self, x: Tensor, expert: Tensor, counts: Tensor) -> Tensor:
        results: Tensor = super(_GroupedExperts, self).forward(x, counts.tolist())
        return results


class _Sequences(nn.Module):
    """Mixed into the class of experts that take rows by sequence."""

    def forward(self, x: Tensor, index_RK: Tensor, weight_RK: Tensor) -> Tensor:
        result: Tensor = super().forward(x[None], index_RK, weight_RK)
        return result[0]


_GROUPS: dict[ExpertCall, type[_GroupedExperts]] = {
    ExpertCall.EQUAL_GROUPS: _EqualGroups,
    ExpertCall.SIZED_GROUPS: _SizedGroups,
}
_MIXINS: dict[ExpertCall, type[nn.Module]] = {**_GROUPS, ExpertCall.SEQUENCES: _Sequences}


def take_choices(module: nn.Module, call: ExpertCall) -> None:
    """Let a module take rows, indices and weights, whatever it takes by itself."""
    if call in _MIXINS:
        mix_in(module, _MIXINS[call])


def choices_of_groups(experts: int, sizes: Any, rows: int, device: torch.device) -> Tensor:
    """The expert of each row, [R, 1]. `sizes`: rows of each expert; None: equally many."""
    counts = torch.as_tensor([rows // experts] * experts if sizes is None else sizes, device=device)
    return torch.repeat_interleave(torch.arange(experts, device=device), counts)[:, None]


def probe_groups(
    module: nn.Module, experts: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[ExpertCall, int] | None:
    """How a module takes rows sorted by expert, and the width of its results; None if it does not."""
    x = torch.randn(experts * _ROWS, width, generator=torch.Generator().manual_seed(width)).to(device, dtype)
    for call, probe in ((ExpertCall.EQUAL_GROUPS, _probe_equal), (ExpertCall.SIZED_GROUPS, _probe_sized)):
        try:
            found = probe(module, x, experts)
        except Exception:  # noqa: BLE001 - another calling convention
            found = None
        if found is not None:
            return call, found
    return None


@torch.no_grad()
def _probe_equal(module: nn.Module, x: Tensor, experts: int) -> int | None:
    together = module(x)
    alone = torch.stack([module(x[row::_ROWS].contiguous()) for row in range(_ROWS)], dim=1).flatten(0, 1)
    return int(together.shape[1]) if _is_close(together, alone) and _ignores_zeros(module, x) else None


@torch.no_grad()
def _probe_sized(module: nn.Module, x: Tensor, experts: int) -> int | None:
    together = module(x, [_ROWS] * experts)
    single = [[int(each == row // _ROWS) for each in range(experts)] for row in range(len(x))]
    alone = torch.cat([module(x[row : row + 1], sizes) for row, sizes in enumerate(single)])
    return int(together.shape[1]) if _is_close(together, alone) else None


def _ignores_zeros(module: nn.Module, x: Tensor) -> bool:
    """Whether rows of zeros give zeros and gradients of zero: then tenants need not send those of experts not chosen."""
    if x.is_meta:
        return True
    x = x.clone()
    x[::_ROWS] = 0
    with torch.enable_grad():
        x.requires_grad_()
        result = module(x)
        (grad,) = torch.autograd.grad(result.sum(), x)
    return not result.detach()[::_ROWS].any() and not grad[::_ROWS].any()


def _is_close(a: Tensor, b: Tensor) -> bool:
    if a.is_meta:
        return a.dim() == 2 and a.shape == b.shape
    tolerance = 1e-4 if a.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(b.abs().max())
    return a.dim() == 2 and a.shape == b.shape and scale > 0 and float((a - b).abs().max()) <= tolerance * scale
