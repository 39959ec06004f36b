"""What adapters do, as the engine computes it.

I / O = input and output width, r = rank, T = tokens, D = width of the model or a head, L = layers, K = key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from symbiosis.kernels.cpu.lora import LoraRow


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """A low-rank change of a layer as the engine computes it; `b_Or` has the scale in it.

    On a GPU both are contiguous, as kernels want them. On a CPU their transposes
    are: its products take up to twice as long the other way round.
    """

    a_rI: Tensor
    b_Or: Tensor
    bias_O: Tensor | None = None
    stretch_O: Tensor | None = None
    """DoRA: the whole product, without the layer's own bias, times this."""
    of_embedding: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Ia3Weights:
    """IA3: inputs or outputs times a vector."""

    vector: Tensor
    of_input: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedWeights:
    """A trained weight in the place of the layer's; of an embedding [V, D]."""

    weight_OI: Tensor
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Some rows of an embedding, or of a head, are the adapter's own."""

    ids: Tensor
    rows_TD: Tensor


Part = LoraWeights | Ia3Weights | ReplacedWeights | TokenRows


@dataclass(frozen=True, slots=True, eq=False)
class VirtualTokens:
    """Tokens in front of every prompt: of prompt tuning by their embeddings, of prefix tuning by keys and values."""

    count: int
    embeddings_TD: Tensor | None = None
    keys_LTKD: Tensor | None = None
    values_LTKD: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EngineAdapter:
    """An adapter in the engine's dtype on its device: what it does, by the path of a layer."""

    hash: str
    parts: Mapping[str, tuple[Part, ...]]
    virtual: VirtualTokens | None = None
    decodes_by_table: bool = field(init=False)
    """Whether kernels do all that it does to a row that decodes."""
    lines: Mapping[str, LoraRow] = field(init=False)
    """For the kernel for processors: the layers that it computes the low-rank change of."""

    def __post_init__(self) -> None:
        found = ((path, LoraRow.of(low.a_rI, low.b_Or)) for path in self.parts if (low := self._plain(path)) is not None)
        object.__setattr__(self, "lines", {path: line for path, line in found if line is not None})
        object.__setattr__(self, "decodes_by_table", all(self.in_table(path) is not None for path in self.parts))

    def in_table(self, path: str) -> LoraWeights | None:
        """What it does to this layer, if kernels do all of it: a low-rank change and nothing besides."""
        parts = self.parts.get(path, ())
        low = parts[0] if len(parts) == 1 else None
        return low if isinstance(low, LoraWeights) and low.bias_O is None and not low.of_embedding else None

    def _plain(self, path: str) -> LoraWeights | None:
        """The same, if that is no DoRA either."""
        low = self.in_table(path)
        return low if low is not None and low.stretch_O is None else None


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Rows of one adapter."""

    adapter: EngineAdapter
    start: int
    end: int
