"""Direct mode: a tenant on the executor's GPU computes with the executor's weights, mapped and not copied.

Nothing writes to mapped memory: layers return copies of their weights when
values are read, and a mapped parameter moves to the tenant's own memory when it is
made trainable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import BadMessage
from symbiosis.gpu import driver


class MappedParameter(nn.Parameter):
    """A frozen parameter in shared memory. Made trainable, it moves to memory of its own."""

    is_mapped = False

    @classmethod
    def over(cls, tensor: Tensor) -> MappedParameter:
        made = cls(tensor, requires_grad=False)
        made.is_mapped = True
        return made

    @property
    def requires_grad(self) -> bool:
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self.is_mapped:
            self.data = self.data.clone()
            self.is_mapped = False
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool = True) -> MappedParameter:
        self.requires_grad = requires_grad
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedWeights:
    """The executor's memory in this process: base layers by (handle, name), the client part by name."""

    base: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    client: dict[str, Tensor] = field(default_factory=dict)


def open_mapping(body: dict[str, Any], device: torch.device) -> MappedWeights:
    """The memory that the executor described, as tensors on `device`. Raises `BadMessage` if the description is malformed."""
    try:
        sizes = [(bytes.fromhex(handle), int(size)) for handle, size in body["allocations"]]
        base = [(int(layer), str(name), place) for layer, name, *place in body["base"]]
        client = [(str(name), place) for name, *place in body["client"]]
        places = [place for _, _, place in base] + [place for _, place in client]
        opened = {number: driver.open_allocation(*sizes[number], device) for number in {int(place[0]) for place in places}}
        return MappedWeights(
            base={(layer, name): _tensor(opened, *place) for layer, name, place in base},
            client={name: _tensor(opened, *place) for name, place in client},
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadMessage(f"the executor's description of its memory is malformed: {error!r}") from error


def _tensor(opened: dict[int, Tensor], number: int, offset: int, dtype: str, shape: list[int]) -> Tensor:
    torch_dtype = getattr(torch, dtype)
    if not isinstance(torch_dtype, torch.dtype) or offset < 0:
        raise ValueError(f"dtype {dtype!r} at {offset}")
    size = torch_dtype.itemsize * math.prod(shape)
    memory = opened[number]
    if offset + size > memory.numel():
        raise ValueError(f"{size} bytes at {offset} of an allocation of {memory.numel()}")
    return memory[offset : offset + size].view(torch_dtype).view(shape)
