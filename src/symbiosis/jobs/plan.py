"""Training plan of a job: the request's hyperparameters with every "auto" resolved, as the engine accepts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from symbiosis.adapters.config import PeftMethod, parse_config
from symbiosis.adapters.files import CONFIG, FileLimits
from symbiosis.errors import BadAdapter, UnsupportedAdapter
from symbiosis.jobs.errors import BadPlan

_DEFAULT_LENGTH = 2048
_MAX_AUTO_INTERVAL = 100
"""Most steps between two checkpoints if checkpoint_every is "auto"."""


@dataclass(frozen=True, slots=True)
class PlanMethod:
    """A PEFT method by its short name."""

    kind: PeftMethod
    lr: float
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        return self.kind is PeftMethod.LORA

    @property
    def has_virtual_tokens(self) -> bool:
        return not self.is_low_rank and self.kind is not PeftMethod.IA3


# The learning rates equal those of `symbiosis finetune`.
METHODS = {
    "lora": PlanMethod(PeftMethod.LORA, 1e-3),
    "rslora": PlanMethod(PeftMethod.LORA, 1e-3, {"use_rslora": True}),
    "dora": PlanMethod(PeftMethod.LORA, 1e-3, {"use_dora": True}),
    "ia3": PlanMethod(PeftMethod.IA3, 2e-2),
    "prefix": PlanMethod(PeftMethod.PREFIX_TUNING, 2e-2),
    "prompt": PlanMethod(PeftMethod.PROMPT_TUNING, 2e-2),
    "ptuning": PlanMethod(PeftMethod.P_TUNING, 2e-3),
}
_METHOD_FIELDS = ("peft_method", "rank", "alpha", "targets", "virtual_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Hyperparameters of a request, each within its bounds. None: "auto"."""

    n_epochs: float | None = None
    n_steps: int | None = None
    """Replaces n_epochs."""
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    learning_rate: float | None = None
    learning_rate_multiplier: float | None = None
    """Of the method's default rate."""
    scheduler: str | None = None
    warmup: float | None = None
    """Steps; below 1, a fraction of all steps."""
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    peft_method: str | None = None
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | str | None = None
    virtual_tokens: int | None = None
    adapter: dict[str, Any] | None = None
    """A PEFT config; replaces the five fields above."""
    max_length: int | None = None
    truncate: bool | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    serve_checkpoints: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """Resolved before the data is tokenized."""

    max_length: int
    truncate: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """JSON-serializable by `asdict`."""

    adapter: dict[str, Any]
    recipe: dict[str, Any]
    steps: int
    tokens: int
    """Tokens of the data on disk, validation included."""
    checkpoint_every: int
    evaluate_every: int | None
    serve_checkpoints: bool
    shown: dict[str, Any]
    """The resolved hyperparameters, for responses."""
    longest: int = 1
    """Tokens of the longest example, validation included."""


def resolve_length(params: Hyperparameters, max_tokens: int) -> LengthLimit:
    """The length limit of examples; virtual tokens count towards `max_tokens`. Raises `BadPlan`."""
    virtual = int(build_adapter_config(params).get("num_virtual_tokens") or 0)
    if virtual >= max_tokens:
        name = "virtual_tokens" if params.adapter is None else "adapter"
        raise BadPlan(f"{virtual} virtual tokens leave none for examples: at most {max_tokens} allowed in total", name)
    max_length = params.max_length or min(_DEFAULT_LENGTH, max_tokens - virtual)
    if max_length > max_tokens - virtual:
        extra = f" with {virtual} virtual tokens" if virtual else ""
        raise BadPlan(f"max_length is {max_length}, at most {max_tokens - virtual} tokens allowed{extra}", "max_length")
    return LengthLimit(max_length=max_length, truncate=params.truncate is not False)


def check_hyperparameters(params: Hyperparameters) -> None:
    """Check everything that does not depend on the data. Raises `BadPlan`, `BadAdapter` or `UnsupportedAdapter`."""
    if params.learning_rate is not None and params.learning_rate_multiplier is not None:
        raise BadPlan("give learning_rate or learning_rate_multiplier, not both", "learning_rate")
    if params.n_epochs is not None and params.n_steps is not None:
        raise BadPlan("give n_epochs or n_steps, not both", "n_steps")
    adapter = build_adapter_config(params)
    # PEFT takes missing targets from the model; placeholders let the rest be parsed without it.
    has_targets = adapter["peft_type"] in (PeftMethod.LORA, PeftMethod.IA3)
    defaults: dict[str, Any] = {"target_modules": ["x"], "feedforward_modules": []} if has_targets else {}
    parse_config({**defaults, **{key: value for key, value in adapter.items() if value is not None}}, FileLimits())


def build_adapter_config(params: Hyperparameters) -> dict[str, Any]:
    """The requested PEFT config. Raises `BadPlan`, `BadAdapter` or `UnsupportedAdapter`."""
    if params.adapter is not None:
        for name in _METHOD_FIELDS:
            if getattr(params, name) is not None:
                raise BadPlan(f"adapter replaces {name}: leave {name} out", name)
        kind = params.adapter.get("peft_type")
        if not isinstance(kind, str):
            raise BadAdapter(f"{CONFIG}: peft_type is missing; expected one of {', '.join(PeftMethod)}")
        if kind not in PeftMethod.__members__:
            raise UnsupportedAdapter(f"{CONFIG}: unsupported peft_type {kind!r:.40}: expected one of {', '.join(PeftMethod)}")
        return {**params.adapter, "task_type": "CAUSAL_LM"}
    name = params.peft_method or "lora"
    method = METHODS.get(name)
    if method is None:
        raise BadPlan(f"unsupported method {name!r:.40}: expected one of {', '.join(METHODS)}", "peft_method")
    unsupported = [] if method.is_low_rank else ["rank", "alpha"]
    unsupported.append("targets" if method.has_virtual_tokens else "virtual_tokens")
    for option in unsupported:
        if getattr(params, option) is not None:
            raise BadPlan(f"the method {name} has no {option}: leave it out", option)
    config: dict[str, Any] = {"peft_type": method.kind.value, "task_type": "CAUSAL_LM", **method.fixed}
    if method.is_low_rank:
        rank = params.rank or 8
        config |= {"r": rank, "lora_alpha": params.alpha or 2 * rank}
    elif method.has_virtual_tokens:
        config["num_virtual_tokens"] = params.virtual_tokens or 16
    if params.targets is not None:
        config["target_modules"] = params.targets if isinstance(params.targets, str) else list(params.targets)
        if method.kind is PeftMethod.IA3:
            config["feedforward_modules"] = []  # PEFT requires both; all targets are scaled at their output
    return config


def build_plan(
    params: Hyperparameters,
    *,
    length: LengthLimit,
    examples: int,
    tokens: int,
    validates: bool,
    seed: int,
    max_steps: int,
    longest: int = 1,
) -> TrainingPlan:
    """Raises `BadPlan`."""
    adapter = build_adapter_config(params)
    batch_size = params.batch_size or max(1, min(8, examples // 16))
    accumulation = params.gradient_accumulation or 1
    epochs = params.n_epochs or 3
    steps = params.n_steps or math.ceil(epochs * math.ceil(math.ceil(examples / batch_size) / accumulation))
    if steps > max_steps:
        name, fix = ("n_epochs", "use fewer epochs or larger batches") if params.n_steps is None else ("n_steps", "use fewer")
        raise BadPlan(f"{steps} steps requested, at most {max_steps} allowed: {fix}", name)
    if params.evaluate_every is not None and not validates:
        raise BadPlan("there is no validation_file: give one, or leave evaluate_every out", "evaluate_every")
    warmup = params.warmup or 0
    if warmup > steps or (warmup > 1 and warmup != int(warmup)):
        expected = f"expected a fraction below 1, or a whole number of steps up to {steps}"
        raise BadPlan(f"warmup is {warmup:g}: {expected}", "warmup")
    default_rate = _default_rate(params, adapter)
    rate = params.learning_rate or default_rate * (params.learning_rate_multiplier or 1.0)
    if not rate > 0:
        raise BadPlan("the learning rate rounds to 0: raise it", "learning_rate_multiplier")
    recipe = {
        "seed": seed % (1 << 31),
        "num_train_epochs": float(epochs),
        "max_steps": params.n_steps or -1,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": rate,
        "lr_scheduler_type": params.scheduler or "linear",
        "warmup_steps": warmup,
        "max_grad_norm": params.max_grad_norm or 1.0,
        "weight_decay": params.weight_decay or 0.0,
    }
    every = params.checkpoint_every or min(_MAX_AUTO_INTERVAL, max(1, math.ceil(steps / 10)))
    intervals: dict[str, Any] = {
        "checkpoint_every": every,
        "evaluate_every": (params.evaluate_every or every) if validates else None,
        "serve_checkpoints": params.serve_checkpoints is True,
    }
    shown = {
        "n_epochs": params.n_epochs or (round(steps * batch_size * accumulation / examples, 3) if params.n_steps else epochs),
        "batch_size": batch_size,
        "learning_rate_multiplier": params.learning_rate_multiplier or rate / default_rate,
        "n_steps": steps,
        "learning_rate": rate,
        "gradient_accumulation": accumulation,
        "scheduler": recipe["lr_scheduler_type"],
        "warmup": warmup,
        "weight_decay": recipe["weight_decay"],
        "max_grad_norm": recipe["max_grad_norm"],
        **asdict(length),
        **intervals,
        "adapter": adapter,
    }
    return TrainingPlan(adapter=adapter, recipe=recipe, steps=steps, tokens=tokens, shown=shown, longest=longest, **intervals)


def _default_rate(params: Hyperparameters, adapter: dict[str, Any]) -> float:
    if params.adapter is None:
        return METHODS[params.peft_method or "lora"].lr
    return next(method.lr for method in METHODS.values() if method.kind == adapter["peft_type"])
