"""An adapter as the engine computes with it: in its dtype, in one piece of memory, what can be worked out before worked out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis import kernels
from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart, Part, ReplacedPart, TrainableTokensPart
from symbiosis.errors import UnsupportedAdapter
from symbiosis.serving.lora.lora_weights import (
    EngineAdapter,
    Ia3Weights,
    LoraWeights,
    ReplacedWeights,
    TokenRows,
    VirtualTokens,
)
from symbiosis.serving.lora.lora_weights import Part as Computed
from symbiosis.serving.lora.packed_adapter import PackedAdapter, flatten


class Converter:
    """Makes adapters of one model fit to be computed with. Any thread may use it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def convert(self, adapter: Adapter) -> PackedAdapter:
        """The adapter in ordinary memory. Raises `UnsupportedAdapter` if a part acts on a module that cannot be acted on."""
        parts = {path: tuple(self._computed(path, part) for part in found) for path, found in adapter.parts.items()}
        return flatten(EngineAdapter(adapter.hash, parts, self._virtual(adapter)), self._shared)

    def _virtual(self, adapter: Adapter) -> VirtualTokens | None:
        if adapter.prefix is not None:
            given = (adapter.prefix.keys_LHTD, adapter.prefix.values_LHTD)
            keys, values = (t.to(self._model.dtype).transpose(1, 2).contiguous() for t in given)
            return VirtualTokens(keys.shape[1], keys_LTKD=keys, values_LTKD=values)
        if adapter.prompt is not None:
            rows = adapter.prompt.embeddings_TD.to(self._model.dtype)
            return VirtualTokens(len(rows), embeddings_TD=rows)
        return None

    def _computed(self, path: str, part: Part) -> Computed:
        module = self._model.get_submodule(path)
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            raise UnsupportedAdapter(
                f"{path} is a {type(module).__name__}: the engine applies adapters to linear layers and embeddings"
            )
        if not hasattr(module, "symbiosis_alone") and type(module) not in (nn.Linear, Conv1D, nn.Embedding):
            raise UnsupportedAdapter(
                f"{path} is a {type(module).__name__}, which is more than a linear layer: no adapter can act on it"
            )
        if getattr(module, "symbiosis_scale", 1.0) is None:
            raise UnsupportedAdapter(
                f"{path} is a {type(module).__name__}: it does more than look rows up, no adapter can act on it"
            )
        weight: Any = module.weight
        if isinstance(part, LoraPart):
            of_embedding = isinstance(module, nn.Embedding)
            return _low(part, weight.T if of_embedding or isinstance(module, Conv1D) else weight, of_embedding=of_embedding)
        if isinstance(part, Ia3Part):
            return Ia3Weights(part.vector.to(weight.dtype), part.of_input)
        if isinstance(part, TrainableTokensPart):
            return TokenRows(torch.tensor(part.ids), part.rows_TD.to(weight.dtype))
        assert isinstance(part, ReplacedPart), part
        own = weight if part.weight is None else part.weight.to(weight.dtype)
        bias = getattr(module, "bias", None) if part.bias is None else part.bias.to(weight.dtype)
        return ReplacedWeights(own.T if isinstance(module, Conv1D) else own, bias)


def _low(part: LoraPart, weight_OI: Tensor, *, of_embedding: bool) -> LoraWeights:
    a_rI, b_Or = part.a_RI.float(), part.b_OR.float()
    stretch = None
    if part.magnitude_O is not None:  # where the base weight is: it is the largest
        a, there = a_rI.to(weight_OI.device), b_Or.to(weight_OI.device)
        length_O = torch.cat(
            [  # a few rows at a time: the whole in float32 may be large
                torch.linalg.norm(rows.float() + part.scale * (b @ a), dim=1)
                for rows, b in zip(torch.split(weight_OI, 1024), torch.split(there, 1024), strict=True)
            ]
        ).to("cpu")
        stretch = (part.magnitude_O.float() / length_O).to(weight_OI.dtype)
    bias = None if part.bias_O is None else (part.scale * part.bias_O.float()).to(weight_OI.dtype)
    a_rI, b_Or = a_rI.to(weight_OI.dtype), (part.scale * b_Or).to(weight_OI.dtype)
    if not kernels.run_on(weight_OI.device):
        a_rI, b_Or = a_rI.T.contiguous().T, b_Or.T.contiguous().T
    return LoraWeights(a_rI, b_Or, bias, stretch, of_embedding)
