"""Data, adapters and recipes of eight tasks, and transformers' Trainer as the reference for each."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from peft import IA3Config, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.loop.recipe import Recipe
from tests.conftest import tiny_config
from tests.lora import ALL_LINEAR, lora

STEPS = 50


@cache
def base() -> LlamaForCausalLM:
    """Never trained. Its weights are larger than usual random ones, so that adapters have an effect."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.1, pad_token_id=0)).eval()
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Task:
    name: str
    adapter: PeftConfig
    recipe: dict[str, Any] = field(default_factory=dict)
    examples: int = 24

    def recipe_of(self, **changes: Any) -> Recipe:
        return Recipe(**{**self.settings(), **changes})

    def settings(self) -> dict[str, Any]:
        return {"seed": 7, "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, **self.recipe}

    def data(self) -> list[Example]:
        """Sequences of 2 to 14 tokens that follow a rule, each with a prompt that is not learned."""
        random = torch.Generator().manual_seed(sum(map(ord, self.name)))
        found = []
        for _ in range(self.examples):
            length, start, by = (int(torch.randint(*span, (), generator=random)) for span in ((2, 15), (1, 128), (1, 5)))
            ids = tuple((start + by * at) % 127 + 1 for at in range(length))
            hidden = int(torch.randint(0, min(3, length - 1) + 1, (), generator=random))
            found.append(Example(ids, (-100,) * hidden + ids[hidden:]))
        return found


TASKS = {
    task.name: task
    for task in [
        Task("rank 2", lora(r=2), {"lr_scheduler_type": "cosine", "warmup_steps": 5}),
        Task("rank 8", lora(r=8, lora_alpha=32, target_modules=ALL_LINEAR), {"gradient_accumulation_steps": 2, "seed": 11}),
        Task("rank 16", lora(r=16, use_rslora=True, target_modules="all-linear"), {"weight_decay": 0.1}, examples=7),
        Task("DoRA", lora(r=4, use_dora=True, target_modules=["q_proj", "o_proj", "down_proj"]), {"max_grad_norm": 0.3}),
        Task("IA3", IA3Config(task_type="CAUSAL_LM"), {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}),
        Task("prefix", PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"), {"learning_rate": 1e-2}),
        Task("prompt", PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), {"per_device_train_batch_size": 3}),
        Task(
            "patterns",
            lora(r=4, target_modules=r".*\.1\..*(k|up)_proj", rank_pattern={"up_proj": 3}, alpha_pattern={"k_proj": 5}),
            {"warmup_steps": 0.1, "lr_scheduler_type": "constant_with_warmup", "adam_beta2": 0.99},
        ),
    ]
}


class Rows(torch.utils.data.Dataset):
    def __init__(self, data: list[Example]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        example = self.data[number]
        return {"input_ids": torch.tensor(example.ids), "labels": torch.tensor(example.labels)}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])

    mask = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in rows]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


@dataclass(frozen=True)
class Reference:
    """Trainer's result of a task."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    rates: list[float]
    model: PeftModel


@cache
def reference_run(name: str) -> Reference:
    return run_trainer(copy.deepcopy(base()), TASKS[name])


def run_trainer(plain: LlamaForCausalLM, task: Task) -> Reference:
    """Trainer and PEFT, alone, on the task's data."""
    import tempfile

    settings = task.settings()
    set_seed(settings["seed"])
    model = get_peft_model(plain, copy.deepcopy(task.adapter))
    start = trainable(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, **settings, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
        )
        trainer = Trainer(model, arguments, train_dataset=Rows(task.data()), data_collator=padded)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    losses, norms, rates = ([float(entry[key]) for entry in logs] for key in ("loss", "grad_norm", "learning_rate"))
    return Reference(start, trainable(model), losses, norms, rates, model)


def trainable(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
