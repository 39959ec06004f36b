"""Layers of the served model that apply the adapters of the pass that runs (`bank`).

The model stays the plain transformers model: its modules keep their classes,
with ours in front. Without an adapter on a layer, it computes what it always did.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.client.layers import mix_in
from symbiosis.engine.bank import Bank, Effect
from symbiosis.executor.product import product


class Adapted(nn.Module):
    """What adapted layers share."""

    symbiosis_bank: Bank
    symbiosis_path: str
    symbiosis_head: bool

    def _effect(self) -> Effect | None:
        return self.symbiosis_bank.effect(self.symbiosis_path, of_head=self.symbiosis_head)


class AdaptedLinear(Adapted):
    """In front of `nn.Linear` and `Conv1D`."""

    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        effect = self._effect()
        if effect is None:
            return self._product(x)
        rows = x.reshape(-1, x.shape[-1])
        seen = effect.before(rows)
        result = effect.after(seen, self._product(seen), self.bias)
        return result.view(*x.shape[:-1], result.shape[-1])

    def _product(self, x: Tensor) -> Tensor:
        if not isinstance(self, nn.Linear):
            return super().forward(x)  # type: ignore[no-any-return]
        flat = x.reshape(-1, x.shape[-1])
        return product(flat, self.weight, self.bias).view(*x.shape[:-1], -1)


class AdaptedEmbedding(Adapted):
    """In front of `nn.Embedding`: rows of adapters with an embedding of their own are read from that."""

    def forward(self, ids: Tensor, *more: Any, **named: Any) -> Tensor:
        result: Tensor = super().forward(ids, *more, **named)
        effect = self._effect()
        if effect is None:
            return result
        effect.embedded(ids.reshape(-1), result.view(-1, result.shape[-1]))
        return result


def adapt(model: PreTrainedModel, bank: Bank) -> None:
    """Let the linear layers and embeddings of this model ask the bank."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear or type(module) is Conv1D:
            mix_in(module, AdaptedLinear)
        elif isinstance(module, nn.Embedding):
            mix_in(module, AdaptedEmbedding)
        else:
            continue
        attributes = {"symbiosis_bank": bank, "symbiosis_path": path, "symbiosis_head": module is head}
        for name, value in attributes.items():
            object.__setattr__(module, name, value)
