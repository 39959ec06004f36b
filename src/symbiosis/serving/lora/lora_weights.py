"""Adapter weights in the form that the engine computes with.

I / O = input and output width, r = rank, T = tokens, D = width of the model or a head, L = layers, K = key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from symbiosis.adapters.parts import Ia3Part
from symbiosis.kernels.cpu.lora import LoraRow


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """LoRA weights of one layer; `b_Or` includes the scaling.

    On a GPU both are contiguous, as the kernels require. On a CPU their transposes are: products are up to twice as fast.
    """

    a_rI: Tensor
    b_Or: Tensor
    bias_O: Tensor | None = None
    mag_norm_scale_O: Tensor | None = None
    """DoRA: magnitude / norm. It multiplies the whole product, without the base layer's bias."""
    of_embedding: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedWeights:
    """A trained weight that replaces the base layer's; of an embedding [V, D]."""

    weight_OI: Tensor
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Trained rows of an embedding or of a head."""

    ids: Tensor
    rows_TD: Tensor


Part = LoraWeights | Ia3Part | ReplacedWeights | TokenRows


@dataclass(frozen=True, slots=True, eq=False)
class VirtualTokens:
    """Virtual tokens before every prompt: embeddings for prompt tuning, keys and values for prefix tuning."""

    count: int
    embeddings_TD: Tensor | None = None
    keys_LTKD: Tensor | None = None
    values_LTKD: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EngineAdapter:
    """An adapter in the engine's dtype on its device: its parts by layer path."""

    hash: str
    parts: Mapping[str, tuple[Part, ...]]
    virtual: VirtualTokens | None = None
    decodes_by_table: bool = field(init=False)
    """Whether kernels that read the slot table compute every part."""
    cpu_rows: Mapping[str, LoraRow] = field(init=False)
    """The layers whose LoRA delta the CPU kernel can compute."""

    def __post_init__(self) -> None:
        in_table = {path: self.table_lora(path) for path in self.parts}
        plain = {path: lora for path, lora in in_table.items() if lora is not None and lora.mag_norm_scale_O is None}
        rows = {path: row for path, lora in plain.items() if (row := LoraRow.of(lora.a_rI, lora.b_Or)) is not None}
        object.__setattr__(self, "cpu_rows", rows)
        object.__setattr__(self, "decodes_by_table", None not in in_table.values())

    def table_lora(self, path: str) -> LoraWeights | None:
        """The layer's LoRA weights, if they are all the adapter has there and the slot table can hold them."""
        parts = self.parts.get(path, ())
        lora = parts[0] if len(parts) == 1 else None
        return lora if isinstance(lora, LoraWeights) and lora.bias_O is None and not lora.of_embedding else None


class AdapterSegment(NamedTuple):
    """Rows of one adapter in a batch."""

    adapter: EngineAdapter
    start: int
    end: int
