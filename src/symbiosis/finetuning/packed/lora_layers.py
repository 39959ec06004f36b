"""Layers of the frozen model that apply the adapters of the running pass, under autograd.

The model stays the plain transformers model: each module keeps its class, with a mixin in front. A layer without adapters
computes what the base layer computes.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.finetuning.packed.context import PassContext
from symbiosis.models.patches.mixin import PatchedLayer, mix_in, plain_linears


class PackedLoraLinear(PatchedLayer):
    """In front of `nn.Linear` and `Conv1D`."""

    symbiosis_context: PassContext

    def forward(self, x: Tensor) -> Tensor:
        batch, path, is_head = self.symbiosis_context.batch, self.symbiosis_path, self.symbiosis_is_head
        adapters = batch.adapters_at(path, is_head=is_head)
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


def install_lora_layers(model: PreTrainedModel, context: PassContext) -> None:
    """Patch the linear layers of a model."""
    for path, layer, is_head in plain_linears(model):
        mix_in(layer, PackedLoraLinear, symbiosis_context=context, symbiosis_path=path, symbiosis_is_head=is_head)
