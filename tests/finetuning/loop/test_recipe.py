"""Steps, order and learning rates are transformers'."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import TrainingArguments, get_scheduler

from symbiosis.errors import OutOfRange
from symbiosis.finetuning.loop.lr_schedule import LrSchedule
from symbiosis.finetuning.loop.recipe import Recipe


@pytest.mark.parametrize("schedule", LrSchedule)
@pytest.mark.parametrize("warmup", [0, 4, 0.15])
def test_learning_rates_are_those_of_transformers(schedule, warmup, tmp_path):
    recipe = Recipe(lr_scheduler_type=schedule, warmup_steps=warmup, learning_rate=3e-4, max_steps=21)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    steps = TrainingArguments(tmp_path, warmup_steps=warmup).get_warmup_steps(21)
    scheduler = get_scheduler(schedule.value, optimizer, num_warmup_steps=steps, num_training_steps=21)
    for step in range(21):
        assert recipe.step_settings(step, 21).learning_rate == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()


def test_the_order_of_examples_is_accelerates():
    recipe = Recipe(seed=9, per_device_train_batch_size=3, gradient_accumulation_steps=2, num_train_epochs=2)
    sampler = SeedableRandomSampler(range(11), data_seed=9)
    expected = [*sampler, *sampler]
    steps = list(recipe.steps(11))
    assert list(chain.from_iterable(chain.from_iterable(steps))) == expected
    assert [[len(batch) for batch in step] for step in steps] == [[3, 3], [3, 2]] * 2
    assert recipe.total_steps(11) == 4


def test_a_run_resumes_after_any_step():
    recipe = Recipe(max_steps=7, per_device_train_batch_size=2)
    steps = list(recipe.steps(5))
    assert len(steps) == 7
    for after in range(8):
        assert list(recipe.steps(5, after=after)) == steps[after:]


def test_part_of_an_epoch():
    recipe = Recipe(num_train_epochs=1.5, per_device_train_batch_size=2)
    assert recipe.total_steps(6) == 5
    assert len(list(recipe.steps(6))) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"per_device_train_batch_size": 0},
        {"gradient_accumulation_steps": 1.5},
        {"learning_rate": float("nan")},
        {"num_train_epochs": -1},
        {"lr_scheduler_type": "polynomial"},
        {"adam_beta1": 1.0},
        {"weight_decay": "0.1"},
    ],
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(OutOfRange) as caught:
        Recipe(**wrong)
    assert caught.value.field in wrong
