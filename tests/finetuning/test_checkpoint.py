"""Saved sessions resume exactly; invalid files change nothing."""

from __future__ import annotations

import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from symbiosis.errors import (
    BadAdapter,
    BadCall,
    Diverged,
    OutOfRange,
    UnsupportedAdapter,
)
from symbiosis.finetuning.checkpoint import STATE
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.optimizer import Optimizer
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.concurrent_runs import all_equal, values
from tests.finetuning.conftest import STEP
from tests.finetuning.peft_reference import examples
from tests.finetuning.trainer_reference import base
from tests.lora import lora

CONFIGS = {
    "LoRA": lora(init_lora_weights=False, lora_bias=True),
    "DoRA": lora(use_dora=True, init_lora_weights=False),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM"),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoder": peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_session_resumes_from_another_ones_checkpoint(name, trainer, tmp_path):
    first, data = trainer.open("ann", CONFIGS[name], seed=7), examples(5, 8)
    first.forward_backward(data)
    first.optim_step(STEP)
    first.save(tmp_path / "it", optimizer=True).result(60)
    other = trainer.open("ann", CONFIGS[name], seed=8)
    other.load(tmp_path / "it").result(60)
    assert all_equal(values(other), values(first))
    for session in (first, other):
        session.forward_backward(data)
        assert session.optim_step(STEP).result(60).number == 2
    assert all_equal(values(other), values(first))


def test_an_adapter_without_optimizer_state_starts_at_step_0(trainer, tmp_path):
    first = trainer.open("ann", CONFIGS["LoRA"], seed=7)
    first.forward_backward(examples(5))
    first.optim_step(STEP)
    first.save(tmp_path / "plain").result(60)
    assert sorted(file.name for file in (tmp_path / "plain").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    other = trainer.open("bob", CONFIGS["LoRA"], seed=8)
    other.load(tmp_path / "plain").result(60)
    assert all_equal(values(other), values(first))
    assert other.progress.steps == 0


def test_restored_moments_have_the_parameters_dtype():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    first, again = Optimizer({"p": parameter}), Optimizer({"p": parameter})
    first.accumulate({"p": torch.ones_like(parameter)})
    first.step(STEP)
    again.restore(first.state())
    assert {name: each.dtype for name, each in again.state().items()} == {name: e.dtype for name, e in first.state().items()}


def test_an_adapter_with_infinite_parameters_is_not_saved(trainer, tmp_path):
    session = trainer.open("ann", lora())
    with torch.no_grad():
        next(iter(session.adapter.parameters.values())).fill_(float("inf"))
    with pytest.raises(Diverged):
        session.save(tmp_path / "it").result(60)
    assert not list(tmp_path.iterdir())


def test_mismatched_files_change_nothing(trainer, tmp_path):
    session = trainer.open("ann", CONFIGS["LoRA"], seed=7)
    session.forward_backward(examples(5))
    with pytest.raises(BadCall, match="optim_step"):
        session.save(tmp_path / "early", optimizer=True).result(60)
    session.optim_step(STEP)
    session.save(tmp_path / "it", optimizer=True).result(60)
    with pytest.raises(OutOfRange, match="not empty"):
        session.save(tmp_path / "it").result(60)
    for config in (
        lora(r=5, lora_bias=True),
        lora(lora_alpha=3, lora_bias=True),
        lora(target_modules=["o_proj"]),
        CONFIGS["DoRA"],
    ):
        other = trainer.open("bob", config, seed=8)
        before = values(other)
        with pytest.raises((BadAdapter, UnsupportedAdapter)):
            other.load(tmp_path / "it").result(60)
        assert all_equal(values(other), before)
        other.forward_backward(examples(5)).result(60)
        other.close()
    state = tmp_path / "it" / "training_state.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(BadAdapter, match="training_state"):
        session.load(tmp_path / "it").result(60)
    with pytest.raises(BadAdapter):
        session.load(tmp_path / "nowhere").result(60)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_file_call_runs_once_even_if_it_is_resolved_late(trainer, tmp_path, monkeypatch):
    session, other, finish_call, written = (
        trainer.open("ann", lora()),
        trainer.open("bob", lora()),
        trainer._background._finish_call,
        [],
    )

    def finish_late(called_session, call, result):
        if called_session is session:
            written.append(call)
            for _ in range(3):  # the pass loop runs meanwhile
                other.forward_backward(examples(5)).result(60)
        finish_call(called_session, call, result)

    monkeypatch.setattr(trainer._background, "_finish_call", finish_late)
    saved = session.save(tmp_path / "it")
    loaded = session.load(tmp_path / "it")
    assert saved.result(60) is None
    assert loaded.result(60) is None
    assert len(written) == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a session after one step."""
    folder = tmp_path_factory.mktemp("saved")
    with Trainer(base(), TrainerConfig(max_rows=32)) as trainer:
        session = trainer.open("ann", CONFIGS["encoder"], seed=7)
        session.forward_backward(examples(5))
        session.optim_step(STEP)
        session.save(folder / "it", optimizer=True).result(60)
    return folder / "it"


def without(ending):
    def drop(state, _):
        del state[next(name for name in state if name.endswith(ending))]

    return drop


def changed(ending, change):
    def change_tensor(state, _):
        name = next(name for name in state if name.endswith(ending))
        state[name] = change(state[name])

    return change_tensor


@pytest.mark.parametrize(
    "corrupt",
    [
        without("/exp_avg"),
        without("/exp_avg_sq"),
        without("/step"),
        without("/value"),
        changed("/step", lambda step: -step),
        changed("/exp_avg_sq", lambda moment: moment - 1),
        changed("/exp_avg", lambda moment: moment.long()),
        changed("/exp_avg", lambda moment: moment * float("nan")),
        changed("/value", lambda value: value[:1]),
        lambda _, metadata: metadata.update(steps="-1"),
        lambda _, metadata: metadata.update(batches="many"),
        lambda state, _: state.update(large=torch.zeros(1 << 20)),
    ],
)
def test_an_invalid_training_state_changes_nothing(corrupt, trainer, saved, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(saved, folder)
    state, metadata = load_file(folder / STATE), {"steps": "1", "batches": "1"}
    corrupt(state, metadata)
    save_file(state, folder / STATE, metadata=metadata)
    session = trainer.open("ann", CONFIGS["encoder"], seed=8)
    before = values(session)
    with pytest.raises(BadAdapter, match="training_state"):
        session.load(folder).result(60)
    assert all_equal(values(session), before)
    assert not session.optimizer.state()


def test_a_training_state_that_is_a_link_is_rejected(trainer, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "it")
    (tmp_path / "it" / STATE).unlink()
    (tmp_path / "it" / STATE).symlink_to(saved / STATE)
    with pytest.raises(BadAdapter, match="plain file"):
        trainer.open("ann", CONFIGS["encoder"], seed=8).load(tmp_path / "it").result(60)
