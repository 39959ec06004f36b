"""Reading an adapter that PEFT saved, checked against the model that will serve it.

Every setting is served, known to be harmless, or refused. Every tensor in the file is used, and every tensor that the config
implies is present. So the engine serves exactly what PEFT computes, or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis.adapters.config import Ia3Settings, LoraSettings, PeftMethod, PromptSettings, parse_config
from symbiosis.adapters.files import (
    CONFIG,
    TENSORS,
    FileLimits,
    InMemoryTensors,
    TensorFile,
    join_names,
    open_adapter_folder,
    parse_strict_json,
    quote,
)
from symbiosis.adapters.model_facts import ModelFacts, ModuleFacts
from symbiosis.adapters.parts import (
    Adapter,
    Ia3Part,
    LoraPart,
    Part,
    PrefixPart,
    PromptPart,
    ReplacedPart,
    TrainableTokensPart,
    build_adapter,
)
from symbiosis.adapters.targets import Targets, saved_paths
from symbiosis.adapters.tensor_names import AdapterTensors, Role, describe_module
from symbiosis.errors import BadAdapter, UnsupportedAdapter
from symbiosis.types import LayerKind

_REASONS_LEFT = {
    Role.MAGNITUDE: "use_dora is not set",
    Role.B_BIAS: "lora_bias is not set",
    Role.TOKENS: "trainable_token_indices does not name the module",
    Role.A: "target_modules does not name the module",
    Role.B: "target_modules does not name the module",
    Role.EMBEDDING_A: "target_modules does not name the module",
    Role.EMBEDDING_B: "target_modules does not name the module",
    Role.SCALING: "target_modules does not name the module",
    Role.WEIGHT: "modules_to_save does not name the module",
    Role.BIAS: "neither modules_to_save nor bias names it",
    Role.BASE_BIAS: "bias is 'none'",
}

Parts = defaultdict[str, list[Part]]


def read_adapter(folder: Path, model: ModelFacts, limits: FileLimits = FileLimits()) -> Adapter:  # noqa: B008 - frozen
    """The adapter in a folder.

    Reads only `adapter_config.json` and `adapter_model.safetensors`; imports, downloads and follows nothing. Raises
    `BadAdapter` if the adapter is malformed or inconsistent, `UnsupportedAdapter` if it cannot be served on this model; the
    message names the file and the field or tensor. The server chooses the folder's path, which must never contain a name
    from a tenant.
    """
    with open_adapter_folder(folder, limits) as (raw, file):
        return _read(raw, file, model, limits)


def read_adapter_from_memory(
    config: str,
    tensors: Mapping[str, Tensor],
    model: ModelFacts,
    limits: FileLimits = FileLimits(),  # noqa: B008 - frozen
) -> Adapter:
    """The adapter, hash included, that `read_adapter` returns for a folder with this content. The tensors are not copied."""
    return _read(parse_strict_json(config.encode(), CONFIG), InMemoryTensors(tensors), model, limits)


def _read(raw: dict[str, Any], file: TensorFile | InMemoryTensors, model: ModelFacts, limits: FileLimits) -> Adapter:
    settings = parse_config(raw, limits)
    warnings = _base_model_warnings(settings.base_model, model)
    if isinstance(settings, PromptSettings):
        return _read_prompt(settings, AdapterTensors(file, settings.method, model), model, warnings)
    if isinstance(settings, Ia3Settings):
        return _read_ia3(settings, AdapterTensors(file, PeftMethod.IA3, model), model, warnings)
    return _read_lora(settings, AdapterTensors(file, PeftMethod.LORA, model), model, warnings)


def _base_model_warnings(base_model: str | None, model: ModelFacts) -> list[str]:
    if base_model and base_model.rstrip("/").rpartition("/")[2].lower() != model.name.rstrip("/").rpartition("/")[2].lower():
        return [f"it was made for {quote(base_model)} and is served on {quote(model.name)}; every tensor fits"]
    return []


def _read_lora(settings: LoraSettings, stored: AdapterTensors, model: ModelFacts, warnings: list[str]) -> Adapter:
    parts: Parts = defaultdict(list)
    targets = _adapted_paths(settings.targets, model)
    _take_saved(settings.targets.saved, stored, model, parts, warnings, tied=settings.tied)
    _take_base_weights(stored, model, parts, warnings)
    _take_biases(settings, targets, stored, model, parts)
    if settings.tied:  # a tied head is stored although target_modules does not name it
        stored_too = stored.paths(Role.A, Role.EMBEDDING_A)
        targets += [path for path in stored_too if path not in targets and set(model.ties.get(path, ())) & set(targets)]
    for path in targets:
        parts[path].append(_take_lora(path, model.modules[path], settings, stored))
    _take_tokens(settings, stored, model, parts)
    stored.finish(_REASONS_LEFT)
    return build_adapter("dora" if settings.dora else "lora", _freeze(parts), warnings=tuple(warnings))


def _adapted_paths(targets: Targets, model: ModelFacts) -> list[str]:
    paths = list(targets.paths(model))
    for path in paths:
        if model.modules[path].kind is None:
            raise UnsupportedAdapter(
                f"{CONFIG}: target_modules names {path}, a {describe_module(model.modules[path])}; served are adapters of "
                "linear layers, Conv1D and embeddings"
            )
    return paths


def _take_lora(path: str, module: ModuleFacts, settings: LoraSettings, stored: AdapterTensors) -> LoraPart:
    rank, into, out = settings.rank_of(path), module.in_width, module.out_width
    embedding = module.kind is LayerKind.EMBEDDING
    role_a, role_b = (Role.EMBEDDING_A, Role.EMBEDDING_B) if embedding else (Role.A, Role.B)
    if not stored.has(path, role_a):
        raise BadAdapter(f"{TENSORS} lacks {role_a} of {path}, which target_modules names")
    fit = f"{path} is a {describe_module(module)} of {into} to {out}"
    bias = settings.lora_bias and not embedding
    return LoraPart(
        a_RI=stored.take(path, role_a, (rank, into), fit=fit, own=0),
        b_OR=stored.take(path, role_b, (out, rank), fit=fit, own=1),
        scale=settings.scale_of(path),
        magnitude_O=stored.take(path, Role.MAGNITUDE, (out,), fit=fit) if settings.dora else None,
        bias_O=stored.take(path, Role.B_BIAS, (out,), fit=fit) if bias else None,
    )


def _take_saved(
    names: tuple[str, ...], stored: AdapterTensors, model: ModelFacts, parts: Parts, warnings: list[str], *, tied: bool = False
) -> None:
    """modules_to_save: a module's own parameters, all of them."""
    covered = saved_paths(names, model)
    unused = [quote(name) for name, paths in covered.items() if not paths]
    if unused:  # PEFT lists both common names of a classifier, and the model has one of them
        warnings.append(f"modules_to_save names {join_names(unused)}, which neither the model nor the file has")
    paths = list(dict.fromkeys(path for group in covered.values() for path in group))
    if tied:
        stored_too = stored.paths(Role.WEIGHT)
        paths += [path for path in stored_too if path not in paths and set(model.ties.get(path, ())) & set(paths)]
    for path in paths:
        shapes = model.modules[path].shapes
        if not set(shapes) <= {"weight", "bias"}:
            raise UnsupportedAdapter(
                f"{CONFIG}: modules_to_save names {path}, a {describe_module(model.modules[path])}; served are modules of "
                "a weight and a bias"
            )
        fit = f"the model's {path} has it"
        parts[path].append(
            ReplacedPart(
                weight=stored.take(path, Role.WEIGHT, shapes["weight"], fit=fit) if "weight" in shapes else None,
                bias=stored.take(path, Role.BIAS, shapes["bias"], fit=fit) if "bias" in shapes else None,
            )
        )


def _take_base_weights(stored: AdapterTensors, model: ModelFacts, parts: Parts, warnings: list[str]) -> None:
    """PEFT stores the whole embedding with an adapter of it, and when the vocabulary was resized."""
    embeddings = {path for path in (model.embedding, model.head) if path is not None}
    roles = (Role.BASE_WEIGHT, Role.TOKENS_BASE_WEIGHT, Role.WEIGHT)
    own_weights = {*parts, *stored.paths(*roles)}
    for path in sorted(embeddings.intersection(stored.paths(*roles))):
        shape = model.modules[path].shapes["weight"]
        for role in roles:
            if not stored.has(path, role):
                continue
            found = stored.shape(path, role)
            if len(found) == 2 and found[1] == shape[1] and found[0] != shape[0]:
                raise UnsupportedAdapter(
                    f"{TENSORS}: {path} has {found[0]} rows, the model's has {shape[0]}; adapters that "
                    "resize the vocabulary are not served"
                )
            weight = stored.take(path, role, shape, fit=f"the model's {path} has it")
            base = model.weights.get(path)
            if base is not None and torch.equal(base.to("cpu"), weight.to(base.dtype)):
                warnings.append(f"the {role} of {path} equals the model's own and is not stored again")
                continue
            # A tied weight is one tensor: PEFT changes it for all its users, except those with their own.
            for user in (path, *(user for user in model.ties.get(path, ()) if user not in own_weights)):
                parts[user].append(ReplacedPart(weight=weight, bias=None))


def _take_biases(settings: LoraSettings, targets: list[str], stored: AdapterTensors, model: ModelFacts, parts: Parts) -> None:
    """bias='all' or 'lora_only': trained biases of base layers."""
    if settings.bias == "none":
        return
    adapted = set(targets)
    for path, module in model.modules.items():
        if "bias" not in module.shapes or (settings.bias == "lora_only" and path not in adapted):
            continue
        if any(isinstance(part, ReplacedPart) and part.bias is not None for part in parts.get(path, ())):
            continue
        role = Role.BASE_BIAS if path in adapted else Role.BIAS
        if not stored.has(path, role):
            raise BadAdapter(f"{TENSORS} lacks the bias of {path}, which was trained by bias={settings.bias!r} of {CONFIG}")
        bias = stored.take(path, role, module.shapes["bias"], fit=f"the model's {path} has it")
        parts[path].append(ReplacedPart(weight=None, bias=bias))


def _take_tokens(settings: LoraSettings, stored: AdapterTensors, model: ModelFacts, parts: Parts) -> None:
    """trainable_token_indices: rows of an embedding, and of the head that is tied to it."""
    if settings.tokens is None:
        return
    if isinstance(settings.tokens, tuple):
        if model.embedding is None:
            raise UnsupportedAdapter(f"{CONFIG} sets trainable_token_indices, and the model has no input embedding")
        token_ids = {model.embedding: settings.tokens}
    else:
        token_ids = {path: ids for name, ids in settings.tokens.items() for path in model.modules if path.endswith(name)}
        unknown = [quote(name) for name in settings.tokens if not any(path.endswith(name) for path in model.modules)]
        if unknown:
            raise UnsupportedAdapter(
                f"{CONFIG}: trainable_token_indices names {join_names(unknown)}, which the model does not have"
            )
    taken: dict[str, TrainableTokensPart] = {}
    for path, ids in token_ids.items():
        shape = model.modules[path].shapes.get("weight", ())
        if len(shape) != 2 or model.modules[path].kind not in (LayerKind.EMBEDDING, LayerKind.LINEAR):
            raise UnsupportedAdapter(f"{CONFIG}: trainable_token_indices names {path}, which is not an embedding")
        if max(ids) >= shape[0]:
            raise UnsupportedAdapter(
                f"{CONFIG}: trainable_token_indices has the token {max(ids)}, and {path} of the model has {shape[0]}"
            )
        if not stored.has(path, Role.TOKENS) and any(token_ids.get(other) == ids for other in model.ties.get(path, ())):
            continue  # stored once for all tied modules
        rows = stored.take(path, Role.TOKENS, (len(ids), shape[1]), fit=f"{path} has rows of {shape[1]}", own=0)
        taken[path] = TrainableTokensPart(ids=ids, rows_TD=rows)
    for other in model.ties.get(model.embedding or "", ()):
        if model.embedding in taken and other not in taken:
            taken[other] = taken[model.embedding]
    for path, tokens in taken.items():
        if any(isinstance(part, LoraPart) for part in parts.get(path, ())):
            raise BadAdapter(f"{CONFIG}: trainable_token_indices names {path}, which target_modules names as well")
        parts[path].append(tokens)


def _read_ia3(settings: Ia3Settings, stored: AdapterTensors, model: ModelFacts, warnings: list[str]) -> Adapter:
    parts: Parts = defaultdict(list)
    _take_saved(settings.targets.saved, stored, model, parts, warnings)
    for path in _adapted_paths(settings.targets, model):
        module = model.modules[path]
        if module.kind is LayerKind.EMBEDDING:
            raise UnsupportedAdapter(f"{CONFIG}: target_modules names {path}, an embedding, which IA3 does not adapt")
        of_input = settings.feedforward.selects_ending(path)
        width = module.in_width if of_input else module.out_width
        shape = (1, width) if of_input else (width, 1)
        found = stored.shape(path, Role.SCALING) if stored.has(path, Role.SCALING) else shape
        if len(found) == 2 and max(found) > 1 and (found[0] == 1) != of_input:
            raise BadAdapter(
                f"{TENSORS}: ia3_l of {path} scales the {'output' if of_input else 'input'}, "
                f"feedforward_modules of {CONFIG} says the {'input' if of_input else 'output'}"
            )
        vector = stored.take(
            path, Role.SCALING, shape, fit=f"{path} is a {describe_module(module)} of {module.in_width} to {module.out_width}"
        )
        parts[path].append(Ia3Part(vector=vector.view(-1), of_input=of_input))
    stored.finish(_REASONS_LEFT)
    return build_adapter("ia3", _freeze(parts), warnings=tuple(warnings))


def _read_prompt(settings: PromptSettings, stored: AdapterTensors, model: ModelFacts, warnings: list[str]) -> Adapter:
    if not model.decoder_only:
        raise UnsupportedAdapter(
            f"{CONFIG}: peft_type {settings.method} is served on decoder-only models that generate, not on {model.name}"
        )
    parts: Parts = defaultdict(list)
    _take_saved(settings.saved, stored, model, parts, warnings)
    prefix = prompt = None
    if settings.method is PeftMethod.PREFIX_TUNING:
        prefix = _take_prefix(settings, stored, model)
    else:
        width = model.modules[model.embedding].out_width if model.embedding else model.hidden
        if (settings.width or width) != width:
            raise UnsupportedAdapter(f"{CONFIG}: token_dim is {settings.width}, and {model.name} has embeddings of {width}")
        prompt = PromptPart(stored.take_prompt((settings.tokens, width)))
    stored.finish(_REASONS_LEFT)
    return build_adapter(settings.method.value.lower(), _freeze(parts), prefix=prefix, prompt=prompt, warnings=tuple(warnings))


def _take_prefix(settings: PromptSettings, stored: AdapterTensors, model: ModelFacts) -> PrefixPart:
    # T x 2L rows of a key or a value; PEFT applies a trained projection on saving.
    tokens, layers, heads, width = settings.tokens, model.layers, model.kv_heads, model.head_dim
    if not heads:
        raise UnsupportedAdapter(
            f"{CONFIG}: peft_type PREFIX_TUNING needs layers with equal KV caches, which {model.name} does not have"
        )
    declared = (settings.width or heads * width, settings.heads or heads, settings.layers or layers)
    if declared != (heads * width, heads, layers):
        raise UnsupportedAdapter(
            f"{CONFIG}: token_dim {settings.width}, num_attention_heads {settings.heads} and num_layers {settings.layers}; "
            f"{model.name} has {layers} layers of {heads} key/value heads of {width}: expected token_dim {heads * width}"
        )
    flat = stored.take_prompt((tokens, 2 * layers * heads * width))
    both = flat.view(tokens, layers, 2, heads, width).permute(2, 1, 3, 0, 4)
    return PrefixPart(keys_LHTD=both[0].contiguous(), values_LHTD=both[1].contiguous())


def _freeze(parts: Parts) -> dict[str, tuple[Part, ...]]:
    return {path: tuple(found) for path, found in parts.items()}
