"""The frozen model that computes packed passes: one forward and one backward for many sessions.

R = rows of the pass, N = rows with a label, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.errors import CannotTrain
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.async_copy import AsyncCopy
from symbiosis.finetuning.packed.attention import use_packed_attention
from symbiosis.finetuning.packed.batch import PackedBatch, PackedExample, SessionSlice
from symbiosis.finetuning.packed.context import PassContext
from symbiosis.finetuning.packed.cuda_graphs import PassGraphs
from symbiosis.finetuning.packed.flat_lora import FlatGradients
from symbiosis.finetuning.packed.lora_layers import adapt
from symbiosis.finetuning.packed.loss import piece_losses, token_losses
from symbiosis.finetuning.trained_adapter import NOTHING
from symbiosis.gpu.driver import synchronized
from symbiosis.models.loading import frozen_copy
from symbiosis.models.patches.fused_ops import fuse
from symbiosis.models.patches.gated_mlp import gate

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """What a pass gave one session."""

    losses: tuple[float, ...]
    """Of each piece, divided by its items."""
    gradients: Mapping[str, Tensor]
    """By parameter; one that took no part has none."""
    finite: bool
    """Whether all losses and gradients are numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedPass:
    """A pass under way."""

    pack: PackedBatch
    gradients: Sequence[Mapping[str, Tensor]]
    numbers: AsyncCopy
    """The loss of each row that the head sees, and of each share a number that is none if a gradient has one."""

    def outcomes(self) -> list[PassResult]:
        """Waits for the device, once for all of them."""
        shares, rows = self.pack.shares, self.pack.head_rows
        numbers = self.numbers.read()
        losses_N, norms = numbers[: sum(rows)], numbers[-len(shares) :]
        items = [piece.items for share in shares for piece in share.pieces]
        losses = iter(piece_losses(losses_N, rows, items))
        found: list[PassResult] = []
        for share, gradients, norm in zip(shares, self.gradients, norms.tolist(), strict=True):
            mine = tuple(next(losses) for _ in share.pieces)
            found.append(PassResult(mine, gradients, all(map(math.isfinite, (*mine, norm)))))
        return found


class PackedModel:
    """A copy of a model's modules over the very same weights. One thread computes."""

    def __init__(self, model: PreTrainedModel, *, graphs: int = 0) -> None:
        """At most so many CUDA graphs are kept at a time of each of two streams.

        Raises `CannotTrain` if the model computes something else when its sequences lie behind each other.
        """
        self._model = frozen_copy(model).eval()
        self._stage = PassContext()
        self._window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
        self.is_new = False
        """The last pass was of a kind that had to be made ready: the next one of it will be faster."""
        self._replays = PassGraphs(graphs, self._model.device) if graphs and self._model.device.type == "cuda" else None
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
        if kernels.run_on(model.device):
            fuse(model)
            gate(model)
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
        around = PackedExample(Example((*ids[3:8],), (*ids[3:8],)), 1.0, "")
        middle = PackedExample(Example((*ids, 0), (-100, *ids)), 1.0, "")  # one token more, so that every row has a label
        pack = PackedBatch([SessionSlice(NOTHING, (around, middle, around))], self._model.device)
        if beside is not None:
            width = self._model.get_input_embeddings().embedding_dim
            rows = torch.full((5, width), beside, device=self._model.device)
            pack.embeds += [(0, rows), (5 + len(ids) + 1, rows)]
        before, here, _ = pack.head_rows
        return self._logits(pack)[before : before + here]

    def compute(self, shares: Sequence[SessionSlice]) -> list[PassResult]:
        """Losses and gradients of each session. Nothing of the sessions is changed, so it may be repeated."""
        return self.launch(shares).outcomes()

    def launch(self, shares: Sequence[SessionSlice]) -> LaunchedPass:
        """The same without waiting for a GPU to have computed it."""
        device = self._model.device
        by_kernels = kernels.run_on(device)
        even = self._replays is not None and all(share.adapter.flat is not None and share.learns for share in shares)
        pack = PackedBatch(shares, device, dense=by_kernels, even=even, window=self._window)
        named = [
            (number, name, p)
            for number, share in enumerate(shares)
            if share.learns and share.adapter.flat is None
            for name, p in share.adapter.parameters.items()
        ]
        if self._replays is not None and even and pack.key is not None:
            losses_N = self._replays.run(pack, lambda given: self._backward(given, [])[0])
            found: Sequence[Tensor | None] = []
            self.is_new = self._replays.is_new
        else:
            self.is_new = False
            losses_N, found = self._backward(pack, [p for *_, p in named])
        by_name: list[dict[str, Tensor]] = [{} for _ in shares]
        for (number, name, _), gradient in zip(named, found, strict=True):
            if gradient is not None:
                by_name[number][name] = gradient
        together = iter(pack.grouped.gradients if pack.grouped is not None else ())
        gradients = [
            each if share.adapter.flat is None else FlatGradients(share.adapter.flat, next(together))
            for share, each in zip(shares, by_name, strict=True)
        ]
        gradients = [each if share.learns else {} for share, each in zip(shares, gradients, strict=True)]
        norms = torch.stack([_size(each, losses_N) for each in gradients])
        return LaunchedPass(pack, gradients, AsyncCopy(torch.cat([losses_N, norms])))

    def _backward(self, pack: PackedBatch, parameters: list[nn.Parameter]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The loss of every row that the head sees, and gradients of these parameters; `grouped` ones go to their places."""
        wanted: list[Tensor] = [*parameters, *([pack.grouped.anchor] if pack.grouped is not None else [])]
        with torch.set_grad_enabled(any(share.learns for share in pack.shares) or not pack.shares):
            losses_N = token_losses(self._logits(pack), pack.labels_N)
        if not wanted or not losses_N.requires_grad:
            return losses_N.detach(), [None] * len(parameters)
        with torch.autograd.set_multithreading_enabled(False):  # settings of the library of products are this thread's
            found = torch.autograd.grad(losses_N, wanted, pack.upstream_N, allow_unused=True)
        return losses_N.detach(), found[: len(parameters)]

    def trim(self) -> None:
        """Give back what is kept for later passes, graphs too."""
        if self._replays is not None:
            self._replays.clear()
        if self._model.device.type == "cuda":
            with synchronized(self._model.device):
                torch.cuda.empty_cache()

    def is_sound(self) -> bool:
        """Whether the device still computes: some of a GPU's errors are for ever."""
        try:
            return int(torch.ones(1, device=self._model.device).item()) == 1
        except Exception:  # noqa: BLE001 - whatever it says, it is not sound
            return False

    def _logits(self, pack: PackedBatch) -> Tensor:
        """Of the rows with a label, [N, V]."""
        with self._stage.running(pack):
            inputs = {"input_ids": pack.ids_R[None]}
            if pack.embeds:
                rows = self._model.get_input_embeddings()(inputs.pop("input_ids"))[0]
                inputs["inputs_embeds"] = _with_given(rows, pack.embeds)[None]
            keep = 0 if pack.wanted_N is None else pack.wanted_N
            output = self._model(**inputs, position_ids=pack.places_R[None], use_cache=False, logits_to_keep=keep)
        logits: Tensor = output.logits[0]
        return logits


def _size(gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """A number that is none if a gradient has one that is none."""
    if isinstance(gradients, FlatGradients):
        norm: Tensor = torch.linalg.vector_norm(gradients.gradients_N)
        return norm
    norms = torch._foreach_norm(list(gradients.values())) if gradients else []
    return torch.stack([norm.float() for norm in norms]).sum() if norms else like.new_zeros(())


def _with_given(rows_RD: Tensor, given: list[tuple[int, Tensor]]) -> Tensor:
    """The embeddings with those of virtual tokens in their places."""
    parts: list[Tensor] = []
    at = 0
    for start, values in given:
        parts += [rows_RD[at:start], values.to(rows_RD.dtype)]
        at = start + len(values)
    return torch.cat([*parts, rows_RD[at:]])
