"""Hyper-parameters: what "auto" comes to, and what is refused."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from symbiosis.cli.local_finetune import METHODS as LOCAL
from symbiosis.errors import BadAdapter, SymbiosisError, UnsupportedAdapter
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.jobs import plan
from symbiosis.jobs.errors import BadPlan
from symbiosis.jobs.plan import METHODS, Hyperparameters


def made(examples: int = 20, validates: bool = False, **wishes):
    asked = Hyperparameters(**wishes)
    data = {"examples": examples, "tokens": 9, "validates": validates}
    return plan.make(asked, allowed=plan.length(asked, 4096), **data, seed=7, max_steps=1000)


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"n_epochs": 0.5},
        {"n_epochs": 2.5, "batch_size": 3, "gradient_accumulation": 4},
        {"n_steps": 17},
        {"batch_size": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("examples", [1, 19, 20, 333])
def test_the_steps_are_those_of_the_recipe(examples, wishes):
    found = made(examples, **wishes)
    assert Recipe(**found.recipe).total_steps(examples) == found.steps


def test_learning_rates_are_those_of_finetune():
    for name, method in METHODS.items():
        assert method.lr == LOCAL[name].lr
        assert made(peft_method=name).recipe["learning_rate"] == method.lr
    assert made(learning_rate_multiplier=0.5).recipe["learning_rate"] == 5e-4
    assert made(learning_rate=3e-4).shown["learning_rate_multiplier"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_config_that_peft_and_we_read(name):
    plan.check(Hyperparameters(peft_method=name))
    LOCAL[name].config(
        **{key: value for key, value in plan.adapter_of(Hyperparameters(peft_method=name)).items() if key != "peft_type"}
    )


def test_a_plan_is_json_and_says_what_was_decided():
    found = made(validates=True, rank=4, targets=("q_proj",))
    assert found.adapter == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    assert (found.checkpoint_every, found.evaluate_every) == (6, 6)
    assert found.shown["n_epochs"] == 3
    assert plan.TrainingPlan(**found.to_json()) == found
    assert Hyperparameters(**asdict(Hyperparameters(rank=3))) == Hyperparameters(rank=3)


def test_all_that_was_asked_for_is_shown_as_it_was_decided():
    asked = {"max_length": 100, "truncate": False, "checkpoint_every": 5, "evaluate_every": 3, "serve_checkpoints": True}
    assert asked.items() <= made(validates=True, **asked).shown.items()
    usual = {"max_length": 2048, "truncate": True, "evaluate_every": None, "serve_checkpoints": False}
    assert usual.items() <= made().shown.items()


BAD = {
    "two rates": (BadPlan, {"learning_rate": 1e-3, "learning_rate_multiplier": 2.0}),
    "epochs and steps": (BadPlan, {"n_epochs": 1, "n_steps": 2}),
    "unknown method": (BadPlan, {"peft_method": "magic"}),
    "a rank that is none": (BadPlan, {"peft_method": "ia3", "rank": 3}),
    "targets of a prompt": (BadPlan, {"peft_method": "prompt", "targets": ("q",)}),
    "tokens of LoRA": (BadPlan, {"virtual_tokens": 3}),
    "adapter and rank": (BadPlan, {"adapter": {"peft_type": "LORA"}, "rank": 3}),
    "no peft_type": (BadAdapter, {"adapter": {"r": 8}}),
    "peft_type is a number": (BadAdapter, {"adapter": {"peft_type": 3}}),
    "unknown peft_type": (UnsupportedAdapter, {"adapter": {"peft_type": "OFT"}}),
    "rank 0": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": 0}}),
    "rank 10,000": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": 10_000}}),
    "rank is text": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": "8"}}),
    "alpha is none": (BadAdapter, {"adapter": {"peft_type": "LORA", "lora_alpha": float("nan")}}),
    "PiSSA": (UnsupportedAdapter, {"adapter": {"peft_type": "LORA", "init_lora_weights": "pissa"}}),
    "unknown key": (UnsupportedAdapter, {"adapter": {"peft_type": "LORA", "nonsense": 1}}),
    "too many tokens": (BadAdapter, {"adapter": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 1 << 20}}),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_contradicts_itself_is_refused(kind):
    error, wishes = BAD[kind]
    with pytest.raises(error) as caught:
        plan.check(Hyperparameters(**wishes))
    assert isinstance(caught.value, SymbiosisError)


def test_more_steps_than_are_done_and_longer_than_the_model():
    with pytest.raises(BadPlan, match="1001 steps"):
        made(n_steps=1001)
    with pytest.raises(BadPlan, match="3000 steps"):
        made(examples=1000, batch_size=1)
    with pytest.raises(BadPlan, match="takes 100 tokens"):
        plan.length(Hyperparameters(max_length=101), 100)
    assert plan.length(Hyperparameters(), 100).max_length == 100
    assert plan.length(Hyperparameters(peft_method="prefix"), 100).max_length == 84
    with pytest.raises(BadPlan, match="takes 84 tokens beside 16 virtual ones"):
        plan.length(Hyperparameters(peft_method="prompt", max_length=90), 100)
    with pytest.raises(BadPlan, match="100 virtual tokens leave none"):
        plan.length(Hyperparameters(adapter={"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 100}), 100)
    assert plan.length(Hyperparameters(truncate=False), 10_000) == plan.Length(max_length=2048, truncate=False)


def test_too_many_steps_are_told_as_they_were_asked_for():
    with pytest.raises(BadPlan, match="ask for fewer") as caught:
        made(n_steps=1001)
    assert caught.value.field == "hyperparameters.n_steps"
    with pytest.raises(BadPlan, match="fewer epochs") as caught:
        made(n_epochs=1000.0, batch_size=1)
    assert caught.value.field == "hyperparameters.n_epochs"


def test_when_to_validate_without_anything_to_validate_with_is_refused():
    with pytest.raises(BadPlan, match="no validation_file") as caught:
        made(evaluate_every=3)
    assert caught.value.field == "hyperparameters.evaluate_every"


@pytest.mark.parametrize("warmup", [11, 1000000, 1.5])
def test_a_warmup_that_never_ends_or_is_no_number_of_steps_is_refused(warmup):
    with pytest.raises(BadPlan, match="whole number of steps") as caught:
        made(n_steps=10, warmup=warmup)
    assert caught.value.field == "hyperparameters.warmup"


@pytest.mark.parametrize("warmup", [0, 0.5, 1, 10])
def test_other_warmups_are_taken(warmup):
    assert made(n_steps=10, warmup=warmup).recipe["warmup_steps"] == warmup
