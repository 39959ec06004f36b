"""Shared passes: their size, their faults, and fairness among sessions."""

from __future__ import annotations

import contextlib
import threading

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import Phi3Config, Phi3ForCausalLM

from symbiosis.errors import (
    Closed,
    OutOfRange,
    PassFailed,
    TooLarge,
    TooManyRequests,
)
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.scheduling import batch_planner
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.conftest import STEP, accumulated_gradients
from tests.finetuning.peft_reference import examples, max_relative_error, run_peft
from tests.finetuning.trainer_reference import base
from tests.lora import lora


def test_a_batch_larger_than_a_pass_takes_several(trainer):
    session, data = trainer.open("ann", lora(init_lora_weights=False), seed=7), examples(30, 20, 12, 9, 25)
    assert session.forward_backward(data, items=5.0).result(60).tokens == 30 + 20 + 12 + 9 + 25 - 5
    assert trainer.stats.passes >= 3
    _, _, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert max_relative_error(accumulated_gradients(session), gradients) < 5e-5
    with pytest.raises(OutOfRange, match="33 tokens"):
        session.forward_backward(examples(33))


def test_short_sequences_and_steps_have_a_minimum_cost(trainer):
    session = trainer.open("ann", lora())
    session.forward_backward(examples(2, 2, 2)).result(60)
    assert (trainer.stats.passes, trainer.stats.rows) == (2, 6)
    before = trainer._planner.fairness.virtual_time("ann")
    assert before == 3 * 16
    session.optim_step(STEP).result(60)
    assert trainer._planner.fairness.virtual_time("ann") > before


def test_no_example_reaches_positions_that_change_the_rope_of_a_pass():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 16, "vocab_size": 128, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Phi3ForCausalLM(Phi3Config(**lengths, **sizes, rope_parameters=rope, tie_word_embeddings=False)).eval()
    with Trainer(model) as trainer:
        session = trainer.open("ann", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
        session.forward_backward(examples(13)).result(60)
        with pytest.raises(OutOfRange, match="14 tokens"):
            session.forward_backward(examples(14))


def test_parameters_are_limited():
    size = AdapterFactory(base()).create(lora(), seed=1).size
    with Trainer(base(), TrainerConfig(tenant_parameters=2 * size, max_parameters=3 * size)) as trainer:
        first, _ = trainer.open("ann", lora()), trainer.open("ann", lora())
        with pytest.raises(TooManyRequests, match="parameters"):
            trainer.open("ann", lora(r=1))
        trainer.open("bob", lora())
        with pytest.raises(TooManyRequests, match="parameters"):
            trainer.open("eve", lora())
        with pytest.raises(TooLarge):
            trainer.open("eve", lora(r=12))
        first.close()
        trainer.open("eve", lora())


def test_a_failed_pass_fails_only_the_session_at_fault(trainer, monkeypatch):
    good, bad = trainer.open("ann", lora(), seed=7), trainer.open("bob", lora(), seed=7)
    launch = PackedModel.launch

    def fail_with_bad(self, slices):
        if any(each.adapter is bad.adapter for each in slices):
            raise RuntimeError("out of memory")
        return launch(self, slices)

    monkeypatch.setattr(PackedModel, "launch", fail_with_bad)
    with trainer._changed:  # both are there before the next pass
        mine, theirs = good.forward_backward(examples(5)), bad.forward_backward(examples(5))
    assert mine.result(60).tokens == 4
    with pytest.raises(PassFailed, match="out of memory"):
        theirs.result(60)
    with pytest.raises(PassFailed):
        bad.forward_backward(examples(5))


def test_a_pass_that_does_not_fit_into_memory_is_split(trainer, monkeypatch):
    session, other = trainer.open("ann", lora(init_lora_weights=False), seed=7), trainer.open("bob", lora(), seed=7)
    data = examples(5, 8, 9)
    launch, rows = PackedModel.launch, []

    def small(self, slices):
        rows.append(sum(each.rows for each in slices))
        if rows[-1] > 9:
            raise torch.OutOfMemoryError("no memory")
        return launch(self, slices)

    monkeypatch.setattr(PackedModel, "launch", small)
    with trainer._changed:
        mine, theirs = session.forward_backward(data, items=5.0), other.forward_backward(examples(5))
        too_long = other.forward_backward(examples(20))
    _, losses, gradients = run_peft(base(), lora(init_lora_weights=False), data)
    assert mine.result(60).loss == pytest.approx(sum(losses), rel=1e-5)
    assert theirs.result(60).tokens == 4
    with pytest.raises(PassFailed, match="no memory"):
        too_long.result(60)
    assert rows[0] > 9
    assert max_relative_error(accumulated_gradients(session), gradients) < 1e-5


def test_a_temporary_lack_of_memory_fails_no_call(trainer, monkeypatch):
    """Cached memory is released and the example is computed again. Later passes are large again."""
    session, launch, failures = trainer.open("ann", lora()), PackedModel.launch, [1]

    def once(self, slices):
        if failures:
            raise torch.OutOfMemoryError(f"no memory, {failures.pop()}")
        return launch(self, slices)

    monkeypatch.setattr(PackedModel, "launch", once)
    monkeypatch.setattr(batch_planner, "_PASSES_BEFORE_GROWTH", 3)
    most = trainer.sharing_stats()["pass_rows"]
    assert session.forward_backward(examples(5)).result(60).tokens == 4
    failures.append(2)
    assert session.forward_backward(examples(5, 6)).result(60).tokens == 9
    assert trainer.sharing_stats()["pass_rows"] < most
    for _ in range(30):
        session.forward_backward(examples(5)).result(60)
    assert trainer.sharing_stats()["pass_rows"] == most


def test_a_step_of_small_batches_does_not_delay_large_batches():
    """The batches of a step are planned together, so their total time is known."""
    ended = []
    with Trainer(base(), TrainerConfig(max_rows=1024, pass_rows=1024)) as trainer:
        small, large = trainer.open("ann", lora()), trainer.open("bob", lora())
        with trainer._changed:  # all are there before the first pass
            for step in range(12):
                for _ in range(4):
                    small.forward_backward(examples(5))
                small.optim_step(STEP).add_done_callback(lambda _, step=step: ended.append(("small", step)))
            for batch in range(3):
                futures = large.forward_backward(examples(*[60] * 16))
                futures.add_done_callback(lambda _, batch=batch: ended.append(("large", batch)))
        for session in (small, large):
            session.forward(examples(5)).result(60)  # after all others
    assert ended.index(("large", 2)) < ended.index(("small", 11))


def test_a_lost_device_stops_the_trainer_with_one_error(trainer, monkeypatch):
    sessions = [trainer.open("ann", lora()), trainer.open("bob", lora()), trainer.open("eve", lora())]

    def fail(*_):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(PackedModel, "launch", fail)
    monkeypatch.setattr(PackedModel, "is_sound", lambda _: False)
    futures = [sessions[2].optim_step(STEP, number=2)]
    with trainer._changed:
        futures += [session.forward_backward(examples(5)) for session in sessions[:2]]
    errors = [future.exception(60) for future in futures]
    assert {type(error) for error in errors} == {PassFailed}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(Closed):
        trainer.open("ann", lora())


def test_endless_steps_do_not_delay_other_sessions(trainer):
    session, busy, over = trainer.open("ann", lora()), trainer.open("bob", lora()), threading.Event()

    def submit_steps():
        while not over.is_set():
            with contextlib.suppress(TooManyRequests):
                busy.optim_step(STEP)

    thread = threading.Thread(target=submit_steps)
    thread.start()
    try:
        for _ in range(5):
            session.forward_backward(examples(5)).result(20)
    finally:
        over.set()
        thread.join()


def test_many_threads_on_many_sessions(trainer):
    """Answers come to those who futures, and every tenant gets on."""
    data, results = examples(5, 8, 11), {}

    def work(name):
        session = trainer.open(name, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), seed=7)
        results[name] = [
            (session.forward_backward(data, items=5.0).result(60), session.optim_step(STEP).result(60).number) for _ in range(5)
        ]

    threads = [threading.Thread(target=work, args=(f"tenant {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    expected = results["tenant 0"]
    assert [number for _, number in expected] == [1, 2, 3, 4, 5]
    assert len(results) == 8
    for found in results.values():
        assert [loss.loss for loss, _ in found] == pytest.approx([loss.loss for loss, _ in expected], rel=1e-5)
