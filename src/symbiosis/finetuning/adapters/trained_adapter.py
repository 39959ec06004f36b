"""An adapter in training: PEFT's own parameters, by their part of the frozen model.

T = virtual tokens, D = width of the model or a head, L = layers, H = key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symbiosis.finetuning.adapters.flat_parameters import FlatParameters
from symbiosis.finetuning.adapters.lora_math import Part, TrainableLora


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVirtualTokens:
    """Virtual tokens before every sequence, computed by an encoder of PEFT."""

    encoder: nn.Module
    count: int
    cache: tuple[int, int, int] | None = None
    """Layers, heads and head width of keys and values (prefix tuning); None for embeddings."""

    @property
    def rows(self) -> int:
        """Their rows of a packed batch: keys and values have none."""
        return 0 if self.cache else self.count

    def encode(self) -> Tensor:
        """The encoder's output, which PEFT stores, [T, …]."""
        device = next(self.encoder.parameters()).device
        encoded: Tensor = self.encoder(torch.arange(self.count, device=device)[None])
        return encoded[0]

    def keys_values_L2HTD(self) -> Tensor:
        assert self.cache is not None
        layers, heads, width = self.cache
        return self.encode().view(self.count, layers, 2, heads, width).permute(1, 2, 3, 0, 4)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSnapshot:
    """A copy of an adapter: the contents of PEFT's two files."""

    config: str
    tensors: Mapping[str, Tensor]
    """On the CPU; immutable."""

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class TrainedAdapter:
    """What a session trains. Only the values of the parameters change."""

    parts: Mapping[str, Part]
    """By path of the layer in the plain model."""
    virtual: TrainedVirtualTokens | None
    parameters: Mapping[str, nn.Parameter]
    """By their name in PEFT's model, in its order."""
    files: Mapping[str, str]
    """Tensor names in PEFT's file and their parameters, without an encoder's output."""
    config: str
    """`adapter_config.json` as PEFT writes it."""
    method: str
    flat: FlatParameters | None = None
    """All parameters as one tensor, if the grouped kernels compute this adapter."""

    @property
    def size(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def clear_caches(self) -> None:
        """Must be called after the parameters changed."""
        for part in self.parts.values():
            if isinstance(part, TrainableLora):
                part.clear_cache()

    def rows_of(self, tokens: int) -> int:
        """Rows of a packed batch for a sequence of so many tokens."""
        return tokens + (self.virtual.rows if self.virtual else 0)

    def cost_of(self, tokens: int) -> int:
        """As `rows_of`, plus virtual keys and values: they are no rows, but every sequence has a copy in memory."""
        return tokens + (self.virtual.count if self.virtual else 0)

    def snapshot(self) -> AdapterSnapshot:
        """The current values as PEFT would store them."""
        tensors = {file: self.parameters[name].detach().to("cpu", copy=True).contiguous() for file, name in self.files.items()}
        if self.virtual is not None:
            with torch.no_grad():
                tensors["prompt_embeddings"] = self.virtual.encode().to("cpu", copy=True).contiguous()
        return AdapterSnapshot(self.config, tensors)


NO_ADAPTER = TrainedAdapter(parts={}, virtual=None, parameters={}, files={}, config="", method="")
"""The adapter of probes and of closed sessions."""
