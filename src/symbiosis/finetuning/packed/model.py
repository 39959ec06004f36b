"""The frozen model over packed batches: one forward and one backward pass for many sessions.

R = rows of the batch, N = rows with a label, V = vocabulary, D = width of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.distributed.parallel_model import ParallelModel, probe_ids
from symbiosis.errors import CannotTrain
from symbiosis.finetuning.adapters.flat_parameters import FlatGradients
from symbiosis.finetuning.adapters.trained_adapter import NO_ADAPTER
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.async_copy import AsyncCopy
from symbiosis.finetuning.packed.attention import use_packed_attention
from symbiosis.finetuning.packed.batch import PackedBatch, PackedExample, SessionSlice
from symbiosis.finetuning.packed.context import PassContext
from symbiosis.finetuning.packed.cuda_graphs import PassGraphs
from symbiosis.finetuning.packed.lora_layers import install_lora_layers
from symbiosis.finetuning.packed.loss import token_losses
from symbiosis.gpu.driver import synchronized
from symbiosis.models.device_dtype import is_device_alive
from symbiosis.models.loading import frozen_copy
from symbiosis.models.patches.fused_ops import patch_fused_ops
from symbiosis.models.patches.gated_mlp import patch_gated_mlps

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """The result of a pass for one session."""

    losses: tuple[float, ...]
    """Of each example, divided by its `loss_divisor`."""
    gradients: Mapping[str, Tensor]
    """By parameter; an unused parameter has none."""
    is_finite: bool
    """Whether all losses and gradients are finite."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedPass:
    """A pass that the device computes."""

    batch: PackedBatch
    gradients: Sequence[Mapping[str, Tensor]]
    numbers: AsyncCopy
    """The loss of each row that the head reads, then the gradient norm of each session."""

    def results(self) -> list[PassResult]:
        """Wait for the device once, for all sessions."""
        slices, rows = self.batch.slices, self.batch.head_rows
        numbers = self.numbers.read()
        sums = [each.sum() for each in torch.split(numbers[: sum(rows)], rows)]
        divisors = [packed.loss_divisor for each in slices for packed in each.examples]
        losses = iter([float(total / divisor) for total, divisor in zip(sums, divisors, strict=True)])
        results: list[PassResult] = []
        for each, gradients, norm in zip(slices, self.gradients, numbers[-len(slices) :].tolist(), strict=True):
            own = tuple(next(losses) for _ in each.examples)
            results.append(PassResult(own, gradients, all(map(math.isfinite, (*own, norm)))))
        return results


class PackedModel:
    """A copy of a model's modules over the same weights. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, *, graphs: int = 0, parallel: ParallelModel | None = None) -> None:
        """`graphs`: CUDA graphs stored for each of two streams. `parallel`, if the model is this shard's part of one.

        Raises `CannotTrain` if the model computes other results on packed sequences.
        """
        self._model = frozen_copy(model).eval()
        self._context, self._parallel = PassContext(), parallel
        self._window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
        self.is_new = False
        """The last pass had to be prepared: later passes of its key are faster."""
        self._graphs = PassGraphs(graphs, self._model.device) if graphs and self._model.device.type == "cuda" else None
        try:
            self._prepare()
        except CannotTrain:
            raise
        except Exception as error:  # the model's code may raise anything
            raise CannotTrain(f"{type(model).__name__} does not run on packed rows: {type(error).__name__}: {error}") from error

    @torch.no_grad()
    def _prepare(self) -> None:
        model, name = self._model, type(self._model).__name__
        ids = probe_ids(model)
        if self._parallel is None:
            expected = model(input_ids=ids[None], use_cache=False).logits[0]
        else:
            expected = self._parallel.probe_logits
        if kernels.run_on(model.device):
            patch_fused_ops(model)
            patch_gated_mlps(model)
        use_packed_attention(model, self._context)
        install_lora_layers(model, self._context, None if self._parallel is None else self._parallel.layers)
        atol = _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE) * float(expected.abs().max())

        def is_close(logits: Tensor) -> bool:
            return logits.shape == expected.shape and torch.allclose(logits.float(), expected.float(), rtol=0, atol=atol)

        if not is_close(self._probe(ids.tolist())):
            raise CannotTrain(f"{name} computes other results on packed sequences: it cannot be packed")
        if not is_close(self._probe(ids.tolist(), fill=math.nan)):
            raise CannotTrain(f"{name} mixes numbers of packed sequences: it cannot be packed")

    def _probe(self, ids: list[int], fill: float | None = None) -> Tensor:
        """The logits of a sequence between two others. `fill`, if given, replaces the others' embeddings."""
        other = PackedExample(Example((*ids[3:8],), (*ids[3:8],)), 1.0, "")
        probe = PackedExample(Example((*ids, 0), (-100, *ids)), 1.0, "")  # one more token, so that every row has a label
        batch = PackedBatch([SessionSlice(NO_ADAPTER, (other, probe, other))], self._model.device, kv_heads=self._kv_heads)
        if fill is not None:
            width = self._model.get_input_embeddings().embedding_dim
            rows = torch.full((5, width), fill, device=self._model.device)
            batch.embeds += [(0, rows), (5 + len(ids) + 1, rows)]
        before, here, _ = batch.head_rows
        return self._logits(batch)[before : before + here]

    def compute(self, slices: Sequence[SessionSlice]) -> list[PassResult]:
        """Losses and gradients of each session. Does not change the sessions: it can be repeated."""
        return self.launch(slices).results()

    def launch(self, slices: Sequence[SessionSlice]) -> LaunchedPass:
        """As `compute`, without waiting for a GPU."""
        device = self._model.device
        bucketed = self._graphs is not None and all(each.adapter.flat is not None and each.requires_grad for each in slices)
        dense = kernels.run_on(device)
        batch = PackedBatch(slices, device, dense=dense, bucketed=bucketed, window=self._window, kv_heads=self._kv_heads)
        named = [
            (at, name, parameter)
            for at, each in enumerate(slices)
            if each.requires_grad and each.adapter.flat is None
            for name, parameter in each.adapter.parameters.items()
        ]
        if self._graphs is not None and bucketed and batch.key is not None:
            losses_N = self._graphs.run(batch, lambda frame: self._backward(frame, [])[0])
            found: Sequence[Tensor | None] = []
            self.is_new = self._graphs.is_new
        else:
            self.is_new = False
            losses_N, found = self._backward(batch, [parameter for *_, parameter in named])
            found = self._sum(slices, named, found)
        by_name: list[dict[str, Tensor]] = [{} for _ in slices]
        for (at, name, _), gradient in zip(named, found, strict=True):
            if gradient is not None:
                by_name[at][name] = gradient
        flat_gradients = iter(batch.lora_tables.gradients if batch.lora_tables is not None else ())
        gradients: list[Mapping[str, Tensor]] = []
        for each, own in zip(slices, by_name, strict=True):
            flat = own if each.adapter.flat is None else FlatGradients(each.adapter.flat, next(flat_gradients))
            gradients.append(flat if each.requires_grad else {})
        norms = torch.stack([_norm(each, losses_N) for each in gradients])
        return LaunchedPass(batch, gradients, AsyncCopy(torch.cat([losses_N, norms])))

    @property
    def _kv_heads(self) -> slice | None:
        return None if self._parallel is None else self._parallel.kv_heads[self._parallel.mesh.rank]

    def _sum(
        self,
        slices: Sequence[SessionSlice],
        named: Sequence[tuple[int, str, nn.Parameter]],
        found: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        """The gradients of these parameters, `named` with the number of their slice, with those of other shards."""
        return found

    def _backward(self, batch: PackedBatch, parameters: list[nn.Parameter]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The loss of each row that the head reads, and the parameters' gradients. `lora_tables` hold those of its sessions."""
        inputs: list[Tensor] = [*parameters, *([batch.lora_tables.anchor] if batch.lora_tables is not None else [])]
        with torch.set_grad_enabled(any(each.requires_grad for each in batch.slices) or not batch.slices):
            losses_N = token_losses(self._logits(batch), batch.labels_N)
        if not inputs or not losses_N.requires_grad:
            return losses_N.detach(), [None] * len(parameters)
        with torch.autograd.set_multithreading_enabled(False):  # cuBLAS settings belong to this thread
            gradients = torch.autograd.grad(losses_N, inputs, batch.loss_weights_N, allow_unused=True)
        return losses_N.detach(), gradients[: len(parameters)]

    def trim(self) -> None:
        """Free cached memory, graphs included."""
        if self._graphs is not None:
            self._graphs.clear()
        if self._model.device.type == "cuda":
            with synchronized(self._model.device):
                torch.cuda.empty_cache()

    def is_sound(self) -> bool:
        """Whether the device still computes: some GPU errors are permanent."""
        return is_device_alive(self._model.device)

    def _logits(self, batch: PackedBatch) -> Tensor:
        """Of the rows that the head reads, [N, V]."""
        with self._context.running(batch):
            inputs = {"input_ids": batch.ids_R[None]}
            if batch.embeds:
                embeds_RD = self._model.get_input_embeddings()(inputs.pop("input_ids"))[0]
                inputs["inputs_embeds"] = _insert(embeds_RD, batch.embeds)[None]
            keep = 0 if batch.head_rows_N is None else batch.head_rows_N
            output = self._model(**inputs, position_ids=batch.positions_R[None], use_cache=False, logits_to_keep=keep)
        logits: Tensor = output.logits.squeeze(0)  # whose backward copies nothing, unlike that of [0]
        return logits


def _norm(gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """A norm that is finite if all gradients are."""
    if isinstance(gradients, FlatGradients):
        norm: Tensor = torch.linalg.vector_norm(gradients.gradients_N)
        return norm
    norms = torch._foreach_norm(list(gradients.values())) if gradients else []
    return torch.stack([norm.float() for norm in norms]).sum() if norms else like.new_zeros(())


def _insert(embeds_RD: Tensor, virtual: list[tuple[int, Tensor]]) -> Tensor:
    """The embeddings with those of virtual tokens at their rows."""
    parts: list[Tensor] = []
    at = 0
    for start, values in virtual:
        parts += [embeds_RD[at:start], values.to(embeds_RD.dtype)]
        at = start + len(values)
    return torch.cat([*parts, embeds_RD[at:]])
