"""A new adapter as PEFT makes it, from a config and a seed, on a model that is never touched.

PEFT puts the adapter on modules of its own over the model's weights, with torch's random numbers seeded: what it
starts from is what `get_peft_model` after `set_seed` starts from. Its parameters are taken, the modules thrown away.

A config comes from a stranger. Ours reads it first (`adapters.config`); PEFT gets names and patterns resolved to plain
paths, so that no expression of a stranger's is ever matched by it, and nothing it names is opened or imported.
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
from symbiosis.finetuning.flat_parameters import FlatParameters, can_flatten
from symbiosis.finetuning.trainable_parts import Part, TrainableLora
from symbiosis.finetuning.trained_adapter import TrainedAdapter, TrainedVirtualTokens
from symbiosis.models.loading import frozen_copy

_NAME = "default"
_ROOT = "base_model.model."
_seeding = threading.Lock()  # torch has one stream of random numbers for all threads

_SIZES = ("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules", "encoder_hidden_size")
"""What PEFT fills into a config of virtual tokens from the model."""
_MAX_ENCODER = 8192
_STARTS = (None, True, False, "gaussian", "orthogonal")
_PLAIN = {
    PeftMethod.LORA: {"peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias"}
    | {"init_lora_weights", "fan_in_fan_out"},
    PeftMethod.IA3: {"peft_type", "task_type", "init_ia3_weights", "fan_in_fan_out"},
}
"""What PEFT may read of a stranger's config as it is; names and patterns are resolved, the rest has its default."""
_VIRTUAL = {"num_virtual_tokens", *_SIZES, "task_type", "prefix_projection", "init_weights", "prompt_tuning_init"}


class AdapterFactory:
    """Makes adapters for one model. Any thread may use it."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: FileLimits = FileLimits(),  # noqa: B008 - frozen
        *,
        max_parameters: int = 1 << 28,
    ) -> None:
        self._model, self._limits, self._max_parameters = model, limits, max_parameters
        self.facts = ModelFacts.from_model(model)

    def make(
        self, asked: PeftConfig | Mapping[str, Any], *, seed: int, admit: Callable[[int], None] | None = None
    ) -> TrainedAdapter:
        """Raises what `check` raises, or what `admit` raises of about so many parameters, all before anything is made."""
        raw, settings, config, size = self._checked(asked)
        if admit is not None:
            admit(size)
        with _typed(), _seeded(seed):
            made = get_peft_model(frozen_copy(self._model), config)
        written = _kept(raw, made.peft_config[_NAME])
        parameters = {name: p for name, p in made.named_parameters() if p.requires_grad}
        if isinstance(settings, PromptSettings):
            virtual = self._virtual(made, settings)
            return TrainedAdapter(
                parts={}, virtual=virtual, parameters=parameters, files={}, config=written, method=settings.method.value.lower()
            )
        parts = dict(_parts(made))
        if set(parts) != set(settings.targets.paths(self.facts)):
            raise UnsupportedAdapter(
                f"{CONFIG}: PEFT adapts other modules than target_modules names: {quote(sorted(parts)[:3])}"
            )
        by_memory = {p.data_ptr(): name for name, p in parameters.items()}
        stored = get_peft_model_state_dict(made, save_embedding_layers=False)
        files = {file: by_memory[tensor.data_ptr()] for file, tensor in stored.items()}
        method = "ia3" if isinstance(settings, Ia3Settings) else "dora" if settings.dora else "lora"
        by_kernels = kernels.run_on(self._model.device) and can_flatten(parameters, parts)
        return TrainedAdapter(
            parts=parts,
            virtual=None,
            parameters=parameters,
            files=files,
            config=written,
            method=method,
            flat=FlatParameters(parameters, parts) if by_kernels else None,
        )

    def check(self, asked: PeftConfig | Mapping[str, Any]) -> None:
        """Raises `BadAdapter`, `UnsupportedAdapter` or `TooLarge` if it cannot be made."""
        self._checked(asked)

    def _checked(self, asked: PeftConfig | Mapping[str, Any]) -> tuple[dict[str, Any], Settings, PeftConfig, int]:
        """The config as it would stand in a file, what it means, what PEFT is told, and about how many parameters it has."""
        raw = {**self._completed(_as_written(asked)), "task_type": "CAUSAL_LM"}
        settings = parse_config(raw, self._limits)
        _refuse(raw, settings)
        config = self._exact(raw, settings)
        size = self._size(raw, settings)
        if size > self._max_parameters:
            raise TooLarge(f"this adapter would have {size} parameters, at most {self._max_parameters} are trained here")
        return raw, settings, config, size

    def _completed(self, raw: dict[str, Any]) -> dict[str, Any]:
        """With what PEFT would fill in for this architecture."""
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
            bare = _built(method, {"num_virtual_tokens": 1, "task_type": "CAUSAL_LM"})
            with _typed():
                usual = _as_written(_prepare_prompt_learning_config(bare, self._model.config))
            return {**raw, **{key: usual[key] for key in _SIZES if raw.get(key) is None and key in usual}}
        return raw

    def _exact(self, raw: dict[str, Any], settings: Settings) -> PeftConfig:
        """A config for PEFT that means the same and has no expressions in it."""
        if isinstance(settings, PromptSettings):
            self._check_sizes(settings)
            return _built(settings.method, {key: value for key, value in raw.items() if key in _VIRTUAL})
        method = PeftMethod.LORA if isinstance(settings, LoraSettings) else PeftMethod.IA3
        paths = list(settings.targets.paths(self.facts))
        if not paths:
            raise UnsupportedAdapter(f"{CONFIG}: target_modules names nothing that {self.facts.name} has")
        for path in paths:
            module = self._model.get_submodule(path)
            if type(module) not in (nn.Linear, Conv1D):
                raise UnsupportedAdapter(
                    f"{CONFIG}: target_modules names {path}, a {type(module).__name__}: linear layers are trained"
                )
        plain = {key: value for key, value in raw.items() if key in _PLAIN[method]}
        plain["target_modules"] = paths
        if isinstance(settings, Ia3Settings):
            inner = [path for path in paths if settings.feedforward.selects_ending(path)]
            return _built(method, {**plain, "feedforward_modules": inner})
        ranks = {path: settings.rank_of(path) for path in paths}
        alphas = {path: next((a for p, a in settings.alphas if p.matches_suffix(path)), settings.alpha) for path in paths}
        plain["rank_pattern"] = {f"^{re.escape(path)}": rank for path, rank in ranks.items() if rank != settings.rank}
        plain["alpha_pattern"] = {f"^{re.escape(path)}": alpha for path, alpha in alphas.items() if alpha != settings.alpha}
        return _built(method, plain)

    def _virtual(self, made: PeftModel, settings: PromptSettings) -> TrainedVirtualTokens:
        encoder = made.prompt_encoder[_NAME]
        if settings.method is not PeftMethod.PREFIX_TUNING:
            return TrainedVirtualTokens(encoder, settings.tokens)
        return TrainedVirtualTokens(encoder, settings.tokens, (self.facts.layers, self.facts.kv_heads, self.facts.head_dim))

    def _check_sizes(self, settings: PromptSettings) -> None:
        """Virtual tokens are as wide as the model says, whatever the config does."""
        facts = self.facts
        if settings.method is PeftMethod.PREFIX_TUNING:
            if not facts.kv_heads:
                raise UnsupportedAdapter(f"{CONFIG}: PREFIX_TUNING needs layers whose caches are alike")
            expected = (facts.kv_heads * facts.head_dim, facts.layers)
        else:
            expected = (facts.modules[facts.embedding].out_width if facts.embedding else facts.hidden, settings.layers or 0)
        if (settings.width, settings.layers or 0) != expected:
            raise UnsupportedAdapter(
                f"{CONFIG}: token_dim {settings.width} and num_layers {settings.layers} are not those of {facts.name}, "
                f"{expected}: leave them out"
            )

    def _size(self, raw: Mapping[str, Any], settings: Settings) -> int:
        """How many parameters it would have, about."""
        if isinstance(settings, PromptSettings):
            width = settings.width or 0  # `_completed` has filled it in
            row = width * (2 * self.facts.layers if settings.method is PeftMethod.PREFIX_TUNING else 1)
            inner = int(raw.get("encoder_hidden_size") or 0)
            encoder = inner * (width + row + (inner if settings.method is PeftMethod.P_TUNING else 0))
            projected = raw.get("prefix_projection") or settings.method is PeftMethod.P_TUNING
            return settings.tokens * row + (encoder if projected else 0)
        modules = [(path, self.facts.modules[path]) for path in settings.targets.paths(self.facts)]
        if isinstance(settings, LoraSettings):
            return sum(settings.rank_of(path) * (module.in_width + module.out_width) for path, module in modules)
        return sum(max(module.in_width, module.out_width) for _, module in modules)


def _as_written(config: PeftConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A config as it would stand in a file. Raises `BadAdapter` if it could not."""
    if not isinstance(config, PeftConfig | Mapping):
        raise BadAdapter(
            f"adapter is {quote(config)}, expected a config of PEFT, such as LoraConfig(r=8), or the same as a dict"
        )
    found = config.to_dict() if isinstance(config, PeftConfig) else dict(config)
    try:
        written = json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in found.items()}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadAdapter(f"{CONFIG} cannot be written as JSON: {quote(str(error))}") from None
    read: dict[str, Any] = json.loads(written)
    return read


def _refuse(raw: Mapping[str, Any], settings: Settings) -> None:
    """What is served but not trained here."""
    wanted: dict[str, Any] = {"modules_to_save": raw.get("modules_to_save")}
    if isinstance(settings, LoraSettings):
        start = raw.get("init_lora_weights")
        if start not in _STARTS:
            raise UnsupportedAdapter(
                f"{CONFIG}: init_lora_weights {quote(start)} is not trained here; take one of {_STARTS[1:]}"
            )
        rate = raw.get("lora_dropout") or 0.0
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise BadAdapter(f"{CONFIG}: lora_dropout is {quote(rate)}, expected a number from 0 to below 1")
        wanted |= {"trainable_token_indices": settings.tokens, "bias": None if settings.bias == "none" else settings.bias}
    elif isinstance(settings, PromptSettings):
        width, lstm = raw.get("encoder_hidden_size"), raw.get("encoder_reparameterization_type") == "LSTM"
        if width is not None and (type(width) is not int or not 1 <= width <= _MAX_ENCODER):
            raise BadAdapter(f"{CONFIG}: encoder_hidden_size is {quote(width)}, expected 1 to {_MAX_ENCODER}")
        wanted["prompt_tuning_init"] = "TEXT" if raw.get("prompt_tuning_init") == "TEXT" else None
        wanted["encoder_reparameterization_type"] = "LSTM" if lstm else None
    for key, value in wanted.items():
        if value:
            raise UnsupportedAdapter(f"{CONFIG} sets {key} to {quote(value)}, which is served but not trained here")


def _built(method: str, raw: Mapping[str, Any]) -> PeftConfig:
    """PEFT's config of checked keys. Unknown ones are off, or `parse` refused them."""
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    known = {field.name for field in fields(kind) if field.init}
    known.discard("peft_type")
    with _typed():
        return kind(**{key: value for key, value in raw.items() if key in known and value is not None})


def _kept(raw: Mapping[str, Any], used: PeftConfig) -> str:
    """The text of the config beside the adapter: what was asked for, with what PEFT adds when it saves."""
    keys = used.to_dict()
    keys |= {key: value for key, value in raw.items() if key in keys and value is not None}
    if isinstance(raw.get("target_modules"), str) and raw["target_modules"].lower() == "all-linear":
        keys["target_modules"] = used.target_modules
    keys |= {"inference_mode": True, "base_model_name_or_path": used.base_model_name_or_path}
    keys |= {key: raw.get(key, keys[key]) for key in ("rank_pattern", "alpha_pattern") if key in keys}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in keys.items()}
    return json.dumps(plain, indent=2, sort_keys=True)


def _parts(made: PeftModel) -> Iterator[tuple[str, Part]]:
    for name, module in made.named_modules():
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
def _typed() -> Iterator[None]:
    """PEFT may raise anything."""
    try:
        yield
    except SymbiosisError:
        raise
    except torch.OutOfMemoryError as error:
        raise TooLarge("there is no memory for this adapter") from error
    except Exception as error:
        raise UnsupportedAdapter(f"PEFT cannot make this adapter: {type(error).__name__}: {quote(str(error))}") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's random numbers from this seed on, and afterwards as if nothing had been drawn."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
