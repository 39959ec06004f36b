"""A difference as a folder that PEFT and the multi-adapter engine read, and back into the weights of a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import LoraPart, ReplacedPart, TrainableTokensPart
from symbiosis.adapters.reader import read_adapter
from symbiosis.types import LayerKind
from symbiosis.zoo.checkpoint import ADAPTER_TENSORS
from symbiosis.zoo.differences.difference import Difference, EmbeddingForm
from symbiosis.zoo.errors import BadZoo

_PREFIX = "base_model.model."


def write_adapter(difference: Difference, facts: ModelFacts, base: str, folder: Path) -> None:
    """A LoRA adapter of the model `base`, as PEFT's `save_pretrained` writes it. B A has the scale 1."""
    from peft import LoraConfig  # takes seconds

    ranks = {path: right.shape[0] for path, (_, right) in difference.factors.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {path: rank for path, rank in ranks.items() if rank != usual}
    is_tied_low_rank = difference.embedding is EmbeddingForm.LOW_RANK and bool(facts.ties.get(facts.embedding or ""))
    targets = [path for path in ranks if not (is_tied_low_rank and path == facts.head)]
    config = LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=others,
        alpha_pattern=others,
        target_modules=targets,
        bias="lora_only" if difference.biases else "none",
        trainable_token_indices=list(difference.rows) or None,
        ensure_weight_tying=is_tied_low_rank,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(folder)
    safetensors.torch.save_file(_tensors(difference, facts), folder / ADAPTER_TENSORS, {"format": "pt"})


def _tensors(difference: Difference, facts: ModelFacts) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, (left, right) in difference.factors.items():
        of_embedding = facts.modules[path].kind is LayerKind.EMBEDDING
        names = ("lora_embedding_B", "lora_embedding_A") if of_embedding else ("lora_B.weight", "lora_A.weight")
        for name, tensor in zip(names, (left, right), strict=True):
            found[f"{_PREFIX}{path}.{name}"] = tensor.clone(memory_format=torch.contiguous_format)
    found |= {f"{_PREFIX}{path}.base_layer.bias": bias for path, bias in difference.biases.items()}
    if difference.replaced is not None:
        # A whole embedding has the name under which PEFT stores it with `save_embedding_layers`: a tied head follows it.
        name = "token_adapter.trainable_tokens_delta" if difference.rows else "weight"
        found[f"{_PREFIX}{facts.embedding}.{name}"] = difference.replaced.contiguous()
    return found


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Change the weights of a base to those of the fine-tune. Raises `BadAdapter`, or `BadZoo` for what is no difference."""
    facts = ModelFacts.from_model(model)
    merged: set[int] = set()
    for path, parts in read_adapter(folder, facts).parts.items():
        module = model.get_submodule(path)
        weight, bias = module.weight, getattr(module, "bias", None)
        if not isinstance(weight, Tensor):
            raise BadZoo(f"{path} has no weight: expected a difference that `symbiosis zoo add` made")
        is_transposed = facts.modules[path].kind is not LayerKind.LINEAR
        is_first = id(weight) not in merged  # a tied weight is changed once
        merged.add(id(weight))
        for part in parts:
            if isinstance(part, LoraPart) and part.magnitude_O is None and part.bias_O is None:
                delta = part.scale * (part.b_OR.float() @ part.a_RI.float())
                if is_first:
                    weight.copy_(weight.float() + (delta.T if is_transposed else delta))
            elif isinstance(part, TrainableTokensPart):
                weight[list(part.ids)] = part.rows_TD.to(weight.dtype)
            elif isinstance(part, ReplacedPart):
                if part.weight is not None:
                    weight.copy_(part.weight)
                if part.bias is not None and isinstance(bias, Tensor):
                    bias.copy_(part.bias)
            else:
                raise BadZoo(f"{path} has an adapter of another method: expected a difference that `symbiosis zoo add` made")
