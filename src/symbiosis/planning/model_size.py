"""Sizes of a model that is not loaded: weights by part, KV cache by token. The model is on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.errors import UnknownModel
from symbiosis.models.fuse_projections import fused_groups
from symbiosis.models.loading import build_meta_model, load_config
from symbiosis.models.max_length import max_sequence_length
from symbiosis.models.patches.mixin import plain_linears
from symbiosis.models.split import Split, split
from symbiosis.types import LayerKind


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all tensors; those that share a storage count once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@dataclass(frozen=True, eq=False)
class ModelSize:
    """A model's parts in bytes."""

    model: PreTrainedModel
    """On the meta device."""
    name: str
    hosting: Mapping[str, Any] = field(default_factory=dict)
    """Options of `split`."""

    @classmethod
    def of(cls, source: Any, dtype: torch.dtype | None = None, **hosting: bool) -> ModelSize:
        """`source`: a folder, a hub id, a config, or None for the default model. Raises `UnknownModel`."""
        config = load_config(source) if source is None or isinstance(source, str) else source
        name = source if isinstance(source, str) else str(getattr(config, "_name_or_path", "") or type(config).__name__)
        check_heads(config)
        try:
            model = build_meta_model(config, dtype)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UnknownModel(f"{name}: transformers cannot build a model of this config ({reason:.200})") from error
        return cls(model, name, hosting)

    @cached_property
    def split(self) -> Split:
        """Raises `CannotSplit`."""
        return split(self.model, **self.hosting)

    @cached_property
    def facts(self) -> ModelFacts:
        return ModelFacts.from_model(self.model)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @cached_property
    def weights(self) -> int:
        """All parameters and buffers."""
        return storage_bytes([*self.model.parameters(), *self.model.buffers()])

    @cached_property
    def hosted(self) -> int:
        """What the executor keeps for split tenants: base layers, their biases, norms."""
        return storage_bytes(self._hosted_tensors())

    def _hosted_tensors(self) -> list[Tensor]:
        biases = [layer.bias for layer in self.split.layers if layer.bias is not None]
        modules = [layer.module for layer in self.split.layers if layer.module is not None]
        weights = [weight for layer in self.split.layers for weight in layer.weights.values()]
        return [*weights, *biases, *(parameter for module in modules for parameter in module.parameters())]

    @cached_property
    def client_part(self) -> int:
        """What a split tenant holds of the model."""
        return storage_bytes(self.split.client_tensors.values())

    @cached_property
    def fused(self) -> int:
        """Weights that hosting copies once to make them adjacent (`models.fuse_projections`)."""
        return sum(layer.weight.nbytes for group in fused_groups(self.model) for layer in group)

    @cached_property
    def packed(self) -> int:
        """Packed copies of a CPU engine: every projection, the head included."""
        return storage_bytes(layer.weight for _, layer, _ in plain_linears(self.model))

    def shard(self, shards: int) -> int:
        """Bytes of the largest shard of the base layers."""
        total, seen = 0, set[int]()
        for layer in self.split.layers:
            for weight in layer.weights.values():
                key = weight.untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    dim = _divided_dim(layer.spec.kind, weight)
                    total += weight.nbytes // weight.shape[dim] * -(-weight.shape[dim] // shards)
        whole = [tensor for tensor in self._hosted_tensors() if tensor.untyped_storage()._cdata not in seen]
        return total + storage_bytes(whole)

    def max_shards(self) -> int:
        """Shards beyond this have no part of some layer."""
        return min(
            weight.shape[_divided_dim(layer.spec.kind, weight)]
            for layer in self.split.layers
            for weight in layer.weights.values()
        )

    def kv_cache_token(self) -> int:
        """Bytes of keys and values of one token; 0 if the layers' caches differ."""
        facts = self.facts
        return facts.layers * 2 * facts.kv_heads * facts.head_dim * self.dtype.itemsize

    @property
    def max_length(self) -> int:
        return max_sequence_length(self.model.config.get_text_config())

    @cached_property
    def base_parameters(self) -> int:
        """Parameters that a row is multiplied with in hosted layers; of experts, those of the chosen ones."""
        config = self.model.config.get_text_config()
        total = 0
        for layer in self.split.layers:
            count = sum(weight.numel() for weight in layer.weights.values())
            if layer.spec.kind is LayerKind.EXPERTS:
                chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1
                count = count * min(int(chosen), layer.spec.experts) // layer.spec.experts
            total += 0 if layer.spec.kind is LayerKind.EMBEDDING else count
        return total

    @cached_property
    def head_parameters(self) -> int:
        head = self.model.get_output_embeddings()
        return int(head.weight.numel()) if isinstance(getattr(head, "weight", None), Tensor) else 0


def _divided_dim(kind: LayerKind, weight: Tensor) -> int:
    """As `split.executor.sharding` divides it; where it divides a weight by inputs, the part has about the same size."""
    return 1 if kind is LayerKind.CONV1D and weight.dim() == 2 else 0


def check_heads(config: Any) -> None:
    """Raise `UnknownModel` if the attention heads of a config do not divide."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, heads, kv_heads = (
        getattr(text, name, None) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if not all(isinstance(value, int) and value > 0 for value in (hidden, heads)):
        return
    if not getattr(text, "head_dim", None) and hidden % heads:  # type: ignore[operator]
        raise UnknownModel(f"{heads} attention heads do not divide the model's width of {hidden}: correct config.json")
    if isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:  # type: ignore[operator]
        raise UnknownModel(f"{kv_heads} key-value heads do not divide {heads} attention heads: correct config.json")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
