"""The frozen model that computes packed passes: one forward and one backward for many sessions.

R = rows of the pass, N = rows with a label, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.errors import CannotTrain
from symbiosis.models.source import frozen_copy
from symbiosis.training.adapter import NOTHING
from symbiosis.training.attention import use_packed_attention
from symbiosis.training.examples import Example
from symbiosis.training.layers import adapt
from symbiosis.training.loss import piece_losses, token_losses
from symbiosis.training.pack import Pack, Piece, Share
from symbiosis.training.stage import Stage

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a pass gave one session."""

    losses: tuple[float, ...]
    """Of each piece, divided by its items."""
    gradients: Mapping[str, Tensor]
    """By parameter; one that took no part has none."""
    finite: bool
    """Whether all losses and gradients are numbers."""


class PackedModel:
    """A copy of a model's modules over the very same weights. One thread computes."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `CannotTrain` if the model computes something else when its sequences lie behind each other."""
        self._model = frozen_copy(model).eval()
        self._stage = Stage()
        try:
            self._prepare()
        except CannotTrain:
            raise
        except Exception as error:  # a model's code may raise anything; all means the same to the caller
            raise CannotTrain(f"{type(model).__name__} does not run on packed rows: {type(error).__name__}: {error}") from error

    @torch.no_grad()
    def _prepare(self) -> None:
        model, name = self._model, type(self._model).__name__
        ids = torch.arange(12, device=model.device).remainder(model.config.get_text_config().vocab_size)
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
        use_packed_attention(model, self._stage)
        adapt(model, self._stage)
        room = _TOLERANCE.get(model.dtype, _COARSE) * float(expected.abs().max())

        def is_right(found: Tensor) -> bool:
            return found.shape == expected.shape and torch.allclose(found.float(), expected.float(), rtol=0, atol=room)

        if not is_right(self._probe(ids.tolist())):
            raise CannotTrain(f"{name} computes something else when its sequences lie behind each other: it cannot be packed")
        if not is_right(self._probe(ids.tolist(), beside=math.nan)):
            raise CannotTrain(f"{name} lets one sequence's numbers into another's: it cannot be packed")

    def _probe(self, ids: list[int], beside: float | None = None) -> Tensor:
        """The logits of a sequence between two others, whose embeddings are all `beside` if it is given."""
        around = Piece(Example((*ids[3:8],), (*ids[3:8],)), 1.0, "")
        middle = Piece(Example((*ids, 0), (-100, *ids)), 1.0, "")  # one token more, so that every row has a label
        pack = Pack([Share(NOTHING, (around, middle, around))], self._model.device)
        if beside is not None:
            width = self._model.get_input_embeddings().embedding_dim
            rows = torch.full((5, width), beside, device=self._model.device)
            pack.embeds += [(0, rows), (5 + len(ids) + 1, rows)]
        before, here, _ = pack.labels_by_piece()[0]
        return self._logits(pack)[before : before + here]

    def compute(self, shares: Sequence[Share]) -> list[Outcome]:
        """Losses and gradients of each session. Nothing of the sessions is changed, so it may be repeated."""
        with torch.set_grad_enabled(any(share.learns for share in shares)):
            pack = Pack(shares, self._model.device)
            losses_N = token_losses(self._logits(pack), pack.labels_N)
            counts = [count for of_share in pack.labels_by_piece() for count in of_share]
            items = [piece.items for share in shares for piece in share.pieces]
            losses = iter(piece_losses(losses_N, counts, items))
            by_share = [torch.stack([next(losses) for _ in share.pieces]) for share in shares]
        named = [(number, name, p) for number, s in enumerate(shares) if s.learns for name, p in s.adapter.parameters.items()]
        # a share without labels has no gradient; neither has one without parameters
        heads = [loss.sum() for loss, share in zip(by_share, shares, strict=True) if share.learns and loss.requires_grad]
        found = torch.autograd.grad(heads, [p for *_, p in named], allow_unused=True) if heads else [None] * len(named)
        gradients: list[dict[str, Tensor]] = [{} for _ in shares]
        for (number, name, _), gradient in zip(named, found, strict=True):
            if gradient is not None:
                gradients[number][name] = gradient
        return self._outcomes(by_share, gradients)

    def is_sound(self) -> bool:
        """Whether the device still computes: some of a GPU's errors are for ever."""
        try:
            return int(torch.ones(1, device=self._model.device).item()) == 1
        except Exception:  # noqa: BLE001 - whatever it says, it is not sound
            return False

    def _outcomes(self, losses: list[Tensor], gradients: list[dict[str, Tensor]]) -> list[Outcome]:
        """One wait for the device, however many there are."""
        norms = [
            torch.stack([norm.float() for norm in torch._foreach_norm(list(g.values()))]).sum() if g else loss.new_zeros(())
            for loss, g in zip(losses, gradients, strict=True)
        ]
        numbers = torch.cat([torch.cat([loss.detach(), norm[None]]) for loss, norm in zip(losses, norms, strict=True)]).tolist()
        outcomes: list[Outcome] = []
        at = 0
        for loss, of_share in zip(losses, gradients, strict=True):
            mine = numbers[at : at + len(loss) + 1]
            at += len(mine)
            outcomes.append(Outcome(tuple(mine[:-1]), of_share, all(map(math.isfinite, mine))))
        return outcomes

    def _logits(self, pack: Pack) -> Tensor:
        """Of the rows with a label, [N, V]."""
        with self._stage.running(pack):
            inputs = {"input_ids": pack.ids_R[None]}
            if pack.embeds:
                rows = self._model.get_input_embeddings()(inputs.pop("input_ids"))[0]
                inputs["inputs_embeds"] = _with_given(rows, pack.embeds)[None]
            output = self._model(**inputs, position_ids=pack.places_R[None], use_cache=False, logits_to_keep=pack.wanted_N)
        logits: Tensor = output.logits[0]
        return logits


def _with_given(rows_RD: Tensor, given: list[tuple[int, Tensor]]) -> Tensor:
    """The embeddings with those of virtual tokens in their places."""
    parts: list[Tensor] = []
    at = 0
    for start, values in given:
        parts += [rows_RD[at:start], values.to(rows_RD.dtype)]
        at = start + len(values)
    return torch.cat([*parts, rows_RD[at:]])
