"""An adapter while it is trained: PEFT's own parameters, by what they do to the frozen model.

T = virtual tokens, D = width of the model or a head, L = layers, H = key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symbiosis.finetuning.packed.flat_lora import FlatParameters
from symbiosis.finetuning.packed.lora_math import Part


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVirtualTokens:
    """Virtual tokens in front of every sequence, as an encoder of PEFT's gives them."""

    encoder: nn.Module
    count: int
    cache: tuple[int, int, int] | None = None
    """Layers, heads and width of a head if they are keys and values (prefix tuning); None if they are embeddings."""

    @property
    def rows(self) -> int:
        """How many rows of the pass they are: keys and values are none."""
        return 0 if self.cache else self.count

    def stored(self) -> Tensor:
        """What PEFT stores of it, [T, …]."""
        device = next(self.encoder.parameters()).device
        made: Tensor = self.encoder(torch.arange(self.count, device=device)[None])
        return made[0]

    def embeddings_TD(self) -> Tensor:
        assert self.cache is None
        return self.stored()

    def keys_values_L2HTD(self) -> Tensor:
        assert self.cache is not None
        layers, heads, width = self.cache
        return self.stored().view(self.count, layers, 2, heads, width).permute(1, 2, 3, 0, 4)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSnapshot:
    """An adapter as it was at a moment: what PEFT's two files have."""

    config: str
    tensors: Mapping[str, Tensor]
    """On the CPU; nobody changes them."""

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedAdapter:
    """What a session trains. The parameters are changed in place; everything else stays."""

    parts: Mapping[str, Part]
    """By path of the layer in the plain model."""
    virtual: TrainedVirtualTokens | None
    parameters: Mapping[str, nn.Parameter]
    """By the name they have in PEFT's model, in its order."""
    files: Mapping[str, str]
    """Names of tensors in PEFT's file, and of the parameters they are; without what an encoder gives."""
    config: str
    """`adapter_config.json` as PEFT writes it."""
    method: str
    flat: FlatParameters | None = None
    """All parameters as one tensor, if kernels are to take this adapter together with others."""

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def changed(self) -> None:
        """To be called after the parameters were changed."""
        for part in self.parts.values():
            part.forget()

    def rows_of(self, tokens: int) -> int:
        """How many rows a sequence of so many tokens is in a pass."""
        return tokens + (self.virtual.rows if self.virtual else 0)

    def cost_of(self, tokens: int) -> int:
        """As `rows_of`, with all virtual tokens: keys and values are no rows, but every sequence has its own in memory."""
        return tokens + (self.virtual.count if self.virtual else 0)

    def snapshot(self) -> AdapterSnapshot:
        """What PEFT would store, as it is now."""
        found = {file: self.parameters[name].detach().to("cpu", copy=True).contiguous() for file, name in self.files.items()}
        if self.virtual is not None:
            with torch.no_grad():
                found["prompt_embeddings"] = self.virtual.stored().to("cpu", copy=True).contiguous()
        return AdapterSnapshot(self.config, found)


NOTHING = TrainedAdapter(parts={}, virtual=None, parameters={}, files={}, config="", method="")
"""What a sequence has that nobody trains on, and a session that was closed."""
