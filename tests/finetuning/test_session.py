"""Calls of a session run in order, each once; gradients accumulate until a step."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import wait

import peft
import pytest
import torch

from symbiosis.errors import (
    BadCall,
    Closed,
    OutOfOrder,
    OutOfRange,
    TooManyRequests,
    Withdrawn,
)
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.concurrent_runs import all_equal
from tests.finetuning.conftest import STEP, accumulated_gradients
from tests.finetuning.peft_reference import examples, max_relative_error, run_peft
from tests.finetuning.trainer_reference import base
from tests.lora import lora


def test_gradients_accumulate_until_a_step(trainer):
    session, data = trainer.open("ann", lora(init_lora_weights=False), seed=7), examples(5, 8, 9)
    first = session.forward_backward(data[:1], items=5.0)
    second = session.forward_backward(data[1:], items=5.0)
    _, losses, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert first.result(60).loss == pytest.approx(losses[0], rel=1e-5)
    assert second.result(60).loss == pytest.approx(losses[1] + losses[2], rel=1e-5)
    assert (first.result().tokens, second.result().tokens) == (4, 15)
    assert max_relative_error(accumulated_gradients(session), gradients) < 5e-5
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    step = session.optim_step(STEP).result(60)
    assert step.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert step.number == 1
    assert not accumulated_gradients(session)


def test_without_items_the_loss_is_the_mean_over_the_batch(trainer):
    data = examples(5, 8)
    for config in (lora(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")):
        found = trainer.open("ann", config, seed=7).forward_backward(data).result(60)
        ids, mask = (torch.zeros(2, 8, dtype=torch.long) for _ in range(2))
        labels = torch.full((2, 8), -100)
        for row, example in enumerate(data):
            for tensor, value in ((ids, example.ids), (labels, example.labels), (mask, [1] * len(example.ids))):
                tensor[row, : len(value)] = torch.tensor(value)
        model, _, _ = run_peft(base(), config, data)
        with torch.no_grad():
            expected = float(model(input_ids=ids, labels=labels, attention_mask=mask).loss)
        assert found.loss == pytest.approx(expected, rel=1e-5)


def test_a_prefix_counts_as_cost_but_not_as_rows(trainer):
    session = trainer.open("ann", peft.PrefixTuningConfig(num_virtual_tokens=12, task_type="CAUSAL_LM"))
    session.forward_backward(examples(4, 4, 4)).result(60)
    assert (trainer.stats.passes, trainer.stats.rows) == (2, 12)  # two of 16 fit into 32
    session.forward_backward(examples(20)).result(60)
    with pytest.raises(OutOfRange, match="21 tokens"):
        session.forward_backward(examples(21))


def test_a_repeated_call_is_computed_once(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    first = session.forward_backward(data, number=1)
    assert session.forward_backward(data, number=1) is first
    first.result(60)
    once = {name: g.clone() for name, g in accumulated_gradients(session).items()}
    assert session.forward_backward(data, number=1).result(60) == first.result()
    assert all_equal(accumulated_gradients(session), once)
    with pytest.raises(OutOfOrder, match="another"):
        session.forward_backward(data[:1], number=1)
    with pytest.raises(OutOfOrder, match="another"):
        session.optim_step(STEP, number=1)
    assert session.optim_step(STEP, number=2).result(60).number == 1
    for _ in range(100):
        session.forward_backward(data[:1]).result(60)
    with pytest.raises(OutOfOrder, match="too old"):
        session.forward_backward(data, number=1)


def test_early_calls_wait_for_their_predecessors(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    step = session.optim_step(STEP, number=3)
    second = session.forward_backward(data[1:], number=2)
    done, _ = wait([step, second], timeout=0.2)
    assert not done
    first = session.forward_backward(data[:1], number=1)
    assert step.result(60).number == 1
    assert first.done()
    assert second.done()


def test_a_stopped_session_finishes_the_current_step(trainer, monkeypatch, tmp_path):
    data, reached, resume, launch = examples(5, 8), threading.Event(), threading.Event(), PackedModel.launch

    def held(self, slices):
        reached.set()
        assert resume.wait(60)
        return launch(self, slices)

    monkeypatch.setattr(PackedModel, "launch", held)
    session, other = trainer.open("ann", lora(), seed=7), trainer.open("bob", lora(), seed=7)
    with session.gathering():
        first = [session.forward_backward(data[:1]), session.forward_backward(data[1:])]
    assert reached.wait(60)
    first += [session.optim_step(STEP), session.forward(data), session.save(tmp_path / "after", optimizer=True)]
    later = [session.forward_backward(data), session.optim_step(STEP), session.save(tmp_path / "never")]
    session.stop()
    for call in later:
        with pytest.raises(Withdrawn):
            call.result(0)
    for submit in (lambda: session.forward_backward(data), lambda: session.optim_step(STEP)):
        with pytest.raises(Withdrawn, match="was stopped"):
            submit()
    session.stop()
    resume.set()
    for call in first:
        call.result(60)
    assert session.queue.tokens == 0
    assert not accumulated_gradients(session)
    assert not (tmp_path / "never").exists()
    session.save(tmp_path / "then", optimizer=True).result(60)  # other calls are accepted
    session.forward(data).result(60)
    other.load(tmp_path / "then").result(60)
    assert (other.progress.steps, other.progress.batches) == (1, 2)
    other.forward_backward(data).result(60)


def test_a_step_whose_first_batch_was_submitted_is_finished_after_stop(trainer):
    session, data = trainer.open("ann", lora(), seed=7), examples(5, 8)
    with session.gathering():
        calls = [session.forward_backward(data[:1])]
        session.stop()
        calls += [session.forward_backward(data[1:]), session.optim_step(STEP)]
    assert calls[-1].result(60).number == 1
    with pytest.raises(Withdrawn):
        session.forward_backward(data)


def test_invalid_calls_are_rejected_and_harm_nothing(trainer):
    session = trainer.open("ann", lora(), seed=7)
    for batch in ([], [Example((), ())], [Example((1, 2), (1,))], [Example((1, 500), (1, 2))], [Example((1, 2), (1, -5))]):
        with pytest.raises(OutOfRange):
            session.forward_backward(batch)
    with pytest.raises(OutOfRange, match="nothing to learn"):
        session.forward_backward([Example((1, 2), (-100, -100))])
    with pytest.raises(OutOfRange, match="items"):
        session.forward_backward([Example((1, 2), (1, 2))], items=0)
    with pytest.raises(OutOfRange):
        StepSettings(learning_rate=float("nan"))
    with pytest.raises(BadCall, match="forward_backward first"):
        session.optim_step(STEP).result(60)
    for seed in (-1, 1.5, True):
        with pytest.raises(OutOfRange):
            trainer.open("ann", lora(), seed=seed)
    session.forward_backward(examples(5)).result(60)  # the session still works


def test_there_are_limits(trainer):
    sessions = [trainer.open("ann", lora()) for _ in range(3)]
    with pytest.raises(TooManyRequests):
        trainer.open("ann", lora())
    trainer.open("bob", lora())
    sessions[0].close()
    session = trainer.open("ann", lora())
    with pytest.raises(TooManyRequests):
        session.forward_backward(examples(5), number=9)
    for number in range(2, 9):
        session.forward_backward(examples(5), number=number)
    with pytest.raises(TooManyRequests):
        session.forward_backward(examples(5), number=10)


def test_pending_tokens_are_limited_and_released_when_computed():
    with Trainer(base(), TrainerConfig(max_rows=32, max_waiting_tokens=20, tenant_waiting_tokens=30)) as trainer:
        mine, other = trainer.open("ann", lora()), trainer.open("ann", lora())
        with pytest.raises(OutOfRange, match="11 tokens"):
            mine.forward_backward(examples(5, 6))
        mine.forward_backward(examples(8), number=2)
        with pytest.raises(TooManyRequests, match="tokens"):
            mine.forward_backward(examples(3), number=3)  # more than half of the session's
        with pytest.raises(TooManyRequests, match="tokens"):
            other.forward_backward(examples(8), number=2)  # more than half of the tenant's
        trainer.open("bob", lora()).forward_backward(examples(10)).result(60)
        mine.forward_backward(examples(10), number=1)  # the missing call has capacity
        assert mine.forward_backward(examples(8), number=2).result(60).tokens == 7
        assert mine.queue.tokens == 0
        assert not any(call.examples for call in mine.queue._known.values())
        assert mine.forward_backward(examples(8), number=2).done()
        with pytest.raises(OutOfOrder, match="another"):
            mine.forward_backward(examples(9), number=2)


def test_every_pending_call_is_resolved_when_a_session_or_the_trainer_closes(trainer):
    sessions = [trainer.open("ann", lora()) for _ in range(2)]
    early = sessions[0].optim_step(STEP, number=2)
    sessions[0].close()
    with pytest.raises(Closed):
        early.result(60)
    with pytest.raises(Closed):
        sessions[0].forward_backward(examples(5))
    pending = sessions[1].optim_step(STEP, number=2)
    trainer.close()
    with pytest.raises(Closed):
        pending.result(60)
    with pytest.raises(Closed):
        sessions[1].forward_backward(examples(5))
    with pytest.raises(Closed):
        trainer.open("ann", lora())


def test_the_error_that_ended_a_session_is_copied_for_each_caller(trainer):
    session = trainer.open("ann", lora())
    waiting = [session.optim_step(STEP, number=number) for number in (2, 3)]
    session.close()
    errors = [future.exception(60) for future in waiting]
    for _ in range(2):
        with pytest.raises(Closed, match="was closed") as raised:
            session.forward_backward(examples(5))
        errors.append(raised.value)
    assert len({id(error) for error in errors}) == 4


def test_a_closed_session_releases_its_tensors(trainer):
    session, other = trainer.open("ann", lora()), trainer.open("bob", lora())
    session.forward_backward(examples(5))
    session.optim_step(STEP).result(60)
    references = [weakref.ref(parameter) for parameter in session.adapter.parameters.values()]
    session.close()
    other.forward_backward(examples(5)).result(60)  # the pass loop has run
    gc.collect()
    assert not [each for each in references if each() is not None]
    with pytest.raises(Closed):
        session.forward_backward(examples(5))
