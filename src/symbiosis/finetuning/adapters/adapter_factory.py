"""Creates adapters with PEFT from a config and a seed. The model stays unchanged.

PEFT wraps modules of its own over the model's weights, with torch's random numbers seeded. So an adapter starts as after
`set_seed` and `get_peft_model`. The factory takes the parameters and drops the modules.

A config is untrusted input. `adapters.config` parses it first. PEFT gets plain paths instead of names and patterns, so it
matches no tenant's regular expression, and opens or imports nothing that the config names.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.utils import constants
from peft.utils.other import _prepare_prompt_learning_config
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis import kernels
from symbiosis.adapters.config import Ia3Settings, LoraSettings, PeftMethod, PromptSettings, Settings, parse_config
from symbiosis.adapters.files import CONFIG, FileLimits, quote
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Ia3Part
from symbiosis.errors import BadAdapter, SymbiosisError, TooLarge, UnsupportedAdapter
from symbiosis.finetuning.adapters.flat_parameters import FlatParameters, can_flatten
from symbiosis.finetuning.adapters.lora_math import Part, TrainableLora
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter, TrainedVirtualTokens
from symbiosis.models.loading import frozen_copy

_NAME = "default"
_ROOT = "base_model.model."
_seeding = threading.Lock()  # all threads share torch's random number generator

_PROMPT_SIZES = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules", "encoder_hidden_size")
"""Fields of a prompt config that PEFT derives from the model."""
_MAX_ENCODER = 8192
_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal")
_COPIED_FIELDS = {
    PeftMethod.LORA: {"peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias"}
    | {"init_lora_weights", "fan_in_fan_out"},
    PeftMethod.IA3: {"peft_type", "task_type", "init_ia3_weights", "fan_in_fan_out"},
}
"""Fields that PEFT reads as the tenant wrote them. Names and patterns are resolved; other fields have their defaults."""
_COPIED_PROMPT_FIELDS = {"num_virtual_tokens", *_PROMPT_SIZES, "task_type", "prefix_projection"}
_COPIED_PROMPT_FIELDS |= {"init_weights", "prompt_tuning_init"}


class AdapterFactory:
    """Creates adapters of one model. Thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: FileLimits = FileLimits(),  # noqa: B008 - frozen
        *,
        max_parameters: int = 1 << 28,
        flat: bool = True,
        complete: Callable[[TrainedAdapter], None] = lambda adapter: None,
    ) -> None:
        """`flat`: let the grouped kernels compute plain LoRA, where they run. `complete` finishes a new adapter, if the model
        is a skeleton without weights.
        """
        self._flat, self._complete = flat, complete
        self._model, self._limits, self._max_parameters = model, limits, max_parameters
        self.facts = ModelFacts.from_model(model)

    def create(
        self, config: PeftConfig | Mapping[str, Any], *, seed: int, admit: Callable[[int], None] | None = None
    ) -> TrainedAdapter:
        """Before anything is created: raises what `check` raises, or `admit` of about so many parameters."""
        raw, settings, exact, size = self._check(config)
        if admit is not None:
            admit(size)
        with _typed_errors(), _seeded(seed):
            model = get_peft_model(frozen_copy(self._model), exact)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        virtual: TrainedVirtualTokens | None = None
        parts: dict[str, Part] = {}
        files: dict[str, str] = {}
        if isinstance(settings, PromptSettings):
            shape = (self.facts.layers, self.facts.kv_heads, self.facts.head_dim)
            is_prefix = settings.method is PeftMethod.PREFIX_TUNING
            virtual = TrainedVirtualTokens(model.prompt_encoder[_NAME], settings.tokens, shape if is_prefix else None)
            method = settings.method.value.lower()
        else:
            parts = dict(_adapted_layers(model))
            if set(parts) != set(settings.targets.paths(self.facts)):
                others = quote(sorted(parts)[:3])
                raise UnsupportedAdapter(f"{CONFIG}: PEFT adapts other modules than target_modules names: {others}")
            by_memory = {p.data_ptr(): name for name, p in parameters.items()}
            stored = get_peft_model_state_dict(model, save_embedding_layers=False)
            files = {file: by_memory[tensor.data_ptr()] for file, tensor in stored.items()}
            method = "ia3" if isinstance(settings, Ia3Settings) else "dora" if settings.dora else "lora"
        is_flat = self._flat and bool(parts) and kernels.run_on(self._model.device) and can_flatten(parameters, parts)
        adapter = TrainedAdapter(
            parts=parts,
            virtual=virtual,
            parameters=parameters,
            files=files,
            config=_config_text(raw, model.peft_config[_NAME]),
            method=method,
            flat=FlatParameters(parameters, parts) if is_flat else None,
        )
        self._complete(adapter)
        return adapter

    def check(self, config: PeftConfig | Mapping[str, Any]) -> PeftConfig:
        """PEFT's config of it. Raises `BadAdapter`, `UnsupportedAdapter` or `TooLarge` if the adapter cannot be created."""
        return self._check(config)[2]

    def _check(self, config: PeftConfig | Mapping[str, Any]) -> tuple[dict[str, Any], Settings, PeftConfig, int]:
        """The config as in a file, its parsed settings, PEFT's config, and about how many parameters it has."""
        raw = {**self._with_defaults(_as_json(config)), "task_type": "CAUSAL_LM"}
        settings = parse_config(raw, self._limits)
        _check_trainable(raw, settings)
        exact = self._exact_config(raw, settings)
        size = self._parameter_count(raw, settings)
        if size > self._max_parameters:
            raise TooLarge(f"this adapter has {size} parameters, at most {self._max_parameters} can be trained")
        return raw, settings, exact, size

    def _with_defaults(self, raw: dict[str, Any]) -> dict[str, Any]:
        """With PEFT's defaults for this architecture."""
        kind = self._model.config.model_type
        method = raw.get("peft_type")
        if method == PeftMethod.LORA and raw.get("target_modules") is None:
            known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
            return {**raw, "target_modules": sorted(known) if known else None}
        if method == PeftMethod.IA3:
            names = {
                "target_modules": constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(kind),
                "feedforward_modules": constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(kind),
            }
            return {**raw, **{key: value for key, value in names.items() if raw.get(key) is None}}
        if method in (PeftMethod.PREFIX_TUNING, PeftMethod.PROMPT_TUNING, PeftMethod.P_TUNING):
            bare = _peft_config(method, {"num_virtual_tokens": 1, "task_type": "CAUSAL_LM"})
            with _typed_errors():
                defaults = _as_json(_prepare_prompt_learning_config(bare, self._model.config))
            return {**raw, **{key: defaults[key] for key in _PROMPT_SIZES if raw.get(key) is None and key in defaults}}
        return raw

    def _exact_config(self, raw: dict[str, Any], settings: Settings) -> PeftConfig:
        """An equivalent config for PEFT without regular expressions."""
        if isinstance(settings, PromptSettings):
            self._check_prompt_sizes(settings)
            return _peft_config(settings.method, {key: value for key, value in raw.items() if key in _COPIED_PROMPT_FIELDS})
        method = PeftMethod.LORA if isinstance(settings, LoraSettings) else PeftMethod.IA3
        paths = list(settings.targets.paths(self.facts))
        if not paths:
            raise UnsupportedAdapter(f"{CONFIG}: target_modules names no module of {self.facts.name}")
        for path in paths:
            module = self._model.get_submodule(path)
            if type(module) not in (nn.Linear, Conv1D):
                kind = type(module).__name__
                raise UnsupportedAdapter(f"{CONFIG}: target_modules names {path}, a {kind}: only linear layers are trained")
        exact = {key: value for key, value in raw.items() if key in _COPIED_FIELDS[method]}
        exact["target_modules"] = paths
        if isinstance(settings, Ia3Settings):
            exact["feedforward_modules"] = [path for path in paths if settings.feedforward.selects_ending(path)]
            return _peft_config(method, exact)
        ranks = {path: settings.rank_of(path) for path in paths}
        alphas = {path: next((a for p, a in settings.alphas if p.matches_suffix(path)), settings.alpha) for path in paths}
        exact["rank_pattern"] = {f"^{re.escape(path)}": rank for path, rank in ranks.items() if rank != settings.rank}
        exact["alpha_pattern"] = {f"^{re.escape(path)}": alpha for path, alpha in alphas.items() if alpha != settings.alpha}
        return _peft_config(method, exact)

    def _check_prompt_sizes(self, settings: PromptSettings) -> None:
        """The width of virtual tokens is the model's, not the config's."""
        facts = self.facts
        if settings.method is PeftMethod.PREFIX_TUNING:
            if not facts.kv_heads:
                raise UnsupportedAdapter(f"{CONFIG}: PREFIX_TUNING needs layers with equal KV caches")
            expected = (facts.kv_heads * facts.head_dim, facts.layers)
        else:
            expected = (facts.modules[facts.embedding].out_width if facts.embedding else facts.hidden, settings.layers or 0)
        if (settings.width, settings.layers or 0) != expected:
            raise UnsupportedAdapter(
                f"{CONFIG}: token_dim {settings.width} and num_layers {settings.layers} are not those of {facts.name}, "
                f"{expected}: leave them out"
            )

    def _parameter_count(self, raw: Mapping[str, Any], settings: Settings) -> int:
        """Approximately."""
        if isinstance(settings, PromptSettings):
            width = settings.width or 0  # set by `_with_defaults`
            row = width * (2 * self.facts.layers if settings.method is PeftMethod.PREFIX_TUNING else 1)
            inner = int(raw.get("encoder_hidden_size") or 0)
            encoder = inner * (width + row + (inner if settings.method is PeftMethod.P_TUNING else 0))
            has_encoder = raw.get("prefix_projection") or settings.method is PeftMethod.P_TUNING
            return settings.tokens * row + (encoder if has_encoder else 0)
        modules = [(path, self.facts.modules[path]) for path in settings.targets.paths(self.facts)]
        if isinstance(settings, LoraSettings):
            return sum(settings.rank_of(path) * (module.in_width + module.out_width) for path, module in modules)
        return sum(max(module.in_width, module.out_width) for _, module in modules)


def _as_json(config: PeftConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The config as JSON stores it. Raises `BadAdapter`."""
    if not isinstance(config, PeftConfig | Mapping):
        raise BadAdapter(
            f"adapter is {quote(config)}, expected a config of PEFT, such as LoraConfig(r=8), or the same as a dict"
        )
    raw: dict[str, Any] = config.to_dict() if isinstance(config, PeftConfig) else dict(config)
    try:
        raw = json.loads(json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in raw.items()}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadAdapter(f"{CONFIG} cannot be written as JSON: {quote(str(error))}") from None
    return raw


def _check_trainable(raw: Mapping[str, Any], settings: Settings) -> None:
    """Raises `UnsupportedAdapter` for what is served but not trained."""
    unsupported: dict[str, Any] = {"modules_to_save": raw.get("modules_to_save")}
    if isinstance(settings, LoraSettings):
        start = raw.get("init_lora_weights")
        if start not in _INITIALIZATIONS:
            raise UnsupportedAdapter(f"{CONFIG}: init_lora_weights is {quote(start)}, expected one of {_INITIALIZATIONS[1:]}")
        rate = raw.get("lora_dropout") or 0.0
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise BadAdapter(f"{CONFIG}: lora_dropout is {quote(rate)}, expected a number from 0 to below 1")
        unsupported |= {"trainable_token_indices": settings.tokens, "bias": None if settings.bias == "none" else settings.bias}
    elif isinstance(settings, PromptSettings):
        width, lstm = raw.get("encoder_hidden_size"), raw.get("encoder_reparameterization_type") == "LSTM"
        if width is not None and (type(width) is not int or not 1 <= width <= _MAX_ENCODER):
            raise BadAdapter(f"{CONFIG}: encoder_hidden_size is {quote(width)}, expected 1 to {_MAX_ENCODER}")
        unsupported["prompt_tuning_init"] = "TEXT" if raw.get("prompt_tuning_init") == "TEXT" else None
        unsupported["encoder_reparameterization_type"] = "LSTM" if lstm else None
    for key, value in unsupported.items():
        if value:
            raise UnsupportedAdapter(f"{CONFIG} sets {key} to {quote(value)}, which is served but cannot be trained")


def _peft_config(method: str, raw: Mapping[str, Any]) -> PeftConfig:
    """PEFT's config of checked fields. Unknown fields are off: `parse_config` rejected the others."""
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    known = {field.name for field in fields(kind) if field.init}
    known.discard("peft_type")
    with _typed_errors():
        return kind(**{key: value for key, value in raw.items() if key in known and value is not None})


def _config_text(raw: Mapping[str, Any], used: PeftConfig) -> str:
    """`adapter_config.json`: the given config, with what PEFT adds when it saves."""
    keys = used.to_dict()
    keys |= {key: value for key, value in raw.items() if key in keys and value is not None}
    if isinstance(raw.get("target_modules"), str) and raw["target_modules"].lower() == "all-linear":
        keys["target_modules"] = used.target_modules
    keys |= {"inference_mode": True, "base_model_name_or_path": used.base_model_name_or_path}
    keys |= {key: raw.get(key, keys[key]) for key in ("rank_pattern", "alpha_pattern") if key in keys}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in keys.items()}
    return json.dumps(plain, indent=2, sort_keys=True)


def _adapted_layers(model: PeftModel) -> Iterator[tuple[str, Part]]:
    """By path in the plain model."""
    for name, module in model.named_modules():
        path = name.removeprefix(_ROOT)
        if isinstance(module, LoraLayer):
            rate = getattr(module.lora_dropout[_NAME], "p", 0.0)
            magnitude = module.lora_magnitude_vector
            yield (
                path,
                TrainableLora(
                    module.lora_A[_NAME].weight,
                    module.lora_B[_NAME].weight,
                    float(module.scaling[_NAME]),
                    dropout=float(rate),
                    magnitude_O=magnitude[_NAME].weight if _NAME in magnitude else None,
                    bias_O=module.lora_B[_NAME].bias,
                ),
            )
        elif isinstance(module, IA3Layer):
            yield path, Ia3Part(module.ia3_l[_NAME], of_input=module.is_feedforward)


@contextmanager
def _typed_errors() -> Iterator[None]:
    """PEFT may raise any exception."""
    try:
        yield
    except SymbiosisError:
        raise
    except torch.OutOfMemoryError as error:
        raise TooLarge("out of memory for this adapter") from error
    except Exception as error:
        raise UnsupportedAdapter(f"PEFT cannot create this adapter: {type(error).__name__}: {quote(str(error))}") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator, and restore its state afterwards."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
