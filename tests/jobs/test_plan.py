"""Hyperparameters: how "auto" is resolved, and what is rejected."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from symbiosis.cli.local_finetune import METHODS as LOCAL
from symbiosis.errors import BadAdapter, SymbiosisError, UnsupportedAdapter
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.jobs import plan
from symbiosis.jobs.errors import BadPlan
from symbiosis.jobs.plan import METHODS, Hyperparameters


def build(examples: int = 20, validates: bool = False, **options):
    params = Hyperparameters(**options)
    data = {"examples": examples, "tokens": 9, "validates": validates}
    return plan.build_plan(params, length=plan.resolve_length(params, 4096), **data, seed=7, max_steps=1000)


@pytest.mark.parametrize(
    "options",
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
def test_the_number_of_steps_equals_the_recipes(examples, options):
    found = build(examples, **options)
    assert Recipe(**found.recipe).total_steps(examples) == found.steps


def test_learning_rates_equal_those_of_finetune():
    for name, method in METHODS.items():
        assert method.lr == LOCAL[name].lr
        assert build(peft_method=name).recipe["learning_rate"] == method.lr
    assert build(learning_rate_multiplier=0.5).recipe["learning_rate"] == 5e-4
    assert build(learning_rate=3e-4).shown["learning_rate_multiplier"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_builds_a_config_that_peft_accepts(name):
    plan.check_hyperparameters(Hyperparameters(peft_method=name))
    config = plan.build_adapter_config(Hyperparameters(peft_method=name))
    LOCAL[name].config(**{key: value for key, value in config.items() if key != "peft_type"})


def test_a_plan_is_json_with_resolved_hyperparameters():
    found = build(validates=True, rank=4, targets=("q_proj",))
    assert found.adapter == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    assert (found.checkpoint_every, found.evaluate_every) == (6, 6)
    assert found.shown["n_epochs"] == 3
    assert plan.TrainingPlan(**asdict(found)) == found
    assert Hyperparameters(**asdict(Hyperparameters(rank=3))) == Hyperparameters(rank=3)


def test_resolved_hyperparameters_are_shown():
    asked = {"max_length": 100, "truncate": False, "checkpoint_every": 5, "evaluate_every": 3, "serve_checkpoints": True}
    assert asked.items() <= build(validates=True, **asked).shown.items()
    defaults = {"max_length": 2048, "truncate": True, "evaluate_every": None, "serve_checkpoints": False}
    assert defaults.items() <= build().shown.items()


BAD = {
    "two rates": (BadPlan, {"learning_rate": 1e-3, "learning_rate_multiplier": 2.0}),
    "epochs and steps": (BadPlan, {"n_epochs": 1, "n_steps": 2}),
    "unknown method": (BadPlan, {"peft_method": "magic"}),
    "rank of IA3": (BadPlan, {"peft_method": "ia3", "rank": 3}),
    "targets of a prompt": (BadPlan, {"peft_method": "prompt", "targets": ("q",)}),
    "tokens of LoRA": (BadPlan, {"virtual_tokens": 3}),
    "adapter and rank": (BadPlan, {"adapter": {"peft_type": "LORA"}, "rank": 3}),
    "no peft_type": (BadAdapter, {"adapter": {"r": 8}}),
    "peft_type is a number": (BadAdapter, {"adapter": {"peft_type": 3}}),
    "unknown peft_type": (UnsupportedAdapter, {"adapter": {"peft_type": "OFT"}}),
    "rank 0": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": 0}}),
    "rank 10,000": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": 10_000}}),
    "rank is text": (BadAdapter, {"adapter": {"peft_type": "LORA", "r": "8"}}),
    "alpha is NaN": (BadAdapter, {"adapter": {"peft_type": "LORA", "lora_alpha": float("nan")}}),
    "PiSSA": (UnsupportedAdapter, {"adapter": {"peft_type": "LORA", "init_lora_weights": "pissa"}}),
    "unknown key": (UnsupportedAdapter, {"adapter": {"peft_type": "LORA", "nonsense": 1}}),
    "too many tokens": (BadAdapter, {"adapter": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 1 << 20}}),
}


@pytest.mark.parametrize("kind", BAD)
def test_contradictions_are_rejected(kind):
    error, options = BAD[kind]
    with pytest.raises(error) as caught:
        plan.check_hyperparameters(Hyperparameters(**options))
    assert isinstance(caught.value, SymbiosisError)


def test_step_and_length_limits_are_enforced():
    with pytest.raises(BadPlan, match="1001 steps"):
        build(n_steps=1001)
    with pytest.raises(BadPlan, match="3000 steps"):
        build(examples=1000, batch_size=1)
    with pytest.raises(BadPlan, match="at most 100 tokens allowed"):
        plan.resolve_length(Hyperparameters(max_length=101), 100)
    assert plan.resolve_length(Hyperparameters(), 100).max_length == 100
    assert plan.resolve_length(Hyperparameters(peft_method="prefix"), 100).max_length == 84
    with pytest.raises(BadPlan, match="at most 84 tokens allowed with 16 virtual tokens"):
        plan.resolve_length(Hyperparameters(peft_method="prompt", max_length=90), 100)
    with pytest.raises(BadPlan, match="100 virtual tokens leave none"):
        plan.resolve_length(Hyperparameters(adapter={"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 100}), 100)
    assert plan.resolve_length(Hyperparameters(truncate=False), 10_000) == plan.LengthLimit(max_length=2048, truncate=False)


def test_too_many_steps_name_the_field_of_the_request():
    with pytest.raises(BadPlan, match="use fewer") as caught:
        build(n_steps=1001)
    assert caught.value.field == "hyperparameters.n_steps"
    with pytest.raises(BadPlan, match="fewer epochs") as caught:
        build(n_epochs=1000.0, batch_size=1)
    assert caught.value.field == "hyperparameters.n_epochs"


def test_evaluate_every_needs_a_validation_file():
    with pytest.raises(BadPlan, match="no validation_file") as caught:
        build(evaluate_every=3)
    assert caught.value.field == "hyperparameters.evaluate_every"


@pytest.mark.parametrize("warmup", [11, 1000000, 1.5])
def test_an_invalid_warmup_is_rejected(warmup):
    with pytest.raises(BadPlan, match="whole number of steps") as caught:
        build(n_steps=10, warmup=warmup)
    assert caught.value.field == "hyperparameters.warmup"


@pytest.mark.parametrize("warmup", [0, 0.5, 1, 10])
def test_a_valid_warmup_is_accepted(warmup):
    assert build(n_steps=10, warmup=warmup).recipe["warmup_steps"] == warmup
