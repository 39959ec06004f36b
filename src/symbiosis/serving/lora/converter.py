"""Converts checked adapters to the engine's form: its dtype, one buffer, derived tensors precomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis import kernels
from symbiosis.adapters.dora_norm import dora_norm
from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart, Part, ReplacedPart, TrainableTokensPart
from symbiosis.errors import UnsupportedAdapter
from symbiosis.serving.lora.lora_weights import EngineAdapter, LoraWeights, ReplacedWeights, TokenRows, VirtualTokens
from symbiosis.serving.lora.lora_weights import Part as EnginePart
from symbiosis.serving.lora.packed_adapter import PackedAdapter, pack


@dataclass(frozen=True, slots=True, eq=False)
class DividedAdapter:
    """An adapter, divided among shards."""

    own: Adapter
    """The part of this shard."""
    norms: Mapping[str, Tensor]
    """DoRA's norms of this shard's outputs, by path of the layer."""
    others: tuple[bytes, ...]
    """The parts of the other shards, as they are sent."""


DivideAdapter: TypeAlias = Callable[[Adapter], DividedAdapter]


class Converter:
    """Converts adapters of one model. Thread-safe."""

    def __init__(self, model: PreTrainedModel, divide: DivideAdapter | None = None) -> None:
        """`divide`: of a model that is the first of several shards."""
        self._model, self._divide = model, divide
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def convert(self, adapter: Adapter) -> PackedAdapter:
        """The adapter in pageable memory. Raises `UnsupportedAdapter` if the engine cannot patch a target module."""
        if self._divide is None:
            return self.convert_part(adapter)
        divided = self._divide(adapter)
        own = self.convert_part(divided.own, divided.norms)
        return replace(own, others=divided.others)

    def convert_part(self, adapter: Adapter, norms: Mapping[str, Tensor] | None = None) -> PackedAdapter:
        """The same for an adapter of this model's own widths. `norms` are DoRA's, of layers whose weights are divided."""
        norms = norms or {}
        parts = {
            path: tuple(self._convert_part(path, part, norms.get(path)) for part in found)
            for path, found in adapter.parts.items()
        }
        return pack(EngineAdapter(adapter.hash, parts, self._convert_virtual(adapter)), self._shared)

    def _convert_virtual(self, adapter: Adapter) -> VirtualTokens | None:
        if adapter.prefix is not None:
            stored = (adapter.prefix.keys_LHTD, adapter.prefix.values_LHTD)
            keys, values = (t.to(self._model.dtype).transpose(1, 2).contiguous() for t in stored)
            return VirtualTokens(keys.shape[1], keys_LTKD=keys, values_LTKD=values)
        if adapter.prompt is not None:
            embeddings_TD = adapter.prompt.embeddings_TD.to(self._model.dtype)
            return VirtualTokens(len(embeddings_TD), embeddings_TD=embeddings_TD)
        return None

    def _convert_part(self, path: str, part: Part, norm_O: Tensor | None) -> EnginePart:
        module = self._model.get_submodule(path)
        of_embedding, is_conv1d = isinstance(module, nn.Embedding), isinstance(module, Conv1D)
        is_patched = hasattr(module, "symbiosis_single") or type(module) in (nn.Linear, Conv1D, nn.Embedding)
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) or not is_patched:
            raise UnsupportedAdapter(
                f"{path} is a {type(module).__name__}: adapters are supported on nn.Linear, Conv1D and embeddings"
            )
        if getattr(module, "symbiosis_scale", 1.0) is None:
            raise UnsupportedAdapter(
                f"{path} is a {type(module).__name__}: adapters are supported on embeddings that only look up rows"
            )
        weight: Any = module.weight
        if isinstance(part, LoraPart):
            weight_OI = weight.T if of_embedding or is_conv1d else weight
            return _convert_lora(part, weight_OI, norm_O, of_embedding=of_embedding)
        if isinstance(part, Ia3Part):
            return Ia3Part(part.vector.to(weight.dtype), part.of_input)
        if isinstance(part, TrainableTokensPart):
            return TokenRows(torch.tensor(part.ids), part.rows_TD.to(weight.dtype))
        assert isinstance(part, ReplacedPart), part
        own = weight if part.weight is None else part.weight.to(weight.dtype)
        bias = getattr(module, "bias", None) if part.bias is None else part.bias.to(weight.dtype)
        return ReplacedWeights(own.T if is_conv1d else own, bias)


def _convert_lora(part: LoraPart, weight_OI: Tensor, norm_O: Tensor | None, *, of_embedding: bool) -> LoraWeights:
    a_rI, b_Or, device = part.a_RI.float(), part.b_OR.float(), weight_OI.device
    mag_norm_scale_O = None
    if part.magnitude_O is not None:
        if norm_O is None:  # on the device of the base weight, which is the largest tensor
            norm_O = dora_norm(weight_OI, a_rI.to(device), b_Or.to(device), part.scale).to("cpu")
        mag_norm_scale_O = (part.magnitude_O.float() / norm_O).to(weight_OI.dtype)
    bias_O = None if part.bias_O is None else (part.scale * part.bias_O.float()).to(weight_OI.dtype)
    a_rI, b_Or = a_rI.to(weight_OI.dtype), (part.scale * b_Or).to(weight_OI.dtype)
    if not kernels.run_on(device):
        a_rI, b_Or = a_rI.T.contiguous().T, b_Or.T.contiguous().T
    return LoraWeights(a_rI, b_Or, bias_O, mag_norm_scale_O, of_embedding)
