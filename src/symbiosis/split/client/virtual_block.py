"""Row-wise sub-modules, such as an MLP, that run as one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.deferred.tensor import plain
from symbiosis.split.client.deferred.train import DeferredGradTensor
from symbiosis.split.client.module_snapshot import ModuleSnapshot, is_watched
from symbiosis.split.client.virtual_layers import VirtualMatrix
from symbiosis.types import LayerSpec


class VirtualBlock(nn.Module):
    """Mixed into the class of a row-wise sub-module: one call for all of it while it is unchanged inside."""

    _block: LayerSpec
    _snapshot: ModuleSnapshot
    _matrices: tuple[VirtualMatrix, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self._can_run_whole(args[0]):
            x = plain(args[0]) if type(args[0]) is DeferredGradTensor and is_watched(self) else args[0]
            return self._matrices[0].groups.call(self._block, x, x, with_bias=False)
        return super().forward(*args, **kwargs)

    def _can_run_whole(self, x: Any) -> bool:
        if self._matrices[0]._direct is not None:
            return False
        if not isinstance(x, Tensor) or (self.training and not self._block.train_safe):
            return False
        shape = x.shape
        if not shape or shape[-1] != self._block.in_width or 0 in shape or x.dtype is not self._matrices[0].dtype:
            return False
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            return False
        return self._snapshot.holds(self) and all([matrix.is_pristine() for matrix in self._matrices])


def make_block(module: nn.Module, spec: LayerSpec) -> None:
    mix_in(module, VirtualBlock)
    matrices = tuple(part for part in module.modules() if isinstance(part, VirtualMatrix))
    object.__setattr__(module, "_block", spec)
    object.__setattr__(module, "_snapshot", ModuleSnapshot(module))
    object.__setattr__(module, "_matrices", matrices)
