"""Adapters are created from untrusted configs."""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.ia3 import IA3Layer

from symbiosis.errors import BadAdapter, TooLarge, UnsupportedAdapter
from symbiosis.finetuning.adapters import adapter_factory
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from tests.finetuning.trainer_reference import base
from tests.lora import lora


@pytest.fixture(scope="module")
def factory():
    return AdapterFactory(base())


def test_a_config_may_be_plain_json(factory):
    created = factory.create({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, seed=1)
    assert set(created.parts) == {f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)}
    assert {part.scale for part in created.parts.values()} == {2.0}


def test_missing_config_fields_have_pefts_defaults(factory):
    found, plain = (factory.create(config, seed=1) for config in ({"peft_type": "LORA"}, LoraConfig(task_type="CAUSAL_LM")))
    assert set(found.parts) == set(plain.parts)
    for path, part in found.parts.items():
        assert part.scale == plain.parts[path].scale == 1.0
        assert torch.equal(part.a_rI, plain.parts[path].a_rI)


def test_missing_targets_are_pefts_defaults(factory):
    created = factory.create(LoraConfig(r=2, task_type="CAUSAL_LM"), seed=1)
    assert {path.rpartition(".")[2] for path in created.parts} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"target_modules": ["k_proj", "down_proj"]},
        {"target_modules": ["q_proj"]},
        {"feedforward_modules": []},
        {"target_modules": ["k_proj", "up_proj"], "feedforward_modules": ["up_proj"]},
    ],
)
def test_missing_ia3_modules_are_pefts_defaults(named, factory):
    config = IA3Config(**named, task_type="CAUSAL_LM")
    theirs = get_peft_model(copy.deepcopy(base()), copy.deepcopy(config)).named_modules()
    expected = {path: m.is_feedforward for path, m in theirs if isinstance(m, IA3Layer)}
    found = factory.create(config, seed=1).parts
    assert {f"base_model.model.{path}": part.of_input for path, part in found.items()} == expected


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (lora(init_lora_weights="pissa"), UnsupportedAdapter),
        (lora(init_lora_weights="eva"), UnsupportedAdapter),
        (lora(modules_to_save=["lm_head"]), UnsupportedAdapter),
        (lora(target_modules=["embed_tokens"]), UnsupportedAdapter),
        (lora(target_modules=["nothing"]), UnsupportedAdapter),
        (lora(trainable_token_indices=[3]), UnsupportedAdapter),
        (lora(bias="all"), UnsupportedAdapter),
        ({**lora().to_dict(), "r": 1 << 20}, BadAdapter),
        ({**lora().to_dict(), "lora_dropout": 1.5}, BadAdapter),
        ({**lora().to_dict(), "lora_dropout": "0.5"}, BadAdapter),
        ({**lora().to_dict(), "megatron_config": {"a": 1}, "megatron_core": "os"}, UnsupportedAdapter),
        ({**lora().to_dict(), "something_new": True}, UnsupportedAdapter),
        ({"peft_type": "LOHA", "r": 4}, UnsupportedAdapter),
        ({"r": 4}, BadAdapter),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 1 << 20}, BadAdapter),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "token_dim": 64}, UnsupportedAdapter),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "num_layers": 90_000}, UnsupportedAdapter),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4096, "token_dim": 1 << 20}, UnsupportedAdapter),
        ({"peft_type": "P_TUNING", "num_virtual_tokens": 3, "encoder_hidden_size": 1 << 30}, BadAdapter),
        ({"peft_type": "P_TUNING", "num_virtual_tokens": 3, "encoder_reparameterization_type": "LSTM"}, UnsupportedAdapter),
        (
            {
                "peft_type": "PROMPT_TUNING",
                "num_virtual_tokens": 3,
                "prompt_tuning_init": "TEXT",
                "prompt_tuning_init_text": "hello",
                "tokenizer_name_or_path": "http://somewhere",
            },
            UnsupportedAdapter,
        ),
    ],
    ids=lambda value: value.peft_type if isinstance(value, PeftConfig) else "",
)
def test_untrainable_configs_are_rejected(config, error, factory):
    with pytest.raises(error):
        factory.create(config, seed=1)


def test_exceptions_of_peft_become_typed_errors(factory, monkeypatch):
    def fail(*_):
        raise KeyError("something of its own")

    monkeypatch.setattr(adapter_factory, "get_peft_model", fail)
    with pytest.raises(UnsupportedAdapter, match="something of its own"):
        factory.create(lora(), seed=1)


def test_an_adapter_that_is_too_large_is_rejected_before_it_is_created():
    factory = AdapterFactory(base(), max_parameters=10_000)
    for config in (
        lora(r=64, target_modules="all-linear"),
        PrefixTuningConfig(num_virtual_tokens=90, task_type="CAUSAL_LM"),
        PrefixTuningConfig(num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=4096, task_type="CAUSAL_LM"),
    ):
        with pytest.raises(TooLarge):
            factory.create(config, seed=1)
    created = factory.create(lora(r=4), seed=1)
    assert sum(p.numel() for p in created.parameters.values()) <= 10_000


def test_a_slow_regular_expression_ends_in_time(factory):
    started = time.monotonic()
    for config in (lora(target_modules="(.*)*(.*)*(.*)*x"), lora(rank_pattern={"(.*)*(.*)*(.*)*x": 3})):
        with contextlib.suppress(BadAdapter, UnsupportedAdapter):
            factory.create(config, seed=1)
    assert time.monotonic() - started < 10
