"""Training over several shards gives the losses, gradients and adapters of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM

from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.sharding.sharded_model import ShardedPackedModel
from symbiosis.finetuning.sharding.worker import TrainingWorker
from symbiosis.finetuning.trainer import Trainer
from tests.conftest import tiny_config
from tests.distributed.ranks import sharded
from tests.finetuning.packed.test_model import ALL, BY_NAME, METHODS
from tests.finetuning.peft_reference import examples, max_relative_error, slice_of

MORE = {
    "dropout": LoraConfig(r=3, target_modules=ALL, lora_dropout=0.5, init_lora_weights=False, task_type="CAUSAL_LM"),
    "DoRA with dropout": LoraConfig(
        r=3, target_modules=ALL, use_dora=True, lora_dropout=0.2, init_lora_weights=False, task_type="CAUSAL_LM"
    ),
}


@pytest.fixture(scope="module")
def plain():
    """With biases: a layer whose inputs are divided adds its bias once."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny_config(num_key_value_heads=4, attention_bias=True, mlp_bias=True)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def handlers(part):
    return TrainingWorker(part).handlers


def assert_same_result(found, expected):
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.is_finite == expected.is_finite
    assert max_relative_error(dict(found.gradients), dict(expected.gradients)) < 5e-5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_method_in_one_batch(plain, size):
    methods = METHODS | MORE
    data = {name: examples(5 + at, 9, 2 + at) for at, name in enumerate(methods)}
    whole = AdapterFactory(plain)
    expected = PackedModel(plain).compute([slice_of(whole.create(config, seed=7), data[n]) for n, config in methods.items()])
    with sharded(plain, size, handlers) as (first, _):
        packed = ShardedPackedModel(first)
        factory = AdapterFactory(first.parallel.skeleton(), flat=False, complete=packed.compute_magnitudes)
        slices = [slice_of(factory.create(config, seed=7), data[name]) for name, config in methods.items()]
        for _ in range(2):  # a pass can be repeated
            for name, one, other in zip(methods, packed.compute(slices), expected, strict=True):
                try:
                    assert_same_result(one, other)
                except AssertionError as error:
                    raise AssertionError(name) from error


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen2", "qwen3", "phi3", "mixtral", "gpt_neox"])
def test_architectures(name):
    architecture = BY_NAME[name]
    model = architecture.model()
    config = LoraConfig(r=3, target_modules=list(architecture.targets), init_lora_weights=False, task_type="CAUSAL_LM")
    data = examples(7, 12, vocabulary=90)
    (expected,) = PackedModel(model).compute([slice_of(AdapterFactory(model).create(config, seed=7), data)])
    with sharded(model, 2, handlers) as (first, _):
        packed = ShardedPackedModel(first)
        (found,) = packed.compute(
            [slice_of(AdapterFactory(first.parallel.skeleton(), flat=False).create(config, seed=7), data)]
        )
    assert_same_result(found, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_sessions_train_the_adapters_of_one_device(plain, size):
    configs = {name: METHODS[name] for name in ("LoRA", "DoRA", "prefix tuning")}
    data = {name: examples(5 + at, 9, 2 + at) for at, name in enumerate(configs)}

    def train(model):
        with Trainer(model, TrainerConfig(max_rows=64)) as trainer:
            sessions = {name: trainer.open(name, config, seed=7) for name, config in configs.items()}
            for _ in range(3):
                calls = [session.forward_backward(data[name]) for name, session in sessions.items()]
                losses = [call.result(60).loss for call in calls]
                for step in [session.optim_step(StepSettings(learning_rate=1e-2)) for session in sessions.values()]:
                    step.result(60)
            return losses, {name: copy.deepcopy(session.adapter.snapshot().tensors) for name, session in sessions.items()}

    losses_0, expected = train(copy.deepcopy(plain))
    with sharded(plain, size, handlers) as (first, _):
        losses, found = train(first)
    assert losses == pytest.approx(losses_0, rel=1e-4)
    for name, tensors in expected.items():
        for key, tensor in tensors.items():
            # Adam amplifies the rounding of gradients near zero: single numbers may differ
            assert (found[name][key] - tensor).norm() < 5e-3 * tensor.norm(), (name, key)
