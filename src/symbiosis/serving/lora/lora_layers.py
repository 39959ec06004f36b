"""Layers of the served model that apply the adapters of the pass that runs (`bank`).

The model stays the plain transformers model: its modules keep their classes,
with ours in front. Without an adapter on a layer, it computes what it always did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.models.fuse_projections import find_fused_projections
from symbiosis.models.patches.mixin import mix_in
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_ops import AdapterOps, FusedProjection


class LoraLayer(nn.Module):
    """What adapted layers share."""

    symbiosis_bank: ActiveAdapters
    symbiosis_path: str
    symbiosis_head: bool
    symbiosis_alone: FusedProjection

    def _effect(self, together: FusedProjection) -> AdapterOps | None:
        return self.symbiosis_bank.effect(together, of_head=self.symbiosis_head)


class LoraLinear(LoraLayer):
    """In front of `nn.Linear` and `Conv1D`."""

    symbiosis_together: FusedProjection

    def forward(self, x: Tensor) -> Tensor:
        together = self.symbiosis_together
        found = together.take(self.symbiosis_path, x)
        if found is not None:
            return found
        effect = self._effect(together)
        if effect is not None and effect.scaled_inputs and len(together.paths) > 1:
            together = self.symbiosis_alone  # it sees other rows than the others
            effect = self._effect(together)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        self.symbiosis_bank.check(rows.shape[0], of_head=self.symbiosis_head)
        if effect is not None:
            rows = effect.before(rows)
        change = self.symbiosis_bank.begin_change(rows, together, of_head=self.symbiosis_head)
        result = self._product(rows, together)
        if change is not None:
            change.add(result)
        if effect is not None:
            effect.after(rows, result, together.bias_O)
        parts = torch.split(result, together.widths, 1) if len(together.paths) > 1 else [result]
        return together.keep(x, self.symbiosis_path, [part.view(*x.shape[:-1], part.shape[-1]) for part in parts])

    def _product(self, rows: Tensor, together: FusedProjection) -> Tensor:
        if isinstance(self, nn.Linear):
            return together.product(rows)
        return super().forward(rows)  # type: ignore[no-any-return]


class LoraEmbedding(LoraLayer):
    """In front of `nn.Embedding`: rows of adapters with an embedding of their own are read from that."""

    symbiosis_scale: Tensor | float | None
    """What the layer multiplies its rows with; None if it does something else to them."""

    def forward(self, ids: Tensor, *more: Any, **named: Any) -> Tensor:
        result: Tensor = super().forward(ids, *more, **named)
        effect = self._effect(self.symbiosis_alone)
        if effect is None:
            return result
        assert self.symbiosis_scale is not None, "the loader refuses others"
        effect.embedded(ids.reshape(-1), result.view(-1, result.shape[-1]), self.symbiosis_scale)
        return result


def adapt(model: PreTrainedModel, bank: ActiveAdapters) -> None:
    """Let the linear layers and embeddings of this model ask the bank."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear or type(module) is Conv1D:
            mix_in(module, LoraLinear)
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
            alone = FusedProjection([path], [weight.shape[0]], weight, module.bias)
            _set(module, symbiosis_alone=alone, symbiosis_together=alone)
        elif isinstance(module, nn.Embedding):
            scale = 1.0 if type(module) is nn.Embedding else getattr(module, "embed_scale", None)
            scale = scale.to(module.weight) if isinstance(scale, Tensor) else scale
            mix_in(module, LoraEmbedding)
            _set(
                module,
                symbiosis_scale=scale,
                symbiosis_alone=FusedProjection([path], [module.embedding_dim], module.weight, None),
            )
        else:
            continue
        _set(module, symbiosis_bank=bank, symbiosis_path=path, symbiosis_head=module is head)


def adapt_together(model: PreTrainedModel) -> None:
    """Let adapted layers that lie next to each other (`models.joining`) be computed as one."""
    for path, parent in list(model.named_modules()):
        for names in find_fused_projections(parent):
            members = [parent.get_submodule(name) for name in names]
            widths = [member.weight.shape[0] for member in members]
            weight, bias = (_as_one(member._parameters[name] for member in members) for name in ("weight", "bias"))
            assert weight is not None
            together = FusedProjection([f"{path}.{name}" if path else name for name in names], widths, weight, bias)
            for member in members:
                _set(member, symbiosis_together=together)


def _as_one(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Tensors that lie next to each other as one."""
    first, *others = parts
    if first is None:
        return None
    rows = first.shape[0] + sum(other.shape[0] for other in others if other is not None)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _set(module: nn.Module, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
