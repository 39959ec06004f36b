"""The definition of an adapter's parts, in plain torch on a plain model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from symbiosis.adapters.parts import Adapter, Ia3Part, LoraPart, Part, ReplacedPart, TrainableTokensPart


@torch.no_grad()
def apply(adapter: Adapter, model: PreTrainedModel) -> PreTrainedModel:
    """The model with the adapter's parts merged into its weights, and hooks for IA3."""
    for path, parts in adapter.parts.items():
        for part in parts:
            _apply(part, model.get_submodule(path))
    return model


def _apply(part: Part, module: nn.Module) -> None:
    if isinstance(part, ReplacedPart):
        if part.weight is not None:
            module.weight = nn.Parameter(part.weight.to(module.weight.dtype))
        if part.bias is not None:
            module.bias = nn.Parameter(part.bias.to(module.bias.dtype))
    elif isinstance(part, TrainableTokensPart):
        weight = module.weight.clone()
        weight[list(part.ids)] = part.rows_TD.to(weight.dtype)
        module.weight = nn.Parameter(weight)
    elif isinstance(part, Ia3Part) and part.of_input:
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * part.vector, *inputs[1:]))
    elif isinstance(part, Ia3Part):
        module.register_forward_hook(lambda _, __, output: output * part.vector)
    else:
        _apply_lora(part, module)


def _apply_lora(part: LoraPart, module: nn.Module) -> None:
    transposed = not isinstance(module, nn.Linear)  # Conv1D and embeddings store [in, out]
    weight_OI = module.weight.T if transposed else module.weight
    sum_OI = weight_OI + part.scale * part.b_OR.to(weight_OI.dtype) @ part.a_RI.to(weight_OI.dtype)
    if part.magnitude_O is not None:
        sum_OI = sum_OI * (part.magnitude_O / sum_OI.norm(dim=1))[:, None]
    module.weight = nn.Parameter((sum_OI.T if transposed else sum_OI).contiguous())
    if part.bias_O is not None:
        bias = part.scale * part.bias_O.to(weight_OI.dtype)
        module.bias = nn.Parameter(bias if module.bias is None else module.bias + bias)


@torch.no_grad()
def logits(adapter: Adapter, model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The logits of the adapted model, without those of virtual tokens."""
    model = apply(adapter, model)
    ids = batch["input_ids"]
    rows = ids.shape[0]
    if adapter.prefix is not None:
        cache = DynamicCache(config=model.config)
        pairs = zip(adapter.prefix.keys_LHTD, adapter.prefix.values_LHTD, strict=True)
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys.to(model.dtype).expand(rows, -1, -1, -1), values.to(model.dtype).expand(rows, -1, -1, -1), layer)
        return model(input_ids=ids, past_key_values=cache).logits
    if adapter.prompt is not None:
        prompt = adapter.prompt.embeddings_TD.to(model.dtype)
        embeds = torch.cat([prompt.expand(rows, -1, -1), model.get_input_embeddings()(ids)], dim=1)
        return model(inputs_embeds=embeds).logits[:, len(prompt) :]
    return model(**batch).logits
