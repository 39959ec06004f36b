"""What a job will do: the caller's hyper-parameters with every "auto" decided, as the engine takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from symbiosis.adapters.config import PeftMethod, parse_config
from symbiosis.adapters.files import CONFIG, FileLimits
from symbiosis.errors import BadAdapter, UnsupportedAdapter
from symbiosis.jobs.errors import BadPlan

_USUAL_LENGTH = 2048
_OFTEN = 100
"""Most steps between two checkpoints, unless asked for."""


@dataclass(frozen=True, slots=True)
class PlanMethod:
    """A PEFT method by a short name."""

    kind: PeftMethod
    lr: float
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        return self.kind is PeftMethod.LORA

    @property
    def is_virtual(self) -> bool:
        return not self.is_low_rank and self.kind is not PeftMethod.IA3


# the learning rates are those of `symbiosis finetune`
METHODS = {
    "lora": PlanMethod(PeftMethod.LORA, 1e-3),
    "rslora": PlanMethod(PeftMethod.LORA, 1e-3, {"use_rslora": True}),
    "dora": PlanMethod(PeftMethod.LORA, 1e-3, {"use_dora": True}),
    "ia3": PlanMethod(PeftMethod.IA3, 2e-2),
    "prefix": PlanMethod(PeftMethod.PREFIX_TUNING, 2e-2),
    "prompt": PlanMethod(PeftMethod.PROMPT_TUNING, 2e-2),
    "ptuning": PlanMethod(PeftMethod.P_TUNING, 2e-3),
}
_OF_CHOICE = ("peft_method", "rank", "alpha", "targets", "virtual_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Hyper-parameters as they were asked for, within their bounds. None: "auto"."""

    n_epochs: float | None = None
    n_steps: int | None = None
    """In place of epochs."""
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    learning_rate: float | None = None
    learning_rate_multiplier: float | None = None
    """Of the method's usual rate."""
    scheduler: str | None = None
    warmup: float | None = None
    """Steps; below 1, the share of all."""
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    peft_method: str | None = None
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | str | None = None
    virtual_tokens: int | None = None
    adapter: dict[str, Any] | None = None
    """A PEFT config, in place of the five before."""
    max_length: int | None = None
    truncate: bool | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    serve_checkpoints: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """What has to be known before the data is read."""

    max_length: int
    truncate: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """All of it can be said in JSON."""

    adapter: dict[str, Any]
    recipe: dict[str, Any]
    steps: int
    tokens: int
    """Of its data on the disk, validation included."""
    checkpoint_every: int
    evaluate_every: int | None
    serve_checkpoints: bool
    shown: dict[str, Any]
    """The hyper-parameters as decided."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def length(wishes: Hyperparameters, longest: int) -> Length:
    """What of the `longest` an example may have itself. The wishes were checked. Raises `BadPlan`."""
    virtual = int(adapter_of(wishes).get("num_virtual_tokens") or 0)
    if virtual >= longest:
        raise BadPlan(
            f"{virtual} virtual tokens leave none for examples: training takes {longest} tokens at most, these included",
            field="hyperparameters.virtual_tokens" if wishes.adapter is None else "hyperparameters.adapter",
        )
    most = wishes.max_length or min(_USUAL_LENGTH, longest - virtual)
    if most > longest - virtual:
        beside = f" beside {virtual} virtual ones" if virtual else ""
        raise BadPlan(
            f"max_length is {most}, training takes {longest - virtual} tokens{beside} at most",
            field="hyperparameters.max_length",
        )
    return Length(max_length=most, truncate=wishes.truncate is not False)


def check(wishes: Hyperparameters) -> None:
    """All that can be said without the data. Raises `BadPlan`, `BadAdapter` or `UnsupportedAdapter`."""
    if wishes.learning_rate is not None and wishes.learning_rate_multiplier is not None:
        raise BadPlan("give learning_rate or learning_rate_multiplier, not both", field="hyperparameters.learning_rate")
    if wishes.n_epochs is not None and wishes.n_steps is not None:
        raise BadPlan("give n_epochs or n_steps, not both", field="hyperparameters.n_steps")
    adapter = adapter_of(wishes)
    # what PEFT takes from the model if it is not said, so that everything else can be read
    has_targets = adapter["peft_type"] in (PeftMethod.LORA, PeftMethod.IA3)
    usual: dict[str, Any] = {"target_modules": ["x"], "feedforward_modules": []} if has_targets else {}
    given = {key: value for key, value in adapter.items() if value is not None}
    parse_config({**usual, **given}, FileLimits())


def adapter_of(wishes: Hyperparameters) -> dict[str, Any]:
    """The PEFT config that was asked for. Raises `BadPlan`, `BadAdapter` or `UnsupportedAdapter`."""
    if wishes.adapter is not None:
        for name in _OF_CHOICE:
            if getattr(wishes, name) is not None:
                raise BadPlan(f"adapter says it all: leave {name} out", field=f"hyperparameters.{name}")
        kind = wishes.adapter.get("peft_type")
        if not isinstance(kind, str):
            raise BadAdapter(f"{CONFIG}: there is no peft_type; expected one of {', '.join(PeftMethod)}")
        if kind not in PeftMethod.__members__:
            raise UnsupportedAdapter(f"{CONFIG}: peft_type {kind!r:.40} is not trained here; {', '.join(PeftMethod)} are")
        return {**wishes.adapter, "task_type": "CAUSAL_LM"}
    name = wishes.peft_method or "lora"
    method = METHODS.get(name)
    if method is None:
        raise BadPlan(
            f"{name!r:.40} is no method that is trained here: {', '.join(METHODS)} are", field="hyperparameters.peft_method"
        )
    takes = {"rank": method.is_low_rank, "alpha": method.is_low_rank, "virtual_tokens": method.is_virtual}
    takes["targets"] = not method.is_virtual
    for option, taken in takes.items():
        if getattr(wishes, option) is not None and not taken:
            raise BadPlan(f"the method {name} has no {option}: leave it out", field=f"hyperparameters.{option}")
    made: dict[str, Any] = {"peft_type": method.kind.value, "task_type": "CAUSAL_LM", **method.fixed}
    if method.is_low_rank:
        rank = 8 if wishes.rank is None else wishes.rank
        made |= {"r": rank, "lora_alpha": 2 * rank if wishes.alpha is None else wishes.alpha}
    elif method.is_virtual:
        made["num_virtual_tokens"] = wishes.virtual_tokens or 16
    if wishes.targets is not None:
        made["target_modules"] = wishes.targets if isinstance(wishes.targets, str) else list(wishes.targets)
        # PEFT wants both or none; all targets are scaled at their output
        made |= {"feedforward_modules": []} if method.kind is PeftMethod.IA3 else {}
    return made


def make(
    wishes: Hyperparameters, *, allowed: Length, examples: int, tokens: int, validates: bool, seed: int, max_steps: int
) -> TrainingPlan:
    """With the data known. Raises `BadPlan`."""
    adapter = adapter_of(wishes)
    batch = wishes.batch_size or max(1, min(8, examples // 16))
    together = wishes.gradient_accumulation or 1
    epochs = wishes.n_epochs or 3
    steps = wishes.n_steps or math.ceil(epochs * math.ceil(math.ceil(examples / batch) / together))
    if steps > max_steps:
        asked = "n_epochs" if wishes.n_steps is None else "n_steps"
        less = "fewer epochs, or larger batches" if wishes.n_steps is None else "ask for fewer"
        raise BadPlan(f"these would be {steps} steps, at most {max_steps} are done: {less}", field=f"hyperparameters.{asked}")
    if wishes.evaluate_every is not None and not validates:
        raise BadPlan(
            "evaluate_every says when to validate, and there is no validation_file: give one, or leave it out",
            field="hyperparameters.evaluate_every",
        )
    warmup = wishes.warmup or 0
    if warmup > steps or (warmup > 1 and warmup != int(warmup)):
        raise BadPlan(
            f"warmup is {warmup:g} of {steps} steps: expected a share below 1, or a whole number of steps up to that",
            field="hyperparameters.warmup",
        )
    rate = wishes.learning_rate or _usual_rate(wishes, adapter) * (wishes.learning_rate_multiplier or 1.0)
    if not rate > 0:
        raise BadPlan("the learning rate is so small that it is 0", field="hyperparameters.learning_rate_multiplier")
    recipe = {
        "seed": seed % (1 << 31),
        "num_train_epochs": float(epochs),
        "max_steps": wishes.n_steps or -1,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": together,
        "learning_rate": rate,
        "lr_scheduler_type": wishes.scheduler or "linear",
        "warmup_steps": wishes.warmup or 0,
        "max_grad_norm": 1.0 if wishes.max_grad_norm is None else wishes.max_grad_norm,
        "weight_decay": wishes.weight_decay or 0.0,
    }
    every = wishes.checkpoint_every or min(_OFTEN, max(1, math.ceil(steps / 10)))
    evaluate = (wishes.evaluate_every or every) if validates else None
    serves = wishes.serve_checkpoints is True
    return TrainingPlan(
        adapter=adapter,
        recipe=recipe,
        steps=steps,
        tokens=tokens,
        checkpoint_every=every,
        evaluate_every=evaluate,
        serve_checkpoints=serves,
        shown={
            "n_epochs": wishes.n_epochs or (round(steps * batch * together / examples, 3) if wishes.n_steps else epochs),
            "batch_size": batch,
            "learning_rate_multiplier": wishes.learning_rate_multiplier or rate / _usual_rate(wishes, adapter),
            "n_steps": steps,
            "learning_rate": rate,
            "gradient_accumulation": together,
            "scheduler": recipe["lr_scheduler_type"],
            "warmup": recipe["warmup_steps"],
            "weight_decay": recipe["weight_decay"],
            "max_grad_norm": recipe["max_grad_norm"],
            "max_length": allowed.max_length,
            "truncate": allowed.truncate,
            "checkpoint_every": every,
            "evaluate_every": evaluate,
            "serve_checkpoints": serves,
            "adapter": adapter,
        },
    )


def _usual_rate(wishes: Hyperparameters, adapter: dict[str, Any]) -> float:
    if wishes.adapter is None:
        return METHODS[wishes.peft_method or "lora"].lr
    return next(method.lr for method in METHODS.values() if method.kind == adapter["peft_type"])
