"""The modules of a model that an adapter can change, so that reading an adapter needs no model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.types import LayerKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """One module with its own parameters."""

    kind: LayerKind | None
    """LINEAR, CONV1D or EMBEDDING; None for others, such as a norm or stacked experts."""
    in_width: int = 0
    """For an embedding: the vocabulary."""
    out_width: int = 0
    shapes: Mapping[str, tuple[int, ...]]
    """Its own parameters by name, in the model's storage shape."""


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """What identifies a weight that is not here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes

    @classmethod
    def of(cls, weight: Tensor) -> WeightDigest:
        content = weight.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        return cls(tuple(weight.shape), weight.dtype, hashlib.blake2b(content.data, digest_size=32).digest())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts that adapters are checked against."""

    name: str
    modules: Mapping[str, ModuleFacts]
    """By path, in model order; a module with several paths is listed under the first."""
    layers: int
    kv_heads: int
    """0 where the layers' KV caches differ, or hold other data than keys and values by head."""
    head_dim: int
    hidden: int
    vocab: int
    embedding: str | None = None
    """Path of the input embedding."""
    head: str | None = None
    """Path of the output embedding."""
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The other modules that use the same weight."""
    decoder_only: bool = True
    weights: Mapping[str, Tensor | WeightDigest] = field(default_factory=dict, repr=False, compare=False)
    """The embedding's and the head's weights, not copied. PEFT stores them again with an adapter of theirs, and a copy that
    equals the model's weight is not stored twice."""

    def is_own_weight(self, path: str, weight: Tensor) -> bool:
        """Whether a tensor on the CPU equals the embedding's or the head's weight."""
        own = self.weights.get(path)
        if own is None or isinstance(own, WeightDigest):
            return own is not None and own == WeightDigest.of(weight.to(own.dtype))
        return torch.equal(own.to("cpu"), weight.to(own.dtype))

    def without_weights(self) -> ModelFacts:
        """The same without a reference to the model's memory."""
        digests = {path: w if isinstance(w, WeightDigest) else WeightDigest.of(w) for path, w in self.weights.items()}
        return replace(self, weights=digests)

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ModelFacts:
        """The facts of a plain transformers model, which must have no adapters."""
        modules = {path: _module_facts(module) for path, module in model.named_modules() if path and _shapes(module)}
        users: dict[int, list[str]] = {}
        paths: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            paths[module] = path
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):
                users.setdefault(id(weight), []).append(path)
        ties = {path: tuple(o for o in group if o != path) for group in users.values() for path in group if len(group) > 1}
        config = model.config.get_text_config()
        kv_heads, head_dim = _kv_cache_shape(config)
        embedding, head = _embedding(model, "get_input_embeddings"), _embedding(model, "get_output_embeddings")
        ends = {paths[module]: module.weight for module in (embedding, head) if module is not None}
        return cls(
            name=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
            modules=modules,
            layers=int(getattr(config, "num_hidden_layers", 0) or 0),
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=int(getattr(config, "hidden_size", 0) or 0),
            vocab=int(getattr(config, "vocab_size", 0) or 0),
            embedding=None if embedding is None else paths[embedding],
            head=None if head is None else paths[head],
            ties=ties,
            decoder_only=not getattr(config, "is_encoder_decoder", False) and head is not None,
            weights={path: weight.detach() for path, weight in ends.items()},
        )


def _embedding(model: PreTrainedModel, getter: str) -> Any:
    module = getattr(model, getter)()
    return module if isinstance(getattr(module, "weight", None), Tensor) else None


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}


def _module_facts(module: nn.Module) -> ModuleFacts:
    shapes = _shapes(module)
    if isinstance(module, nn.Linear):
        return ModuleFacts(kind=LayerKind.LINEAR, in_width=module.in_features, out_width=module.out_features, shapes=shapes)
    if isinstance(module, Conv1D):
        return ModuleFacts(kind=LayerKind.CONV1D, in_width=module.nx, out_width=module.nf, shapes=shapes)
    if isinstance(module, nn.Embedding):
        return ModuleFacts(
            kind=LayerKind.EMBEDDING, in_width=module.num_embeddings, out_width=module.embedding_dim, shapes=shapes
        )
    return ModuleFacts(kind=None, shapes=shapes)


_ATTENTIONS = {"full_attention", "sliding_attention"}


def _kv_cache_shape(config: Any) -> tuple[int, int]:
    """Key/value heads and head width of every layer's KV cache; zeros where the layers differ."""
    heads = getattr(config, "num_attention_heads", 0) or 0
    latent, shared = getattr(config, "kv_lora_rank", None), getattr(config, "num_kv_shared_layers", None)
    differ = config.to_dict().get("per_layer_config")  # the attribute is a view that always exists
    if not heads or latent or shared or differ or not set(getattr(config, "layer_types", None) or ()) <= _ATTENTIONS:
        return 0, 0
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    return int(kv_heads), int(getattr(config, "head_dim", None) or config.hidden_size // heads)
