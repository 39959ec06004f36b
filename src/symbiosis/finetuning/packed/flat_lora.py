"""All numbers of a plain LoRA adapter in one tensor, so that a kernel or a step takes the whole adapter at once.

N = numbers of an adapter, P = layers it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symbiosis.finetuning.packed.lora_math import Part, TrainableLora

_ALIGNED = 4  # numbers, so that every parameter starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + torch.Size(self.shape).numel()


class FlatParameters:
    """The parameters stay the objects they were, over memory that lies together."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Part]) -> None:
        """Of an adapter that `fits`."""
        self.places: dict[str, ParameterSlice] = {}
        size = 0
        for name, parameter in parameters.items():
            self.places[name] = ParameterSlice(size, tuple(parameter.shape))
            size += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        like = next(iter(parameters.values()))
        self.values_N = torch.zeros(size, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            for name, parameter in parameters.items():
                mine = self.part_of(self.values_N, name)
                mine.copy_(parameter)
                parameter.data = mine
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.paths = tuple(parts)
        """Of the layers it changes."""
        plain = [part for part in parts.values() if isinstance(part, TrainableLora)]
        assert len(plain) == len(parts), "an adapter that fits"
        self.ranks = max(len(part.a_rI) for part in plain)
        base, width = self.values_N.data_ptr(), self.values_N.element_size()
        starts = [[self.places[names[id(p)]].start * width for p in (part.a_rI, part.b_Or)] for part in plain]
        self.offsets_P2 = torch.tensor(starts, dtype=torch.int64)
        """Where a and b of each layer begin, in bytes."""
        ranks_P1 = torch.tensor([[len(part.a_rI)] for part in plain], dtype=torch.int64)
        self.weights_P3 = torch.cat([self.offsets_P2 + base, ranks_P1], dim=1)
        self.scales_P = torch.tensor([part.scale for part in plain], dtype=torch.float32)

    def part_of(self, flat_N: Tensor, name: str) -> Tensor:
        """A parameter's part of something as long as all of them."""
        place = self.places[name]
        return flat_N[place.start : place.end].view(place.shape)


class FlatGradients(Mapping[str, Tensor]):
    """Gradients by parameter, in one tensor."""

    def __init__(self, flat: FlatParameters, gradients_N: Tensor) -> None:
        self._flat, self.gradients_N = flat, gradients_N

    def __getitem__(self, name: str) -> Tensor:
        return self._flat.part_of(self.gradients_N, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat.places)

    def __len__(self) -> int:
        return len(self._flat.places)


def fits(parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Part]) -> bool:
    """Whether this is plain LoRA in float32: no DoRA, no biases, no dropout, and nothing besides."""
    plain = [part for part in parts.values() if isinstance(part, TrainableLora)]
    if not plain or len(plain) != len(parts) or len(parameters) != 2 * len(parts):
        return False
    if any(part.dropout or part.magnitude_O is not None or part.bias_O is not None for part in plain):
        return False
    return all(parameter.dtype is torch.float32 for parameter in parameters.values())
