"""Fine-tuning in the client process: JSONL in, a plain PEFT adapter folder out.

The loop is plain PyTorch over any model, connected or not.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor

from symbiosis.errors import BadData, SymbiosisError
from symbiosis.jobs import jsonl
from symbiosis.jobs.errors import BadTrainingFile
from symbiosis.jobs.jsonl import JsonlSample, LineKind
from symbiosis.jobs.tokenized_dataset import IGNORED, TokenizedExample, tokenize_samples

_CLIP_NORM = 1.0
_MAX_EPOCHS = 1000
_MAX_EXAMPLES = 1_000_000


class BadSettings(SymbiosisError):
    """Settings that contradict each other, the method or the model."""

    code = "bad_settings"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMethod:
    """A PEFT method: its config class, fixed settings, and which options it has."""

    config: Callable[..., PeftConfig]
    lr: float
    fixed: dict[str, Any] = field(default_factory=dict)
    rank: str | None = None
    """The config's name for the rank; None if the method has none."""
    alpha: str | None = None
    takes_targets: bool = True
    takes_virtual_tokens: bool = False


def _prompting(config: Callable[..., PeftConfig], lr: float) -> LocalMethod:
    return LocalMethod(config=config, lr=lr, takes_targets=False, takes_virtual_tokens=True)


METHODS: dict[str, LocalMethod] = {
    "lora": LocalMethod(config=LoraConfig, lr=1e-3, rank="r", alpha="lora_alpha"),
    "rslora": LocalMethod(config=LoraConfig, lr=1e-3, rank="r", alpha="lora_alpha", fixed={"use_rslora": True}),
    "dora": LocalMethod(config=LoraConfig, lr=1e-3, rank="r", alpha="lora_alpha", fixed={"use_dora": True}),
    "loha": LocalMethod(config=LoHaConfig, lr=2e-3, rank="r", alpha="alpha"),
    "lokr": LocalMethod(config=LoKrConfig, lr=2e-3, rank="r", alpha="alpha"),
    "vera": LocalMethod(config=VeraConfig, lr=1e-2, rank="r"),
    "oft": LocalMethod(config=OFTConfig, lr=1e-3, rank="r", fixed={"oft_block_size": 0}),
    "ia3": LocalMethod(config=IA3Config, lr=2e-2),
    "prefix": _prompting(PrefixTuningConfig, 2e-2),
    "prompt": _prompting(PromptTuningConfig, 2e-2),
    "ptuning": _prompting(PromptEncoderConfig, 2e-3),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """Settings of a run. None: the default of the method."""

    method: str = "lora"
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    """Names of the layers that get an adapter, or ("all-linear",). None: PEFT's choice for the model."""
    virtual_tokens: int | None = None
    """Length of the prefix or prompt, for the methods that have one."""
    lr: float | None = None
    """Falls linearly to 0 over the run."""
    epochs: float | None = None
    steps: int | None = None
    """Either epochs or steps; with neither, three epochs."""
    batch_size: int = 4
    max_length: int = 512
    """Longer examples are truncated."""
    seed: int = 0

    def __post_init__(self) -> None:
        method = METHODS.get(self.method)
        if method is None:
            raise BadSettings(f"unknown method {self.method!r}: expected one of {', '.join(METHODS)}")
        takes = {
            "rank": method.rank is not None,
            "alpha": method.alpha is not None,
            "targets": method.takes_targets,
            "virtual_tokens": method.takes_virtual_tokens,
        }
        for name, taken in takes.items():
            if getattr(self, name) is not None and not taken:
                raise BadSettings(f"the method {self.method} has no {name.replace('_', ' ')}: leave it out")
        if self.epochs is not None and self.steps is not None:
            raise BadSettings("give epochs or steps, not both")
        for name in ("rank", "virtual_tokens", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSettings(f"{name.replace('_', ' ')} is {value}: expected at least 1")
        if self.epochs is not None and not 0 < self.epochs <= _MAX_EPOCHS:
            raise BadSettings(f"epochs is {self.epochs:g}: expected a number above 0 and at most {_MAX_EPOCHS}")
        if self.max_length < 2:
            raise BadSettings(f"max length is {self.max_length}: expected at least 2 tokens")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise BadSettings(f"lr is {self.lr}: expected a positive number")

    def peft_config(self) -> PeftConfig:
        method = METHODS[self.method]
        options: dict[str, Any] = {"task_type": "CAUSAL_LM", **method.fixed}
        if method.rank is not None:
            options[method.rank] = self.rank or 8
        if method.alpha is not None:
            options[method.alpha] = self.alpha if self.alpha is not None else 2 * (self.rank or 8)
        if method.takes_virtual_tokens:
            options["num_virtual_tokens"] = self.virtual_tokens or 16
        if self.targets is not None:
            options["target_modules"] = self.targets[0] if self.targets == ("all-linear",) else list(self.targets)
            if self.method == "ia3":
                options["feedforward_modules"] = []  # PEFT requires both or neither; all targets are scaled at their output
        return method.config(**options)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Measurements of one optimizer step."""

    number: int
    steps: int
    loss: float
    tokens: int
    """Tokens of this step, padding not counted."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Finetuned:
    """The trained model and the measurements of the run. The adapter is also saved in `folder`."""

    model: Any
    folder: Path
    losses: list[float]
    tokens: int
    seconds: float
    trained_parameters: int
    only_answers: bool
    """The loss counted the assistant's tokens only."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def read_samples(path: Path) -> list[JsonlSample]:
    """The examples of a JSONL file. Raises `BadData`, naming the line."""
    try:
        return jsonl.read_samples(path, field="training_file", max_examples=_MAX_EXAMPLES)
    except OSError as error:
        raise BadData(f"cannot read {path}: {error.strerror}; expected a JSONL file in UTF-8") from None
    except BadTrainingFile as error:
        raise BadData(f"{path}, {error}") from None


def encode(samples: list[JsonlSample], tokenizer: Any, max_length: int) -> tuple[list[TokenizedExample], bool]:
    """Tokens and labels, and whether the labels are the assistant's tokens only. Raises `BadData`."""
    try:
        examples = tokenize_samples(
            samples, tokenizer, max_length=max_length, truncate=True, max_tokens=sys.maxsize, field="training_file"
        )
    except BadTrainingFile as error:
        raise BadData(str(error)) from None
    return examples, samples[0].kind is LineKind.CHAT and any(IGNORED in example.labels for example in examples)


def _batches(examples: list[TokenizedExample], config: FinetuneConfig) -> Iterator[list[TokenizedExample]]:
    """Endless shuffled epochs; the last batch of an epoch may be smaller."""
    random = torch.Generator().manual_seed(config.seed)
    while True:
        order = torch.randperm(len(examples), generator=random).tolist()
        for start in range(0, len(order), config.batch_size):
            yield [examples[index] for index in order[start : start + config.batch_size]]


def _collate(batch: list[TokenizedExample], pad: int, device: torch.device) -> dict[str, Tensor]:
    longest = max(len(example.ids) for example in batch)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for example in batch:
        missing = longest - len(example.ids)
        rows["input_ids"].append(example.ids + [pad] * missing)
        rows["attention_mask"].append([1] * len(example.ids) + [0] * missing)
        rows["labels"].append(example.labels + [IGNORED] * missing)
    return {name: torch.tensor(values, device=device) for name, values in rows.items()}


def finetune(
    model: Any,
    tokenizer: Any,
    samples: list[JsonlSample],
    out: Path,
    config: FinetuneConfig,
    on_step: Callable[[StepReport], None] = lambda step: None,
) -> Finetuned:
    """Train an adapter on `model` and write it to `out` with a `training.json`.

    The model is wrapped in place, as PEFT does. Raises `BadData` and
    `BadSettings` before the first step, so a run that starts has valid input.
    """
    _check_out(out)
    examples, only_answers = encode(samples, tokenizer, config.max_length)
    torch.manual_seed(config.seed)
    try:
        tuned = get_peft_model(model, config.peft_config())
    except (ValueError, TypeError, AttributeError) as error:
        raise BadSettings(f"PEFT cannot put {config.method} on this model: {error}") from error
    trained = [p for p in tuned.parameters() if p.requires_grad]
    lr = config.lr or METHODS[config.method].lr
    steps = config.steps or math.ceil((config.epochs or 3) * math.ceil(len(examples) / config.batch_size))
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    batches, losses, tokens = _batches(examples, config), list[float](), 0
    tuned.train()
    started = time.perf_counter()
    for number in range(1, steps + 1):
        step_started, batch = time.perf_counter(), next(batches)
        loss = tuned(**_collate(batch, pad, tuned.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, _CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        seen = sum(len(example.ids) for example in batch)
        tokens += seen
        on_step(StepReport(number, steps, losses[-1], seen, time.perf_counter() - step_started))
    seconds = time.perf_counter() - started
    tuned.train(False)
    # only adapters were trained: this avoids PEFT's request to the hub for the vocabulary size
    tuned.save_pretrained(str(out), save_embedding_layers=False)
    result = Finetuned(tuned, out, losses, tokens, seconds, sum(p.numel() for p in trained), only_answers)
    _write_training(result, config, lr=lr)
    return result


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSettings(f"cannot write to {out}: {error.strerror}; choose another folder") from None


def _write_training(result: Finetuned, config: FinetuneConfig, *, lr: float) -> None:
    report = {
        "settings": {**asdict(config), "lr": lr},
        "losses": [round(loss, 6) for loss in result.losses],
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
        "tokens_per_s": round(result.tokens_per_s, 2),
        "trained_parameters": result.trained_parameters,
        "loss_on": "the assistant's tokens" if result.only_answers else "all tokens",
    }
    (result.folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
