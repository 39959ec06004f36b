"""Read an adapter as PEFT saves it, checked against the model it is to serve.

Every setting is served, known to be harmless, or refused; every tensor in the file is used and every tensor the
config speaks of is there. So what is served is what PEFT would compute, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis.adapters.config import Ia3Settings, LoraSettings, PeftMethod, PromptSettings, parse
from symbiosis.adapters.files import (
    CONFIG,
    TENSORS,
    FileLimits,
    HeldTensors,
    TensorFile,
    listed,
    opened,
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
    assemble,
)
from symbiosis.adapters.targets import Targets, saved_paths
from symbiosis.adapters.tensor_names import AdapterTensors, Role, described
from symbiosis.errors import BadAdapter, UnsupportedAdapter
from symbiosis.types import LayerKind

_LEFT_OVER = {
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

Parts = dict[str, list[Part]]


def read_adapter(folder: Path, model: ModelFacts, limits: FileLimits = FileLimits()) -> Adapter:  # noqa: B008 - frozen
    """The adapter in a folder.

    Reads `adapter_config.json` and `adapter_model.safetensors` and nothing else; imports, downloads and follows nothing.
    Raises `BadAdapter` if it is malformed or disagrees with itself, `UnsupportedAdapter` if it cannot be served on
    this model; the message names the file and the field or tensor. The folder's path is the server's own: a name from
    a tenant must never become one.
    """
    with opened(folder, limits) as (raw, file):
        return _read(raw, file, model, limits)


def read_adapter_from_memory(
    config: str,
    tensors: Mapping[str, Tensor],
    model: ModelFacts,
    limits: FileLimits = FileLimits(),  # noqa: B008 - frozen
) -> Adapter:
    """The adapter that `read` would give, hash and all, if this lay in a folder's two files. The tensors are not copied."""
    return _read(parse_strict_json(config.encode(), CONFIG), HeldTensors(tensors), model, limits)


def _read(raw: dict[str, Any], file: TensorFile | HeldTensors, model: ModelFacts, limits: FileLimits) -> Adapter:
    settings = parse(raw, limits)
    notes = _base_notes(settings.base_model, model)
    if isinstance(settings, PromptSettings):
        return _read_prompt(settings, AdapterTensors(file, settings.method, model), model, notes)
    if isinstance(settings, Ia3Settings):
        return _read_ia3(settings, AdapterTensors(file, PeftMethod.IA3, model), model, notes)
    return _read_lora(settings, AdapterTensors(file, PeftMethod.LORA, model), model, notes)


def _base_notes(said: str | None, model: ModelFacts) -> list[str]:
    if said and said.rstrip("/").rpartition("/")[2].lower() != model.name.rstrip("/").rpartition("/")[2].lower():
        return [f"it was made for {quote(said)} and is served on {quote(model.name)}; every tensor fits"]
    return []


def _read_lora(settings: LoraSettings, stored: AdapterTensors, model: ModelFacts, notes: list[str]) -> Adapter:
    parts: Parts = {}
    targets = _adapted(settings.targets, model)
    _take_saved(settings.targets.saved, stored, model, parts, notes, tied=settings.tied)
    _take_base_weights(stored, model, parts, notes)
    _take_biases(settings, targets, stored, model, parts)
    if settings.tied:  # the head of a tied embedding is stored although target_modules does not name it
        stored_too = stored.paths(Role.A, Role.EMBEDDING_A)
        targets += [path for path in stored_too if path not in targets and set(model.ties.get(path, ())) & set(targets)]
    for path in targets:
        parts.setdefault(path, []).append(_low_rank(path, model.modules[path], settings, stored))
    _take_tokens(settings, stored, model, parts)
    stored.finish(_LEFT_OVER)
    return assemble("dora" if settings.dora else "lora", _frozen(parts), notes=tuple(notes))


def _adapted(targets: Targets, model: ModelFacts) -> list[str]:
    paths = list(targets.paths(model))
    for path in paths:
        if model.modules[path].kind is None:
            raise UnsupportedAdapter(
                f"{CONFIG}: target_modules names {path}, a {described(model.modules[path])}; served are adapters of linear "
                "layers, Conv1D and embeddings"
            )
    return paths


def _low_rank(path: str, module: ModuleFacts, settings: LoraSettings, stored: AdapterTensors) -> LoraPart:
    rank, into, out = settings.rank_of(path), module.in_width, module.out_width
    embedding = module.kind is LayerKind.EMBEDDING
    role_a, role_b = (Role.EMBEDDING_A, Role.EMBEDDING_B) if embedding else (Role.A, Role.B)
    if not stored.has(path, role_a):
        raise BadAdapter(f"{TENSORS} lacks {role_a} of {path}, which target_modules names")
    fit = f"{path} is a {described(module)} of {into} to {out}"
    bias = settings.lora_bias and not embedding
    return LoraPart(
        a_RI=stored.take(path, role_a, (rank, into), fit=fit, own=0),
        b_OR=stored.take(path, role_b, (out, rank), fit=fit, own=1),
        scale=settings.scale_of(path),
        magnitude_O=stored.take(path, Role.MAGNITUDE, (out,), fit=fit) if settings.dora else None,
        bias_O=stored.take(path, Role.B_BIAS, (out,), fit=fit) if bias else None,
    )


def _take_saved(
    names: tuple[str, ...], stored: AdapterTensors, model: ModelFacts, parts: Parts, notes: list[str], *, tied: bool = False
) -> None:
    """modules_to_save: a module's own parameters, all of them."""
    covered = saved_paths(names, model)
    idle = [quote(name) for name, paths in covered.items() if not paths]
    if idle:  # PEFT lists both usual names of a classifier, whichever the model has
        notes.append(f"modules_to_save names {listed(idle)}, which the model does not have and the file has no tensors of")
    paths = list(dict.fromkeys(path for group in covered.values() for path in group))
    if tied:
        stored_too = stored.paths(Role.WEIGHT)
        paths += [path for path in stored_too if path not in paths and set(model.ties.get(path, ())) & set(paths)]
    for path in paths:
        shapes = model.modules[path].shapes
        if not set(shapes) <= {"weight", "bias"}:
            raise UnsupportedAdapter(
                f"{CONFIG}: modules_to_save names {path}, a {described(model.modules[path])}; served are modules of a weight "
                "and a bias"
            )
        fit = f"the model's {path} has it"
        parts.setdefault(path, []).append(
            ReplacedPart(
                weight=stored.take(path, Role.WEIGHT, shapes["weight"], fit=fit) if "weight" in shapes else None,
                bias=stored.take(path, Role.BIAS, shapes["bias"], fit=fit) if "bias" in shapes else None,
            )
        )


def _take_base_weights(stored: AdapterTensors, model: ModelFacts, parts: Parts, notes: list[str]) -> None:
    """PEFT stores the whole embedding beside an adapter of it, and when the vocabulary was resized."""
    ends = {path for path in (model.embedding, model.head) if path is not None}
    roles = (Role.BASE_WEIGHT, Role.TOKENS_BASE_WEIGHT, Role.WEIGHT)
    settled = {*parts, *stored.paths(*roles)}
    for path in sorted(ends.intersection(stored.paths(*roles))):
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
                notes.append(f"the {role} of {path} is the model's own and was not kept again")
                continue
            # A tied weight is one tensor: PEFT writes to it for all that use it, unless they have one of their own.
            for user in (path, *(user for user in model.ties.get(path, ()) if user not in settled)):
                parts.setdefault(user, []).append(ReplacedPart(weight=weight, bias=None))


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
            raise BadAdapter(f"{TENSORS} lacks the bias of {path}, which bias={settings.bias!r} of {CONFIG} says was trained")
        bias = stored.take(path, role, module.shapes["bias"], fit=f"the model's {path} has it")
        parts.setdefault(path, []).append(ReplacedPart(weight=None, bias=bias))


def _take_tokens(settings: LoraSettings, stored: AdapterTensors, model: ModelFacts, parts: Parts) -> None:
    """trainable_token_indices: rows of an embedding, and of the head that is tied to it."""
    if settings.tokens is None:
        return
    if isinstance(settings.tokens, tuple):
        if model.embedding is None:
            raise UnsupportedAdapter(f"{CONFIG} sets trainable_token_indices, and the model has no input embedding")
        wanted = {model.embedding: settings.tokens}
    else:
        wanted = {path: ids for name, ids in settings.tokens.items() for path in model.modules if path.endswith(name)}
        lost = [quote(name) for name in settings.tokens if not any(path.endswith(name) for path in model.modules)]
        if lost:
            raise UnsupportedAdapter(f"{CONFIG}: trainable_token_indices names {listed(lost)}, which the model does not have")
    made: dict[str, TrainableTokensPart] = {}
    for path, ids in wanted.items():
        shape = model.modules[path].shapes.get("weight", ())
        if len(shape) != 2 or model.modules[path].kind not in (LayerKind.EMBEDDING, LayerKind.LINEAR):
            raise UnsupportedAdapter(f"{CONFIG}: trainable_token_indices names {path}, which is not an embedding")
        if max(ids) >= shape[0]:
            raise UnsupportedAdapter(
                f"{CONFIG}: trainable_token_indices has the token {max(ids)}, and {path} of the model has {shape[0]}"
            )
        if not stored.has(path, Role.TOKENS) and any(wanted.get(other) == ids for other in model.ties.get(path, ())):
            continue  # stored once for all that are tied
        rows = stored.take(path, Role.TOKENS, (len(ids), shape[1]), fit=f"{path} has rows of {shape[1]}", own=0)
        made[path] = TrainableTokensPart(ids=ids, rows_TD=rows)
    for other in model.ties.get(model.embedding or "", ()):
        if model.embedding in made and other not in made:
            made[other] = made[model.embedding]
    for path, tokens in made.items():
        if any(isinstance(part, LoraPart) for part in parts.get(path, ())):
            raise BadAdapter(f"{CONFIG}: trainable_token_indices names {path}, which target_modules names as well")
        parts.setdefault(path, []).append(tokens)


def _read_ia3(settings: Ia3Settings, stored: AdapterTensors, model: ModelFacts, notes: list[str]) -> Adapter:
    parts: Parts = {}
    _take_saved(settings.targets.saved, stored, model, parts, notes)
    for path in _adapted(settings.targets, model):
        module = model.modules[path]
        if module.kind is LayerKind.EMBEDDING:
            raise UnsupportedAdapter(f"{CONFIG}: target_modules names {path}, an embedding, which IA3 does not adapt")
        of_input = settings.feedforward.ends(path)
        width = module.in_width if of_input else module.out_width
        shape = (1, width) if of_input else (width, 1)
        found = stored.shape(path, Role.SCALING) if stored.has(path, Role.SCALING) else shape
        if len(found) == 2 and max(found) > 1 and (found[0] == 1) != of_input:
            raise BadAdapter(
                f"{TENSORS}: ia3_l of {path} scales the {'output' if of_input else 'input'}, "
                f"feedforward_modules of {CONFIG} says the {'input' if of_input else 'output'}"
            )
        vector = stored.take(
            path, Role.SCALING, shape, fit=f"{path} is a {described(module)} of {module.in_width} to {module.out_width}"
        )
        parts.setdefault(path, []).append(Ia3Part(vector=vector.view(-1), of_input=of_input))
    stored.finish(_LEFT_OVER)
    return assemble("ia3", _frozen(parts), notes=tuple(notes))


def _read_prompt(settings: PromptSettings, stored: AdapterTensors, model: ModelFacts, notes: list[str]) -> Adapter:
    if not model.decoder_only:
        raise UnsupportedAdapter(
            f"{CONFIG}: peft_type {settings.method} is served on decoder-only models that generate, not on {model.name}"
        )
    parts: Parts = {}
    _take_saved(settings.saved, stored, model, parts, notes)
    prefix = prompt = None
    if settings.method is PeftMethod.PREFIX_TUNING:
        prefix = _prefix(settings, stored, model)
    else:
        width = model.modules[model.embedding].out_width if model.embedding else model.hidden
        if (settings.width or width) != width:
            raise UnsupportedAdapter(f"{CONFIG}: token_dim is {settings.width}, and {model.name} has embeddings of {width}")
        prompt = PromptPart(stored.take_prompt((settings.tokens, width)))
    stored.finish(_LEFT_OVER)
    return assemble(settings.method.value.lower(), _frozen(parts), prefix=prefix, prompt=prompt, notes=tuple(notes))


def _prefix(settings: PromptSettings, stored: AdapterTensors, model: ModelFacts) -> PrefixPart:
    # T x 2L rows of a key or a value each; a trained projection was applied when it was saved
    tokens, layers, heads, width = settings.tokens, model.layers, model.kv_heads, model.head_dim
    if not heads:
        raise UnsupportedAdapter(
            f"{CONFIG}: peft_type PREFIX_TUNING needs layers whose caches are alike, which {model.name} does not have"
        )
    said = (settings.width or heads * width, settings.heads or heads, settings.layers or layers)
    if said != (heads * width, heads, layers):
        raise UnsupportedAdapter(
            f"{CONFIG}: token_dim {settings.width}, num_attention_heads {settings.heads} and num_layers {settings.layers}; "
            f"{model.name} has {layers} layers of {heads} key/value heads of {width}: expected token_dim {heads * width}"
        )
    flat = stored.take_prompt((tokens, 2 * layers * heads * width))
    both = flat.view(tokens, layers, 2, heads, width).permute(2, 1, 3, 0, 4)
    return PrefixPart(keys_LHTD=both[0].contiguous(), values_LHTD=both[1].contiguous())


def _frozen(parts: Parts) -> dict[str, tuple[Part, ...]]:
    return {path: tuple(found) for path, found in parts.items()}
