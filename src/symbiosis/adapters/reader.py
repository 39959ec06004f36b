"""Reading an adapter that PEFT saved, checked against the model that will serve it.

Every setting is served, known to be harmless, or refused. Every tensor in the file is used, and every tensor that the config
implies is present. So the engine serves exactly what PEFT computes, or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from symbiosis.adapters.config import Ia3Settings, LoraSettings, PeftMethod, PromptSettings, parse_config
from symbiosis.adapters.files import CONFIG, TENSORS, FileLimits, join_names, parse_strict_json, quote
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
from symbiosis.adapters.tensor_file import InMemoryTensors, TensorFile, open_adapter_folder
from symbiosis.adapters.tensor_names import AdapterTensors, Role, describe_module
from symbiosis.errors import BadAdapter, UnsupportedAdapter
from symbiosis.types import LayerKind

_NOT_TARGETED = "target_modules does not name the module"
_REASONS_LEFT = {
    Role.MAGNITUDE: "use_dora is not set",
    Role.B_BIAS: "lora_bias is not set",
    Role.TOKENS: "trainable_token_indices does not name the module",
    **dict.fromkeys((Role.A, Role.B, Role.EMBEDDING_A, Role.EMBEDDING_B, Role.SCALING), _NOT_TARGETED),
    Role.WEIGHT: "modules_to_save does not name the module",
    Role.BIAS: "neither modules_to_save nor bias names it",
    Role.BASE_BIAS: "bias is 'none'",
}


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
    if isinstance(settings, PromptSettings):
        return _AdapterBuilder(AdapterTensors(file, settings.method, model), model, settings.base_model).build_prompt(settings)
    if isinstance(settings, Ia3Settings):
        return _AdapterBuilder(AdapterTensors(file, PeftMethod.IA3, model), model, settings.base_model).build_ia3(settings)
    return _AdapterBuilder(AdapterTensors(file, PeftMethod.LORA, model), model, settings.base_model).build_lora(settings)


def _last_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()


def _describe_widths(path: str, module: ModuleFacts) -> str:
    return f"{path} is a {describe_module(module)} of {module.in_width} to {module.out_width}"


class _AdapterBuilder:
    """Takes the tensors of one adapter, part by part, as its settings require."""

    def __init__(self, stored: AdapterTensors, model: ModelFacts, base_model: str | None) -> None:
        self._stored, self._model = stored, model
        self._parts: defaultdict[str, list[Part]] = defaultdict(list)
        self._warnings: list[str] = []
        self._base_model = _last_name(base_model or "")
        if base_model and _last_name(base_model) != _last_name(model.name):
            self._warnings = [f"it was made for {quote(base_model)} and is served on {quote(model.name)}; every tensor fits"]

    def _finish(self, method: str, prefix: PrefixPart | None = None, prompt: PromptPart | None = None) -> Adapter:
        self._stored.finish(_REASONS_LEFT)
        parts = {path: tuple(found) for path, found in self._parts.items()}
        found = build_adapter(method, parts, prefix=prefix, prompt=prompt, warnings=tuple(self._warnings))
        return replace(found, base_model=self._base_model)

    def build_lora(self, settings: LoraSettings) -> Adapter:
        targets = self._adapted_paths(settings.targets)
        self._take_saved(settings.targets.saved, tied=settings.tied)
        self._take_base_weights()
        self._take_biases(settings, set(targets))
        if settings.tied:  # a tied head is stored although target_modules does not name it
            targets += self._tied_paths(targets, Role.A, Role.EMBEDDING_A)
        for path in targets:
            self._parts[path].append(self._take_lora(path, settings))
        self._take_tokens(settings)
        return self._finish("dora" if settings.dora else "lora")

    def _adapted_paths(self, targets: Targets) -> list[str]:
        paths = list(targets.paths(self._model))
        for path in paths:
            if self._model.modules[path].kind is None:
                raise UnsupportedAdapter(
                    f"{CONFIG}: target_modules names {path}, a {describe_module(self._model.modules[path])}; served are "
                    "adapters of linear layers, Conv1D and embeddings"
                )
        return paths

    def _tied_paths(self, paths: list[str], *roles: Role) -> list[str]:
        """Other paths with stored tensors of these roles whose modules are tied to one of `paths`."""
        ties = self._model.ties
        return [path for path in self._stored.paths(*roles) if path not in paths and set(ties.get(path, ())) & set(paths)]

    def _take_lora(self, path: str, settings: LoraSettings) -> LoraPart:
        take, module = self._stored.take, self._model.modules[path]
        rank, into, out = settings.rank_of(path), module.in_width, module.out_width
        embedding = module.kind is LayerKind.EMBEDDING
        role_a, role_b = (Role.EMBEDDING_A, Role.EMBEDDING_B) if embedding else (Role.A, Role.B)
        if not self._stored.has(path, role_a):
            raise BadAdapter(f"{TENSORS} lacks {role_a} of {path}, which target_modules names")
        fit = _describe_widths(path, module)
        return LoraPart(
            a_RI=take(path, role_a, (rank, into), fit=fit, own=0),
            b_OR=take(path, role_b, (out, rank), fit=fit, own=1),
            scale=settings.scale_of(path),
            magnitude_O=take(path, Role.MAGNITUDE, (out,), fit=fit) if settings.dora else None,
            bias_O=take(path, Role.B_BIAS, (out,), fit=fit) if settings.lora_bias and not embedding else None,
        )

    def _take_own(self, path: str, role: Role, name: str) -> Tensor:
        """A tensor in the shape of the module's own parameter."""
        return self._stored.take(path, role, self._model.modules[path].shapes[name], fit=f"the model's {path} has it")

    def _take_saved(self, names: tuple[str, ...], *, tied: bool = False) -> None:
        """modules_to_save: a module's own parameters, all of them."""
        covered = saved_paths(names, self._model)
        unused = [quote(name) for name, paths in covered.items() if not paths]
        if unused:  # PEFT lists both common names of a classifier, and the model has one of them
            self._warnings.append(f"modules_to_save names {join_names(unused)}, which neither the model nor the file has")
        paths = list(dict.fromkeys(path for group in covered.values() for path in group))
        if tied:
            paths += self._tied_paths(paths, Role.WEIGHT)
        for path in paths:
            module = self._model.modules[path]
            if not set(module.shapes) <= {"weight", "bias"}:
                raise UnsupportedAdapter(
                    f"{CONFIG}: modules_to_save names {path}, a {describe_module(module)}; served are modules of a weight and "
                    "a bias"
                )
            weight = self._take_own(path, Role.WEIGHT, "weight") if "weight" in module.shapes else None
            bias = self._take_own(path, Role.BIAS, "bias") if "bias" in module.shapes else None
            self._parts[path].append(ReplacedPart(weight, bias))

    def _take_base_weights(self) -> None:
        """PEFT stores the whole embedding with an adapter of it, and when the vocabulary was resized."""
        model, stored = self._model, self._stored
        embeddings = {path for path in (model.embedding, model.head) if path is not None}
        roles = (Role.BASE_WEIGHT, Role.TOKENS_BASE_WEIGHT, Role.WEIGHT)
        own_weights = {*self._parts, *stored.paths(*roles)}
        for path in sorted(embeddings.intersection(stored.paths(*roles))):
            shape = model.modules[path].shapes["weight"]
            for role in (role for role in roles if stored.has(path, role)):
                found = stored.shape(path, role)
                if len(found) == 2 and found[1] == shape[1] and found[0] != shape[0]:
                    raise UnsupportedAdapter(
                        f"{TENSORS}: {path} has {found[0]} rows, the model's has {shape[0]}; adapters that "
                        "resize the vocabulary are not served"
                    )
                weight = self._take_own(path, role, "weight")
                if model.is_own_weight(path, weight):
                    self._warnings.append(f"the {role} of {path} equals the model's own and is not stored again")
                    continue
                # A tied weight is one tensor: PEFT changes it for all its users, except those with their own.
                for user in (path, *(user for user in model.ties.get(path, ()) if user not in own_weights)):
                    self._parts[user].append(ReplacedPart(weight, None))

    def _take_biases(self, settings: LoraSettings, targets: set[str]) -> None:
        """bias='all' or 'lora_only': trained biases of base layers."""
        if settings.bias == "none":
            return
        for path, module in self._model.modules.items():
            if "bias" not in module.shapes or (settings.bias == "lora_only" and path not in targets):
                continue
            if any(isinstance(part, ReplacedPart) and part.bias is not None for part in self._parts.get(path, ())):
                continue
            role = Role.BASE_BIAS if path in targets else Role.BIAS
            if not self._stored.has(path, role):
                raise BadAdapter(f"{TENSORS} lacks the bias of {path}, which was trained by bias={settings.bias!r} of {CONFIG}")
            self._parts[path].append(ReplacedPart(None, self._take_own(path, role, "bias")))

    def _take_tokens(self, settings: LoraSettings) -> None:
        """trainable_token_indices: rows of an embedding, and of the head that is tied to it."""
        model = self._model
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
            if not self._stored.has(path, Role.TOKENS) and any(token_ids.get(o) == ids for o in model.ties.get(path, ())):
                continue  # stored once for all tied modules
            fit = f"{path} has rows of {shape[1]}"
            rows = self._stored.take(path, Role.TOKENS, (len(ids), shape[1]), fit=fit, own=0)
            taken[path] = TrainableTokensPart(ids=ids, rows_TD=rows)
        for other in model.ties.get(model.embedding or "", ()):
            if model.embedding in taken and other not in taken:
                taken[other] = taken[model.embedding]
        for path, tokens in taken.items():
            if any(isinstance(part, LoraPart) for part in self._parts.get(path, ())):
                raise BadAdapter(f"{CONFIG}: trainable_token_indices names {path}, which target_modules names as well")
            self._parts[path].append(tokens)

    def build_ia3(self, settings: Ia3Settings) -> Adapter:
        self._take_saved(settings.targets.saved)
        for path in self._adapted_paths(settings.targets):
            module = self._model.modules[path]
            if module.kind is LayerKind.EMBEDDING:
                raise UnsupportedAdapter(f"{CONFIG}: target_modules names {path}, an embedding, which IA3 does not adapt")
            of_input = settings.feedforward.selects_ending(path)
            shape = (1, module.in_width) if of_input else (module.out_width, 1)
            found = self._stored.shape(path, Role.SCALING) if self._stored.has(path, Role.SCALING) else shape
            if len(found) == 2 and max(found) > 1 and (found[0] == 1) != of_input:
                raise BadAdapter(
                    f"{TENSORS}: ia3_l of {path} scales the {'output' if of_input else 'input'}, "
                    f"feedforward_modules of {CONFIG} says the {'input' if of_input else 'output'}"
                )
            vector = self._stored.take(path, Role.SCALING, shape, fit=_describe_widths(path, module))
            self._parts[path].append(Ia3Part(vector=vector.view(-1), of_input=of_input))
        return self._finish("ia3")

    def build_prompt(self, settings: PromptSettings) -> Adapter:
        model, method = self._model, settings.method.value.lower()
        if not model.decoder_only:
            raise UnsupportedAdapter(
                f"{CONFIG}: peft_type {settings.method} is served on decoder-only models that generate, not on {model.name}"
            )
        self._take_saved(settings.saved)
        if settings.method is PeftMethod.PREFIX_TUNING:
            return self._finish(method, prefix=self._take_prefix(settings))
        width = model.modules[model.embedding].out_width if model.embedding else model.hidden
        if (settings.width or width) != width:
            raise UnsupportedAdapter(f"{CONFIG}: token_dim is {settings.width}, and {model.name} has embeddings of {width}")
        return self._finish(method, prompt=PromptPart(self._stored.take_prompt((settings.tokens, width))))

    def _take_prefix(self, settings: PromptSettings) -> PrefixPart:
        # T x 2L rows of a key or a value; PEFT applies a trained projection on saving.
        tokens, model = settings.tokens, self._model
        layers, heads, width = model.layers, model.kv_heads, model.head_dim
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
        flat = self._stored.take_prompt((tokens, 2 * layers * heads * width))
        both = flat.view(tokens, layers, 2, heads, width).permute(2, 1, 3, 0, 4)
        return PrefixPart(keys_LHTD=both[0].contiguous(), values_LHTD=both[1].contiguous())
