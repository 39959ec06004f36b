"""Jobs in shared passes train what transformers' Trainer trains alone."""

from __future__ import annotations

import copy
import itertools
import json
import threading

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import set_seed

from symbiosis.errors import Closed, Diverged, OutOfRange
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.loop.train_loop import run
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.concurrent_runs import all_equal, assert_equals_trainer, open_session, run_concurrently, values
from tests.finetuning.trainer_reference import STEPS, TASKS, Task, base, reference_run, run_trainer
from tests.lora import lora


@pytest.fixture(scope="module")
def trainer():
    with Trainer(base()) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def eight(trainer):
    """All eight jobs, trained at once."""
    before = trainer.stats
    found = run_concurrently(trainer, list(TASKS.values()))
    passes = trainer.stats.passes - before.passes
    assert (trainer.stats.sessions - before.sessions) / passes > 4, "passes were hardly shared"
    yield found
    for session, _ in found.values():
        session.close()


@pytest.mark.parametrize("name", TASKS)
def test_an_adapter_trained_among_seven_others_equals_trainers(name, eight):
    session, steps = eight[name]
    reference = reference_run(name)
    assert_equals_trainer(session, name)
    assert len(steps) == STEPS
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.learning_rate for step in steps] == reference.rates
    assert [step.loss for step in steps] == pytest.approx(reference.losses, rel=1e-5)
    assert [step.gradient_norm for step in steps] == pytest.approx(reference.norms, rel=1e-4)


@pytest.mark.parametrize("name", ["rank 8", "DoRA", "IA3", "prefix", "prompt"])
def test_saved_adapters_equal_pefts(name, eight, tmp_path):
    session, _ = eight[name]
    session.save(tmp_path / "ours").result(60)
    reference_run(name).model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / source / "adapter_model.safetensors") for source in ("ours", "peft"))
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    configs = [json.loads((tmp_path / source / "adapter_config.json").read_text()) for source in ("ours", "peft")]
    for config in configs:
        for key, value in config.items():
            config[key] = sorted(value) if isinstance(value, list) else value
    assert configs[0] == configs[1]
    ids = torch.tensor([[5, 9, 13, 17]])
    with torch.no_grad():
        found = PeftModel.from_pretrained(_plain(), tmp_path / "ours").eval()(input_ids=ids).logits
        expected = reference_run(name).model.eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def _plain():
    return copy.deepcopy(base())


def test_sessions_that_join_and_leave_do_not_change_a_run(trainer):
    """One run continues while other sessions open, close and fail."""
    session = open_session(trainer, TASKS["rank 2"])
    others = itertools.cycle([task for name, task in TASKS.items() if name != "rank 2"])
    guests = []

    def visit(task):
        guest = trainer.open("guest", task.adapter, seed=3)
        guests.append(guest)
        with pytest.raises(Closed):
            run(guest, task.data(), task.recipe_of())

    threads = []

    def on_step(done):
        if done.step % 5 == 1:
            threads.append(threading.Thread(target=visit, args=(next(others),)))
            threads[-1].start()
        if done.step % 5 == 4 and guests:
            guests.pop(0).close()

    task = TASKS["rank 2"]
    run(session, task.data(), task.recipe_of(), on_step=on_step)
    for guest in guests:
        guest.close()
    for thread in threads:
        thread.join(60)
    assert len(threads) >= 8
    assert_equals_trainer(session, "rank 2")
    session.close()


def test_a_diverged_run_fails_alone(trainer):
    wild = Task("wild", lora(), {"learning_rate": 1e30, "weight_decay": 1e3, "lr_scheduler_type": "constant"})
    lost = open_session(trainer, wild)
    failures = []

    def diverge():
        try:
            run(lost, wild.data(), wild.recipe_of())
        except Diverged as error:
            failures.append(error)

    thread = threading.Thread(target=diverge)
    thread.start()
    found = run_concurrently(trainer, [TASKS["IA3"], TASKS["patterns"]])
    thread.join(60)
    assert len(failures) == 1
    with pytest.raises(Diverged):
        lost.forward_backward(wild.data()[:1])
    lost.close()
    for name, (session, _) in found.items():
        assert_equals_trainer(session, name)
        session.close()


def test_a_run_resumes_from_a_checkpoint_exactly(tmp_path):
    """Killed after step 6 of 9 with a checkpoint at 4, on a new trainer: to the bit what it is without that."""
    task = Task("resumed", lora(r=4, lora_dropout=0.2, use_dora=True), {"max_steps": 9})  # a batch a step: always in one pass
    with Trainer(base(), TrainerConfig(max_rows=64)) as trainer:
        whole = open_session(trainer, task)
        run(whole, task.data(), task.recipe_of())
        expected = values(whole)
    with Trainer(base(), TrainerConfig(max_rows=64)) as trainer:
        first = open_session(trainer, task)
        run(
            first,
            task.data(),
            task.recipe_of(),
            checkpoint=lambda step: tmp_path / "at 4" if step == 4 else None,
            on_step=lambda done: first.stop() if done.step == 5 else None,
        )
    with Trainer(base(), TrainerConfig(max_rows=64)) as trainer:
        again = trainer.open("bob", task.adapter, seed=task.settings()["seed"])
        again.load(tmp_path / "at 4").result(60)
        assert again.progress.steps == 4
        run(again, task.data(), task.recipe_of(), after=again.progress.steps)
        assert all_equal(values(again), expected)


def test_a_step_may_have_more_batches_than_the_queue(trainer):
    session, recipe = (
        open_session(trainer, TASKS["rank 2"]),
        {"gradient_accumulation_steps": 100, "per_device_train_batch_size": 1},
    )
    last = run(session, TASKS["rank 2"].data() * 5, TASKS["rank 2"].recipe_of(**recipe, max_steps=3))
    assert last.step == session.progress.steps == 3
    assert session.progress.batches == 100 + 20 + 100
    session.close()


@pytest.mark.parametrize("adapter", [TASKS["rank 8"].adapter, TASKS["prompt"].adapter], ids=["LoRA", "prompt"])
def test_a_model_without_num_items_averages_the_batches_means(adapter):
    task = Task("means of means", adapter, {"gradient_accumulation_steps": 3, "max_steps": 4})
    model = _plain()
    model.accepts_loss_kwargs = False
    with Trainer(model) as trainer:
        session, steps = open_session(trainer, task), []
        run(session, task.data(), task.recipe_of(), on_step=steps.append)
    reference = run_trainer(model, task)
    assert [step.loss for step in steps] == pytest.approx(reference.losses, rel=1e-5)
    assert [step.gradient_norm for step in steps] == pytest.approx(reference.norms, rel=1e-4)


def test_data_is_checked_before_the_first_step(trainer):
    task = TASKS["rank 2"]
    session = open_session(trainer, task)
    with pytest.raises(OutOfRange, match="example 24"):
        run(session, [*task.data(), Example((1, 128), (1, 2))], task.recipe_of())
    assert session.progress.batches == 0
    session.close()


def test_a_run_waits_while_the_tenants_quota_is_used_up():
    task = TASKS["rank 2"]
    with Trainer(base(), TrainerConfig(tenant_waiting_tokens=80)) as trainer:
        other, session = trainer.open("ann", lora()), trainer.open("ann", lora())
        with other.gathering():
            for _ in range(2):
                other.forward_backward([Example((1,) * 40, (1,) * 40)])
            done = []
            thread = threading.Thread(target=lambda: done.append(run(session, task.data(), task.recipe_of(max_steps=2))))
            thread.start()
            other.close()
        thread.join(60)
        assert [each.step for each in done] == [2]


@pytest.mark.parametrize("name", TASKS)
def test_an_adapter_is_initialized_as_by_peft(name, trainer):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    session = open_session(trainer, TASKS[name])
    assert torch.equal(torch.random.get_rng_state(), before), "the global random generator was used"
    assert all_equal(values(session), reference_run(name).start)
    session.close()
    set_seed(0)
