"""All parameters of a plain LoRA adapter in one tensor, so that a kernel or an optimizer step covers the whole adapter.

N = numbers of an adapter, P = layers it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symbiosis.adapters.packing import pack_offsets
from symbiosis.finetuning.adapters.lora_math import Part, TrainableLora

_ALIGNMENT = 4  # numbers: every parameter starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()


class FlatParameters:
    """The parameters stay the same objects; their data are views of one tensor."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Part]) -> None:
        """Of an adapter that `can_flatten` accepts."""
        starts, size = pack_offsets((parameter.numel() for parameter in parameters.values()), _ALIGNMENT)
        placed = zip(parameters.items(), starts, strict=True)
        self.slices = {name: ParameterSlice(start, parameter.shape) for (name, parameter), start in placed}
        like = next(iter(parameters.values()))
        self.values_N = torch.zeros(size, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.data = self.view_of(self.values_N, name).copy_(parameter)
        self.paths = tuple(parts)
        """The layers it changes."""
        loras = [part for part in parts.values() if isinstance(part, TrainableLora)]
        assert len(loras) == len(parts), "can_flatten accepts plain LoRA only"
        self.max_rank = max(len(part.a_rI) for part in loras)
        pairs_P2 = torch.tensor([[part.a_rI.data_ptr(), part.b_Or.data_ptr()] for part in loras], dtype=torch.int64)
        self.offsets_P2 = pairs_P2 - self.values_N.data_ptr()
        """Where A and B of each layer start, in bytes."""
        ranks_P1 = torch.tensor([[len(part.a_rI)] for part in loras], dtype=torch.int64)
        self.weights_P3 = torch.cat([pairs_P2, ranks_P1], dim=1)
        """Addresses of A and B, and the rank, of each layer."""
        self.scales_P = torch.tensor([part.scale for part in loras], dtype=torch.float32)

    def view_of(self, flat_N: Tensor, name: str) -> Tensor:
        """A parameter's view of a tensor with the layout of `values_N`."""
        found = self.slices[name]
        return flat_N[found.start : found.end].view(found.shape)


class FlatGradients(Mapping[str, Tensor]):
    """Gradients by parameter, as views of one tensor."""

    def __init__(self, flat: FlatParameters, gradients_N: Tensor) -> None:
        self._flat, self.gradients_N = flat, gradients_N

    def __getitem__(self, name: str) -> Tensor:
        return self._flat.view_of(self.gradients_N, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.slices)

    def __len__(self) -> int:
        return len(self._flat.slices)


def can_flatten(parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Part]) -> bool:
    """Whether an adapter is plain LoRA in float32: no DoRA, no biases, no dropout, no other parts."""
    loras = [part for part in parts.values() if isinstance(part, TrainableLora)]
    if not loras or len(loras) != len(parts) or len(parameters) != 2 * len(parts):
        return False
    if any(part.dropout or part.magnitude_O is not None or part.bias_O is not None for part in loras):
        return False
    return all(parameter.dtype is torch.float32 for parameter in parameters.values())
