"""Layers of the frozen model that apply the adapters of the pass that runs, under autograd.

The model stays the plain transformers model: its modules keep their classes, with ours in front. A layer that no
adapter of the pass touches computes what it always did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.finetuning.packed.context import PassContext
from symbiosis.finetuning.packed.lora_math import TrainableIa3, TrainableLora
from symbiosis.models.patches.mixin import mix_in


class PackedLoraLinear(nn.Module):
    """In front of `nn.Linear` and `Conv1D`."""

    symbiosis_stage: PassContext
    symbiosis_path: str
    symbiosis_head: bool

    def forward(self, x: Tensor) -> Tensor:
        pack = self.symbiosis_stage.pack
        acts = pack.acts(self.symbiosis_path, of_head=self.symbiosis_head)
        together = pack.grouped if pack.grouped is not None and self.symbiosis_path in pack.grouped else None
        if acts is None and together is None:
            plain: Tensor = super().forward(x)
            return plain
        rows = x.reshape(-1, x.shape[-1])
        if acts is not None and any(isinstance(part, TrainableIa3) and part.of_input for part in acts.parts):
            pieces = zip(acts.parts, torch.split(rows, acts.sizes), strict=True)
            rows = torch.cat([p.scaled(x) if isinstance(p, TrainableIa3) and p.of_input else x for p, x in pieces])
        if together is None:
            result: Tensor = super().forward(rows)
        else:
            result = together.changed(self.symbiosis_path, self, rows, of_head=self.symbiosis_head)
        if acts is not None and any(
            isinstance(part, TrainableLora) or (isinstance(part, TrainableIa3) and not part.of_input) for part in acts.parts
        ):
            changed: list[Tensor] = []
            seen, given = torch.split(rows, acts.sizes), torch.split(result, acts.sizes)
            for part, drop, x_RI, y_RO in zip(acts.parts, acts.drops, seen, given, strict=True):
                if isinstance(part, TrainableLora):
                    changed.append(part.after(x_RI, y_RO, self, drop))
                else:
                    changed.append(part.scaled(y_RO) if part is not None and not part.of_input else y_RO)
            result = torch.cat(changed)
        return result.view(*x.shape[:-1], result.shape[-1])


def adapt(model: PreTrainedModel, stage: PassContext) -> None:
    """Let the linear layers of this model look at the stage."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear or type(module) is Conv1D:
            mix_in(module, PackedLoraLinear)
            _set(module, symbiosis_stage=stage, symbiosis_path=path, symbiosis_head=module is head)


def _set(module: nn.Module, **attributes: Any) -> None:
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
