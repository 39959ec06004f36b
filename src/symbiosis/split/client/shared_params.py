"""Parameters that both sides have: whether the tenant's was written to since assembly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor. None for inference tensors, which do not count them."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class SharedParam:
    """A bias or a norm's weight as the executor has it, or none."""

    _parameter: Tensor | None
    _address: int
    _version: int | None
    _values: Tensor | None
    """Only on a CPU, where comparing is cheap: a write to `.data` changes no version counter."""

    @classmethod
    def of(cls, parameter: Tensor | None) -> SharedParam:
        if parameter is None:
            return cls(None, 0, None, None)
        values = parameter.detach().clone() if parameter.device.type == "cpu" else None
        return cls(parameter, parameter.data_ptr(), version_of(parameter), values)

    def is_unchanged(self, parameter: Tensor | None) -> bool:
        if parameter is not self._parameter:
            return False
        if parameter is None:
            return True
        if (parameter.data_ptr(), version_of(parameter)) != (self._address, self._version):
            return False
        return self._values is None or torch.equal(parameter, self._values)
