"""Is a layer's bias still the executor's? Tenants have biases too, and may change or train them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.client.versions import version_of


@dataclass(frozen=True, slots=True)
class SharedBias:
    """A bias as the executor has it, or that there is none."""

    _parameter: Tensor | None
    _address: int
    _version: int | None
    _numbers: Tensor | None
    """On a CPU, where looking at them costs next to nothing: a write to `.data` shows in nothing else."""

    @classmethod
    def of(cls, bias: Tensor | None) -> SharedBias:
        if bias is None:
            return cls(None, 0, None, None)
        numbers = bias.detach().clone() if bias.device.type == "cpu" else None
        return cls(bias, bias.data_ptr(), version_of(bias), numbers)

    def is_still(self, bias: Tensor | None) -> bool:
        if bias is not self._parameter:
            return False
        if bias is None:
            return True
        if (bias.data_ptr(), version_of(bias)) != (self._address, self._version):
            return False
        return self._numbers is None or torch.equal(bias, self._numbers)
