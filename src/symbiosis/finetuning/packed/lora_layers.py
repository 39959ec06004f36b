"""Layers of the frozen model that apply the adapters of the running pass, under autograd.

The model stays the plain transformers model: each module keeps its class, with a mixin in front. A layer without adapters
computes what the base layer computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.finetuning.packed.context import PassContext
from symbiosis.models.patches.mixin import PatchedLayer, mix_in, plain_linears


class PackedLoraLinear(PatchedLayer):
    """In front of `nn.Linear` and `Conv1D`."""

    symbiosis_context: PassContext
    symbiosis_parallel: ParallelLayer | None
    """Set if this is a shard's part of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        parallel = self.symbiosis_parallel
        if parallel is None:
            return self._project(x)
        return parallel.leave(self._project(parallel.enter(x)))

    def _project(self, x: Tensor) -> Tensor:
        batch, path, is_head = self.symbiosis_context.batch, self.symbiosis_path, self.symbiosis_is_head
        adapters = batch.adapters_at(path, is_head=is_head, parallel=self.symbiosis_parallel)
        tables = batch.lora_tables if batch.lora_tables is not None and path in batch.lora_tables else None
        if adapters is None and tables is None:
            base: Tensor = super().forward(x)
            return base
        x_RI = x.reshape(-1, x.shape[-1])
        if adapters is not None:
            x_RI = adapters.scale_inputs(x_RI)
        y_RO: Tensor = super().forward(x_RI) if tables is None else tables.project(path, self, x_RI, is_head=is_head)
        if adapters is not None:
            y_RO = adapters.apply(x_RI, y_RO, self)
        return y_RO.view(*x.shape[:-1], y_RO.shape[-1])


class ParallelEmbedding(PatchedLayer):
    """In front of an `nn.Embedding` of which this shard has some rows."""

    symbiosis_parallel: ParallelLayer

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ids, is_local = self.symbiosis_parallel.localize(ids)
        rows: Tensor = super().forward(ids, *args, **kwargs)
        return self.symbiosis_parallel.leave(rows.masked_fill(~is_local[..., None], 0))


def install_lora_layers(
    model: PreTrainedModel, context: PassContext, parallel: Mapping[str, ParallelLayer] | None = None
) -> None:
    """Patch the linear layers of a model. `parallel`: the layers of which this shard has a part."""
    parallel = parallel or {}
    for path, layer, is_head in plain_linears(model):
        mix_in(
            layer,
            PackedLoraLinear,
            symbiosis_context=context,
            symbiosis_path=path,
            symbiosis_is_head=is_head,
            symbiosis_parallel=parallel.get(path),
        )
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding) and path in parallel:
            mix_in(module, ParallelEmbedding, symbiosis_parallel=parallel[path])
