"""Is a tensor of the tenant's still what the executor has too? Tenants may change or train theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symbiosis.split.client.tensor_version import version_of


@dataclass(frozen=True, slots=True)
class SharedParam:
    """A bias or a norm's weight as the executor has it, or that there is none."""

    _parameter: Tensor | None
    _address: int
    _version: int | None
    _numbers: Tensor | None
    """On a CPU, where looking at them costs next to nothing: a write to `.data` shows in nothing else."""

    @classmethod
    def of(cls, parameter: Tensor | None) -> SharedParam:
        if parameter is None:
            return cls(None, 0, None, None)
        numbers = parameter.detach().clone() if parameter.device.type == "cpu" else None
        return cls(parameter, parameter.data_ptr(), version_of(parameter), numbers)

    def is_unchanged(self, parameter: Tensor | None) -> bool:
        if parameter is not self._parameter:
            return False
        if parameter is None:
            return True
        if (parameter.data_ptr(), version_of(parameter)) != (self._address, self._version):
            return False
        return self._numbers is None or torch.equal(parameter, self._numbers)
