"""A full fine-tune as a low-rank difference of its base, in the form of a PEFT LoRA adapter.

W + B A is near the fine-tune's weight for each linear layer of attention and FFN. The factors leave out what matters least for
the fine-tune's predictions (`layer_statistics`), by one limit for all matrices, so each has the rank that it needs. What a norm
learned is folded into the layers that read it: W' diag(g'/g) reads the base's norm. B and A are bfloat16, and the scale is 1.

O, I = output and input width, r = rank, V = vocabulary, D = width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.models.rms_norms import rounds_twice
from symbiosis.types import LayerKind
from symbiosis.zoo.differences.layer_statistics import measure_statistics

_MAX_EXACT_WIDTH = 1024
"""Beyond, a randomised SVD is faster than an exact one."""
_MAX_RANK = 256
_OVERSAMPLING = 16
_EMBEDDING_RANK = 16
_MAX_ROWS_SHARE = 0.05
"""Own rows are more than a low-rank difference of all rows, beyond."""
_NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Of a Llama's layer: the modules that read a norm, and nothing else does."""


class EmbeddingForm(StrEnum):
    """What a difference has of the embedding, and of a head that is tied to it."""

    BASE = "the base's embedding"
    ROWS = "own rows of the embedding"
    LOW_RANK = "a low-rank difference of the embedding"
    WHOLE = "its own embedding"


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """B = left, A = right: those that lose least of a difference, in their order."""

    left_Or: Tensor
    right_rI: Tensor
    energies_r: Tensor
    """What each loses where it is left out."""

    @property
    def parameters_per_rank(self) -> int:
        return self.left_Or.shape[0] + self.right_rI.shape[1]


def factorize(delta_OI: Tensor, max_rank: int, left_OO: Tensor | None = None, right_II: Tensor | None = None) -> Factors:
    """The factors of at most `max_rank` that lose least of a matrix; none of a matrix of zeros.

    An error E costs ‖Lᵀ E R‖², with the Cholesky factors L and R of second moments; L may be a vector of weights of rows.
    """
    count = min(max_rank, *delta_OI.shape) if bool(delta_OI.any()) else 0
    weighted = delta_OI.double()
    if left_OO is not None:
        weighted = left_OO[:, None] * weighted if left_OO.dim() == 1 else left_OO.T @ weighted
    if right_II is not None:
        weighted = weighted @ right_II
    if min(weighted.shape) <= _MAX_EXACT_WIDTH:
        # By the Gram matrix of the small side: an exact SVD of an embedding would take minutes.
        is_wide = weighted.shape[0] < weighted.shape[1]
        tall = weighted.T if is_wide else weighted
        values, vectors = torch.linalg.eigh(tall.T @ tall)
        s = values.flip(0)[:count].clamp(min=0).sqrt()
        v = vectors.flip(1)[:, :count]
        u = tall @ v / s.clamp(min=1e-30)
        u, v = (v, u) if is_wide else (u, v)
    else:
        u, s, v = torch.svd_lowrank(weighted, min(count + _OVERSAMPLING, *delta_OI.shape), niter=4)
        u, s, v = u[:, :count], s[:count], v[:, :count]
    left_Or, right_rI = u * s.sqrt(), (v * s.sqrt()).T
    if left_OO is not None:
        is_diagonal = left_OO.dim() == 1
        left_Or = left_Or / left_OO[:, None] if is_diagonal else torch.linalg.solve_triangular(left_OO.T, left_Or, upper=True)
    if right_II is not None:
        right_rI = torch.linalg.solve_triangular(right_II, right_rI, upper=False, left=False)
    return Factors(left_Or.float(), right_rI.float(), (s**2).float())


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """One difference: the matrices by path of their module, and the embedding."""

    factors: dict[str, tuple[Tensor, Tensor]]
    """B [O, r] and A [r, I], in bfloat16."""
    biases: dict[str, Tensor]
    embedding: EmbeddingForm
    rows: tuple[int, ...] = ()
    replaced: Tensor | None = None
    """The rows, or the whole embedding."""
    steps: int = 0
    """For which the factors were trained."""

    def describe(self, parameters: int) -> str:
        """For the owner of a model with so many parameters."""
        ranks = sorted(right.shape[0] for _, right in self.factors.values()) or [0]
        median, own = ranks[len(ranks) // 2], self.parameters / parameters
        trained = f", trained for {self.steps} steps" if self.steps else ""
        return f"rank {ranks[0]} to {ranks[-1]} (median {median}), {own:.2%} of the parameters, {self.embedding}{trained}"

    @property
    def _tensors(self) -> list[Tensor]:
        low_rank = [each for pair in self.factors.values() for each in pair]
        return [*low_rank, *self.biases.values(), *([] if self.replaced is None else [self.replaced])]

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors)

    @property
    def parameters(self) -> int:
        """That are stored."""
        return sum(each.numel() for each in self._tensors)


class DifferenceFinder:
    """Differences of a fine-tune from its base, both as loaded models of one architecture in float32. They lose least of what
    the fine-tune predicts on a text.
    """

    def __init__(self, base: PreTrainedModel, own: PreTrainedModel, windows_NT: Tensor) -> None:
        self.base, self.own = base, own
        self.parameters = sum(each.numel() for each in base.parameters())
        """Of the base."""
        self.facts = ModelFacts.from_model(base)
        self._factors: dict[str, Factors] = {}
        ends = {self.facts.embedding, *self.facts.ties.get(self.facts.embedding or "", ())}
        scales = _norm_ratios(base, own)
        deltas: dict[str, Tensor] = {}
        for path, module in self.facts.modules.items():
            if path not in ends and module.kind in (LayerKind.LINEAR, LayerKind.CONV1D):
                delta_OI = self._weight(own, path) * scales.get(path, 1.0) - self._weight(base, path)
                if bool(delta_OI.any()):
                    deltas[path] = delta_OI
        statistics = measure_statistics(own, windows_NT, deltas)
        self._token_weights_V, self._head_input_DD = statistics.token_weights_V, statistics.head_input_DD
        for path, delta_OI in deltas.items():
            moments = statistics.layers.get(path)
            weights = () if moments is None else (moments.output_OO, moments.input_II)  # None: a layer that did not run
            self._factors[path] = factorize(delta_OI, _MAX_RANK, *weights)
        self._embedding: Factors | None = None
        self.changed_rows: tuple[int, ...] = ()
        if self.facts.embedding is not None:
            different = (self._embedding_of(own) != self._embedding_of(base)).any(1)
            self.changed_rows = tuple(torch.nonzero(different)[:, 0].tolist())

    def _weight(self, model: PreTrainedModel, path: str) -> Tensor:
        """[O, I], also of a Conv1D."""
        weight: Tensor = model.get_submodule(path).weight.detach()
        return weight.T if self.facts.modules[path].kind is LayerKind.CONV1D else weight

    def _embedding_of(self, model: PreTrainedModel) -> Tensor:
        weight: Tensor = model.get_input_embeddings().weight.detach()
        return weight

    @property
    def is_tied(self) -> bool:
        return self.facts.head in self.facts.ties.get(self.facts.embedding or "", ())

    def embedding_forms(self) -> Iterator[EmbeddingForm]:
        """Those that a difference may have, smallest first."""
        yield EmbeddingForm.BASE
        if not self.changed_rows:
            return
        if len(self.changed_rows) <= _MAX_ROWS_SHARE * self.facts.vocab:
            yield EmbeddingForm.ROWS
            return
        yield EmbeddingForm.LOW_RANK
        yield EmbeddingForm.WHOLE

    def at(self, share: float, form: EmbeddingForm) -> Difference:
        """The difference whose matrices have this share of the model's parameters, and this form of the embedding."""
        factors = {path: (left.bfloat16(), right.bfloat16()) for path, (left, right) in self._cut(share).items()}
        if form is EmbeddingForm.LOW_RANK:
            factors |= self._embedding_factors()
        replaced = None
        if form in (EmbeddingForm.ROWS, EmbeddingForm.WHOLE):
            replaced = self._embedding_of(self.own)
            replaced = replaced[list(self.changed_rows)] if form is EmbeddingForm.ROWS else replaced
        biases = {path: own for path in factors if (own := self._bias(path)) is not None}
        if all(torch.equal(own, self.base.get_submodule(path).bias) for path, own in biases.items()):
            biases = {}
        rows = self.changed_rows if form is EmbeddingForm.ROWS else ()
        return Difference(factors, biases, form, rows, replaced)

    def _bias(self, path: str) -> Tensor | None:
        bias = getattr(self.own.get_submodule(path), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def _cut(self, share: float) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors that lose most per parameter where they are left out."""
        if not self._factors:
            return {}
        gains = torch.cat([each.energies_r / each.parameters_per_rank for each in self._factors.values()])
        costs = torch.cat([torch.full((len(each.energies_r),), each.parameters_per_rank) for each in self._factors.values()])
        order = gains.argsort(descending=True)
        taken = int((costs[order].cumsum(0) <= share * self.parameters).sum())
        least = float(gains[order[taken - 1]]) if taken else float("inf")
        found = {}
        for path, each in self._factors.items():
            rank = int((each.energies_r / each.parameters_per_rank >= least).sum())
            if rank:
                found[path] = (each.left_Or[:, :rank], each.right_rI[:rank])
        return found

    def _embedding_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """As of matrices [D, V], and [V, D] of a tied head, which PEFT stores again."""
        assert self.facts.embedding is not None
        if self._embedding is None:
            delta_VD = self._embedding_of(self.own) - self._embedding_of(self.base)
            found = factorize(delta_VD, _EMBEDDING_RANK, self._token_weights_V, self._head_input_DD)
            self._embedding = Factors(found.right_rI.T, found.left_Or.T, found.energies_r)
        left_Dr, right_rV = self._embedding.left_Or.bfloat16(), self._embedding.right_rI.bfloat16()
        matrices = {self.facts.embedding: (left_Dr, right_rV)}
        if self.is_tied and self.facts.head is not None:
            matrices[self.facts.head] = (right_rV.T, left_Dr.T)
        return matrices

    def weights(self, difference: Difference) -> dict[str, Tensor]:
        """The base's weights with the difference, by the names of its parameters: those that it changes."""
        found: dict[str, Tensor] = {}
        for path, (left, right) in difference.factors.items():
            if self.is_tied and path == self.facts.head:
                continue
            is_stored_transposed = self.facts.modules[path].kind is not LayerKind.LINEAR
            delta = left.float() @ right.float()
            weight: Tensor = self.base.get_submodule(path).weight.detach()
            found[f"{path}.weight"] = weight + (delta.T if is_stored_transposed else delta)
        found |= {f"{path}.bias": bias for path, bias in difference.biases.items()}
        if difference.replaced is not None:
            replaced = difference.replaced
            if difference.rows:
                replaced = self._embedding_of(self.base).clone()
                replaced[list(difference.rows)] = difference.replaced
            found[f"{self.facts.embedding}.weight"] = replaced
        return found


def _has(layer: nn.Module) -> Callable[[str], bool]:
    names = {name for name, _ in layer.named_modules()}
    return names.__contains__


def _norm_ratios(base: PreTrainedModel, own: PreTrainedModel) -> dict[str, Tensor]:
    """By path of a module, the factor of its input that a fine-tune's norm has and the base's has not."""
    found: dict[str, Tensor] = {}
    for path, layer in base.named_modules():
        for name, readers in _NORM_READERS.items():
            theirs, paths = getattr(layer, name, None), [f"{path}.{reader}" for reader in readers]
            if not isinstance(theirs, nn.Module) or rounds_twice(theirs) is None or not all(map(_has(layer), readers)):
                continue
            mine: Tensor = own.get_submodule(f"{path}.{name}").weight.detach()
            weight: Tensor = base.get_submodule(f"{path}.{name}").weight.detach()
            if torch.equal(mine, weight):
                continue
            is_usable = weight.abs() > 1e-3 * weight.abs().mean()
            found |= dict.fromkeys(paths, torch.where(is_usable, mine / weight, torch.ones_like(mine)))
    return found
