"""A strict schema of PEFT's `adapter_config.json`: every field of PEFT 0.21 is served, harmless or refused.

No value reaches a loader, and nothing that a config names is imported or opened. An unknown key is refused unless it is
off, since a newer PEFT may give it any meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from symbiosis.adapters.config_fields import Fields
from symbiosis.adapters.files import CONFIG, FileLimits, quote
from symbiosis.adapters.safe_regex import MatchBudget, SafePattern
from symbiosis.adapters.targets import TargetChoice, Targets
from symbiosis.errors import BadAdapter, UnsupportedAdapter


class PeftMethod(StrEnum):
    """The served methods, by PEFT's names."""

    LORA = "LORA"
    IA3 = "IA3"
    PREFIX_TUNING = "PREFIX_TUNING"
    PROMPT_TUNING = "PROMPT_TUNING"
    P_TUNING = "P_TUNING"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    targets: Targets
    rank: int
    alpha: float
    ranks: tuple[tuple[SafePattern, int], ...] = ()
    """rank_pattern: the first match of the end of a path applies."""
    alphas: tuple[tuple[SafePattern, float], ...] = ()
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    """Retrained tokens of the input embedding, or of the modules named."""
    tied: bool = False
    """ensure_weight_tying: settings of a module may be stored for the modules tied to it too."""
    base_model: str | None = None

    def rank_of(self, path: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.matches_suffix(path)), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches_suffix(path)), self.alpha)
        return alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ia3Settings:
    targets: Targets
    feedforward: TargetChoice
    base_model: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSettings:
    """Prefix tuning, prompt tuning and p-tuning. PEFT stores the output of the trained encoder."""

    method: PeftMethod
    tokens: int
    width: int | None
    """None, like heads and layers: the model decides."""
    heads: int | None
    layers: int | None
    saved: tuple[str, ...] = field(default=())
    base_model: str | None = None


Settings: TypeAlias = LoraSettings | Ia3Settings | PromptSettings

# The origin of an adapter, or settings that only affect training.
_BOOKKEEPING = {"task_type", "auto_mapping", "peft_version", "revision", "inference_mode"}
_LORA_HARMLESS = frozenset(
    _BOOKKEEPING
    | {"lora_dropout", "fan_in_fan_out", "runtime_config"}
    | {"megatron_core", "qalora_group_size"}  # only effective with settings that are refused
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # init_lora_weights decides whether they are effective
    | {"merge_weights"}  # PEFT 0.2: merge for speed
)
_IA3_HARMLESS = frozenset(_BOOKKEEPING | {"fan_in_fan_out", "init_ia3_weights"})
_PROMPT_HARMLESS = frozenset(
    _BOOKKEEPING
    | {"encoder_hidden_size", "prefix_projection", "init_weights"}
    | {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"}
    | {"encoder_reparameterization_type", "encoder_num_layers", "encoder_dropout"}
)
_LORA_REFUSED = {
    "layer_replication": "it adds layers that the served model does not have",
    "megatron_config": "layers of Megatron are not served",
    "target_parameters": "adapters of single parameters, such as stacked experts, are not served",
    "alora_invocation_tokens": "activated LoRA, which applies to some tokens only, is not served",
    "arrow_config": "routing among several adapters is not served",
    "use_bdlora": "block-diagonal LoRA is stored in another form, which is not served",
    "kasa_config": "KaSA changes the base weights, which all tenants share",
    "monteclora_config": "Monte Carlo LoRA is not served",
    "velora_config": "VeLoRA stores more than LoRA's tensors, which is not served",
    "use_qalora": "QALoRA needs a quantised base model, which is not served",
    "enable_lora": "LoRA on parts of a merged layer (PEFT 0.2) is not served",
}

_DEFAULT_RANK, _DEFAULT_ALPHA = 8, 8.0  # PEFT's defaults
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")
_CHANGING_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


def parse_config(raw: Mapping[str, Any], limits: FileLimits) -> Settings:
    """The settings in a config. Raises `BadAdapter` or `UnsupportedAdapter`, naming the key."""
    fields = Fields(raw)
    name = fields.text("peft_type")
    if name is None:
        raise BadAdapter(f"{CONFIG} has no peft_type; is it the config of an adapter that PEFT saved?")
    if name not in PeftMethod.__members__:
        raise UnsupportedAdapter(f"{CONFIG}: peft_type {quote(name)} is not served; served are {', '.join(PeftMethod)}")
    method = PeftMethod(name)
    if method is PeftMethod.LORA:
        return _parse_lora(fields, limits)
    if method is PeftMethod.IA3:
        return _parse_ia3(fields)
    return _parse_prompt(fields, method, limits)


def _parse_lora(fields: Fields, limits: FileLimits) -> LoraSettings:
    _check_init(fields.take("init_lora_weights"))
    budget = MatchBudget()
    bias = fields.text("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise Fields.wrong("bias", bias, "none, all or lora_only")
    found = LoraSettings(
        targets=_parse_targets(fields, budget),
        rank=fields.integer("r", 1, limits.max_rank, default=_DEFAULT_RANK),
        alpha=fields.number("lora_alpha", default=_DEFAULT_ALPHA),
        ranks=tuple(
            (SafePattern(key, "rank_pattern", budget), Fields.checked_integer(f"rank_pattern[{key}]", rank, 1, limits.max_rank))
            for key, rank in fields.table("rank_pattern").items()
        ),
        alphas=tuple(
            (SafePattern(key, "alpha_pattern", budget), Fields.checked_number(f"alpha_pattern[{key}]", alpha))
            for key, alpha in fields.table("alpha_pattern").items()
        ),
        rslora=fields.flag("use_rslora"),
        dora=fields.flag("use_dora"),
        lora_bias=fields.flag("lora_bias"),
        bias=bias,
        tokens=_parse_tokens(fields.take("trainable_token_indices")),
        tied=fields.flag("ensure_weight_tying"),
        base_model=fields.text("base_model_name_or_path"),
    )
    fields.finish(harmless=_LORA_HARMLESS, refused=_LORA_REFUSED)
    if found.dora and found.lora_bias:
        raise BadAdapter(f"{CONFIG} sets use_dora and lora_bias, which PEFT does not combine")
    return found


def _check_init(value: Any) -> None:
    """PEFT stores a delta to the base model. Some initialisations change the base model before training."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _PLAIN_INITS):
        return
    if isinstance(value, str) and value.lower().startswith(_CHANGING_INITS):
        raise UnsupportedAdapter(
            f"{CONFIG} sets init_lora_weights to {quote(value)}, which changed the base weights before training, so the "
            "adapter does not fit the plain base model. Save it as plain LoRA: "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=folder_of_the_untrained_adapter)"
        )
    raise UnsupportedAdapter(f"{CONFIG} sets init_lora_weights to {quote(value)}, which is unknown here")


def _parse_targets(fields: Fields, budget: MatchBudget) -> Targets:
    chosen = fields.names_or_text("target_modules")
    if chosen is None:
        raise BadAdapter(
            f"{CONFIG} has no target_modules, which PEFT would derive from the architecture: expected the names of the adapted "
            "modules, as PEFT's `save_pretrained` writes them"
        )
    excluded = fields.names_or_text("exclude_modules")
    layers = fields.take("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or []
    if not isinstance(layers, list) or len(layers) > 10_000:
        raise Fields.wrong("layers_to_transform", layers, "numbers of layers")
    patterns = fields.names_or_text("layers_pattern") or ()
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    if len(patterns) > 16:
        raise Fields.wrong("layers_pattern", list(patterns), "at most 16 names")
    return Targets(
        chosen=TargetChoice.from_config(chosen, "target_modules", budget),
        excluded=TargetChoice.from_config(excluded, "exclude_modules", budget) if excluded else None,
        layers=frozenset(Fields.checked_integer("layers_to_transform", layer, 0, 100_000) for layer in layers),
        layers_patterns=tuple(SafePattern(pattern, "layers_pattern", budget) for pattern in patterns),
        saved=fields.names("modules_to_save", 256),
    )


def _parse_tokens(value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
    if value is None or isinstance(value, list):
        return None if value is None else _parse_token_ids(value)
    if not isinstance(value, dict) or len(value) > 16:
        raise Fields.wrong("trainable_token_indices", value, "a list of tokens, or lists by module")
    return {name: _parse_token_ids(ids) for name, ids in value.items()}


def _parse_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise Fields.wrong("trainable_token_indices", value, "a list of tokens")
    ids = tuple(Fields.checked_integer("trainable_token_indices", number, 0, 1 << 31) for number in value)
    if len(set(ids)) < len(ids):
        raise BadAdapter(f"{CONFIG}: trainable_token_indices has a token twice")
    return ids


def _parse_ia3(fields: Fields) -> Ia3Settings:
    budget = MatchBudget()
    feedforward = fields.names_or_text("feedforward_modules")
    if feedforward is None:
        raise BadAdapter(
            f"{CONFIG} has no feedforward_modules, which PEFT would derive from the architecture: expected a list of "
            "names, which may be empty"
        )
    found = Ia3Settings(
        targets=_parse_targets(fields, budget),
        feedforward=TargetChoice.from_config(feedforward, "feedforward_modules", budget),
        base_model=fields.text("base_model_name_or_path"),
    )
    fields.finish(harmless=_IA3_HARMLESS, refused={})
    return found


def _parse_prompt(fields: Fields, method: PeftMethod, limits: FileLimits) -> PromptSettings:
    submodules = fields.take("num_transformer_submodules")
    if submodules not in (None, 1) or isinstance(submodules, bool):
        raise UnsupportedAdapter(
            f"{CONFIG}: num_transformer_submodules is {quote(submodules)}; prompts for encoder-decoder models are not served"
        )
    found = PromptSettings(
        method=method,
        tokens=fields.integer("num_virtual_tokens", 1, limits.max_virtual_tokens),
        width=fields.optional_integer("token_dim", 1, 1 << 20),
        heads=fields.optional_integer("num_attention_heads", 1, 1 << 20),
        layers=fields.optional_integer("num_layers", 1, 100_000),
        saved=fields.names("modules_to_save", 256),
        base_model=fields.text("base_model_name_or_path"),
    )
    fields.finish(harmless=_PROMPT_HARMLESS, refused={})
    return found
