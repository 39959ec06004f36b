"""Sampling from a session: with the adapter after the calls before, once, and released afterwards."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from peft import PeftModel

import symbiosis
from symbiosis.errors import (
    AnswerFailed,
    CannotServe,
    Closed,
    ContextTooLong,
    Diverged,
    OutOfOrder,
    OutOfRange,
    TooManyRequests,
)
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.trainer import Trainer
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_messages import GenerateRequest
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from tests.finetuning.concurrent_runs import values
from tests.finetuning.peft_reference import examples
from tests.finetuning.trainer_reference import TASKS, base
from tests.lora import lora

PROMPTS = [[5, 9, 13, 17], [40, 3], [7, 7, 7, 8, 9, 10, 11]]
LARGE = StepSettings(learning_rate=0.1)


def opened(**settings):
    return symbiosis.Studio(copy.deepcopy(base()), **settings)


@pytest.fixture
def studio():
    with opened() as studio:
        yield studio
        assert emptied(studio)
        core = studio._sampler._core
        assert not core.adapters
        core._adapter_cache.check_integrity()


def plain(folder, prompts=PROMPTS, count=8):
    """Completions of plain PEFT with the adapter in a folder."""
    model, found = PeftModel.from_pretrained(copy.deepcopy(base()), folder).eval(), []
    for prompt in prompts:
        ids, eos = torch.tensor([prompt]), model.generation_config.eos_token_id
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        made = made[0, len(prompt) :].tolist()
        found.append(made[: made.index(eos) + 1] if eos in made else made)
    return found


def train(session, steps=1, settings=LARGE):
    for number in range(steps):
        session.forward_backward(examples(6 + number, 9))
        session.optim_step(settings)


def tokens(completions):
    return [completion.tokens for completion in completions]


def until(over, seconds=30.0):
    end = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.001)


def emptied(studio, seconds=30.0):
    """Whether the engine holds nothing any more."""
    end = time.monotonic() + seconds
    core = studio._sampler._core
    while time.monotonic() < end:
        adapter_stats = core.adapter_stats()
        if core.is_idle() and not (adapter_stats.registered or adapter_stats.device_bytes or studio._sampler._requests):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("name", TASKS)
def test_samples_equal_plain_pefts(name, studio, tmp_path):
    session = studio.open("ann", TASKS[name].adapter, seed=7)
    train(session, 3)
    found = session.sample(PROMPTS, max_tokens=8).result(60)
    session.save(tmp_path / "it").result(60)
    assert tokens(found) == plain(tmp_path / "it")
    assert {completion.reason for completion in found} <= {"stop", "length"}
    assert emptied(studio)


def test_a_sample_uses_the_adapter_after_the_steps_before_it(studio, tmp_path):
    session, submitted, saved = studio.open("ann", lora(r=8), seed=7), [], []
    with session.gathering():  # all calls are queued before the first runs
        for step in range(5):
            submitted.append(session.sample(PROMPTS, max_tokens=8))
            saved.append(session.save(tmp_path / str(step)))
            train(session)
    for step, (future, save) in enumerate(zip(submitted, saved, strict=True)):
        save.result(60)
        assert tokens(future.result(60)) == plain(tmp_path / str(step))
    assert len({str(tokens(future.result())) for future in submitted}) > 2  # the steps change the completions


def test_early_calls_wait_for_a_sample(studio, tmp_path):
    session = studio.open("ann", lora(r=8), seed=7)
    session.save(tmp_path / "it").result(60)
    later = session.forward_backward(examples(6), number=3)
    session.optim_step(LARGE, number=4)
    after = session.sample(PROMPTS, number=5, max_tokens=8)
    first = session.sample(PROMPTS, number=2, max_tokens=8)
    assert tokens(first.result(60)) == plain(tmp_path / "it")
    later.result(60)
    session.save(tmp_path / "later", number=6).result(60)
    assert tokens(after.result(60)) == plain(tmp_path / "later")


def test_training_continues_while_the_engine_samples():
    with opened(training_share=0.9) as studio:
        session = studio.open("ann", lora(), seed=7)
        train(session)
        long = session.sample(PROMPTS * 4, max_tokens=400, ignore_eos=True)
        train(session, 3)
        assert session.forward(examples(5)).result(60).tokens == 4
        assert not long.done()
        assert [len(completion.tokens) for completion in long.result(120)] == [400] * 12


def test_a_repeated_sample_is_computed_once(studio, monkeypatch):
    copies, snapshot = [], TrainedAdapter.snapshot
    monkeypatch.setattr(TrainedAdapter, "snapshot", lambda self: copies.append(1) or snapshot(self))
    session = studio.open("ann", lora(), seed=7)
    first = session.sample(PROMPTS, number=1, max_tokens=4, temperature=1.0)
    assert session.sample(PROMPTS, number=1, max_tokens=4, temperature=1.0) is first
    found = first.result(60)
    assert session.sample(PROMPTS, number=1, max_tokens=4, temperature=1.0).result(60) is found
    for other in ({"max_tokens": 5, "temperature": 1.0}, {"max_tokens": 4}, {"max_tokens": 4, "temperature": 1.0, "n": 2}):
        with pytest.raises(OutOfOrder, match="another"):
            session.sample(PROMPTS, number=1, **other)
    with pytest.raises(OutOfOrder, match="another"):
        session.sample(PROMPTS[:2], number=1, max_tokens=4, temperature=1.0)
    with pytest.raises(OutOfOrder, match="another"):
        session.optim_step(LARGE, number=1)
    assert len(copies) == 1


def test_several_completions_and_logprobs(studio):
    session = studio.open("ann", lora(), seed=7)
    submitted = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    found, again = (session.sample(PROMPTS[:2], **submitted).result(60) for _ in range(2))
    assert len(found) == 6
    assert tokens(found) == tokens(again)
    assert len({str(completion.tokens) for completion in found}) == 6
    for completion in found:
        assert len(completion.logprobs) == len(completion.tokens) == 6
        assert all(len(each.top) == 2 and each.chosen <= each.top[0][1] for each in completion.logprobs)


def test_sampling_does_not_change_training(studio):
    ones = [studio.open("ann", lora(lora_dropout=0.1), seed=7) for _ in range(2)]
    for _ in range(3):
        for session in ones:
            session.forward_backward(examples(6, 9)).result(60)
            if session is ones[0]:
                session.sample(PROMPTS, max_tokens=2).result(60)
            session.optim_step(LARGE).result(60)
    for found, expected in zip(*(values(session).values() for session in ones), strict=True):
        # right after sampling, a pass may still be split by its time budget: sums are rounded differently
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_invalid_samples_are_rejected_at_once(studio):
    session = studio.open("ann", lora(), seed=7)
    for prompts in ([], [[]], [[1, 500]], [[-1]], [[1]] * 1025, "text", [7, 8]):
        with pytest.raises(OutOfRange):
            session.sample(prompts)
    for settings in ({"n": 0}, {"n": 129}, {"n": True}, {"temperature": -1.0}, {"max_tokens": 0}, {"number": "1"}):
        with pytest.raises(OutOfRange):
            session.sample(PROMPTS, **settings)
    with pytest.raises(ContextTooLong):
        session.sample(PROMPTS, max_tokens=100_000)
    with pytest.raises(CannotServe, match="tokenizer"):
        session.sample(["text"])
    with pytest.raises(OutOfRange, match=r"'tempreature' is no setting, expected some of .*temperature"):
        session.sample(PROMPTS, tempreature=1.0)
    with Trainer(base()) as trainer, pytest.raises(CannotServe, match="Studio"):
        trainer.open("ann", lora()).sample(PROMPTS)
    assert len(session.sample(PROMPTS, max_tokens=2).result(60)) == 3


def test_there_are_limits():
    limits = TrainerConfig(tenant_completions=6, max_completions=8, max_waiting=4, max_waiting_tokens=400)
    with opened(training=limits) as studio:
        mine, other = studio.open("ann", lora()), studio.open("ann", lora())
        with pytest.raises(OutOfRange, match="tokens"):
            mine.sample(PROMPTS, max_tokens=100)
        with pytest.raises(OutOfRange, match="tokens"):
            mine.sample(PROMPTS, max_tokens=10, logprobs=20)
        mine.sample([[1], [2]], n=2, max_tokens=2, number=2)  # waits for the first
        with pytest.raises(TooManyRequests, match="3 completions requested, 2 allowed"):
            other.sample(PROMPTS, max_tokens=2)
        studio.open("bob", lora()).sample(PROMPTS, max_tokens=2).result(60)
        other.sample(PROMPTS[:2], max_tokens=2).result(60)
        mine.sample([[1]], max_tokens=2, number=1)
        assert mine.sample([[1], [2]], n=2, max_tokens=2, number=2).result(60)
        assert (mine.queue.completions, mine.queue.tokens, other.queue.completions) == (0, 0, 0)
        for _ in range(5):  # stored results are bounded
            mine.sample(PROMPTS, max_tokens=50).result(60)
        assert len(mine.queue._known) <= 3


def test_a_diverged_session_completes_earlier_samples_only(studio, tmp_path):
    session, other = studio.open("ann", lora(), seed=7), studio.open("bob", lora(), seed=7)
    session.save(tmp_path / "it").result(60)
    with session.gathering():
        before = session.sample(PROMPTS, max_tokens=8)
        session.forward_backward(examples(6))
        session.optim_step(StepSettings(learning_rate=1e30, weight_decay=1e3))
        diverged = session.sample(PROMPTS)
        session.forward_backward(examples(6))
        later = session.sample(PROMPTS)
    assert tokens(before.result(60)) == plain(tmp_path / "it")
    with pytest.raises(AnswerFailed):  # the parameters are finite, the logits are not
        diverged.result(60)
    with pytest.raises(Diverged):
        later.result(60)
    with pytest.raises(Diverged):
        session.sample(PROMPTS)
    assert tokens(other.sample(PROMPTS, max_tokens=8).result(60)) == plain(tmp_path / "it")
    with torch.no_grad():
        next(iter(other.adapter.parameters.values())).fill_(float("inf"))
    with pytest.raises(Diverged):
        other.sample(PROMPTS).result(60)
    assert emptied(studio)


def test_closing_a_session_cancels_its_samples(studio):
    session = studio.open("ann", lora(), seed=7)
    num_running = session.sample(PROMPTS, max_tokens=200, ignore_eos=True)
    waiting = session.sample(PROMPTS, max_tokens=200, number=3)
    until(lambda: studio._sampler._core.scheduler.num_running)
    session.close()
    for future in (num_running, waiting):
        with pytest.raises(Closed):
            future.result(1)
    with pytest.raises(Closed):
        session.sample(PROMPTS)
    assert emptied(studio)
    assert session.queue.completions == session.queue.tokens == 0


def test_a_session_closed_at_any_moment_leaves_nothing(studio):
    ends = []
    for pause in range(24):
        session = studio.open("ann", lora(), seed=7)
        submitted = [session.sample(PROMPTS, max_tokens=3) for _ in range(3)]
        time.sleep(pause * 0.002)
        session.close()
        ends += [type(future.exception(10)) for future in submitted]
    assert set(ends) <= {Closed, type(None)}
    assert emptied(studio)


def test_closing_the_studio_resolves_every_sample():
    studio = opened()
    session = studio.open("ann", lora(), seed=7)
    submitted = [session.sample(PROMPTS, max_tokens=200, ignore_eos=True) for _ in range(4)]
    studio.close()
    assert {type(future.exception(10)) for future in submitted} <= {Closed, type(None)}
    with pytest.raises(Closed):
        session.sample(PROMPTS)


def test_eight_sessions_sample_while_they_train_and_release_memory(tmp_path):
    with opened(training_share=0.9) as studio:
        held = threading.active_count()
        found, errors = {}, []

        def loop(name):
            try:
                session = studio.open(name, TASKS[name].adapter, seed=7)
                found[name] = []
                for step in range(3):
                    train(session, settings=StepSettings(learning_rate=0.02))
                    folder = tmp_path / f"{name}-{step}"
                    submitted = session.sample(PROMPTS, max_tokens=6)
                    session.save(folder)
                    found[name].append((submitted, folder))
                session.forward(examples(4)).result(120)
                for submitted, _ in found[name]:
                    submitted.result(120)
                session.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(name,)) for name in TASKS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for steps in found.values():
            for submitted, folder in steps:
                assert tokens(submitted.result()) == plain(folder, count=6)
        assert emptied(studio)
        assert not studio._trainer._registry.sessions()
        assert threading.active_count() <= held + 3


def test_no_adapter_stays_in_memory(studio, monkeypatch):
    made, snapshot = [], TrainedAdapter.snapshot

    def noted(self):
        taken = snapshot(self)
        made.extend(weakref.ref(tensor) for tensor in taken.tensors.values())
        return taken

    monkeypatch.setattr(TrainedAdapter, "snapshot", noted)
    session = studio.open("ann", lora(), seed=7)
    for _ in range(5):
        train(session)
        session.sample(PROMPTS, max_tokens=3).result(60)
    session.forward(examples(5)).result(60)
    assert emptied(studio)
    assert made
    until(lambda: gc.collect() >= 0 and all(each() is None for each in made))  # threads release their last task


def test_a_sessions_adapter_has_no_name_in_the_engine(studio, monkeypatch):
    session = studio.open("ann", lora(), seed=7)
    train(session)
    core, rejected = studio._sampler._core, []
    loop = studio._sampler._loop
    out = loop._publish
    monkeypatch.setattr(
        loop, "_publish", lambda events: (rejected.extend(e for e in events if e.id.startswith("x")), out(events))
    )
    num_running = session.sample(PROMPTS, max_tokens=400, ignore_eos=True)
    until(lambda: core.scheduler.num_running)
    assert core.adapters == {}
    for number, name in enumerate(["", ":", "::", "ann", "session-1", next(iter(core._adapter_cache.resident))]):
        for tenant in ("", "ann", "eve"):
            loop.submit(GenerateRequest(id=f"x{number}{tenant}", prompt=[1], adapter=name, tenant=tenant))
    num_running.result(60)
    until(lambda: len(rejected) >= 18)
    assert [event.error.code for event in rejected] == ["unknown_adapter"] * 18


def test_more_adapters_than_device_slots(tmp_path):
    """They have no folder: adapters without a slot stay in memory, and completions are not mixed up."""
    with opened(residency=AdapterCacheConfig(slots=2, max_wait_s=0.01), training_share=0.9) as studio:
        sessions = [studio.open("ann", lora(), seed=seed) for seed in range(6)]
        for session in sessions:
            train(session)
        submitted = [session.sample(PROMPTS, max_tokens=12) for session in sessions for _ in range(2)]
        for at, session in enumerate(sessions):
            session.save(tmp_path / str(at)).result(60)
            for future in submitted[2 * at : 2 * at + 2]:
                assert tokens(future.result(60)) == plain(tmp_path / str(at), count=12)
        assert emptied(studio)
        adapter_stats = studio._sampler._core.adapter_stats()
        assert adapter_stats.loads > 0  # some had no slot at first
        assert adapter_stats.reads == 0


def test_a_lost_engine_fails_samples_but_not_training(monkeypatch):
    with opened() as studio:
        session = studio.open("ann", lora(), seed=7)
        monkeypatch.setattr(EngineCore, "step", lambda self: (_ for _ in ()).throw(RuntimeError("lost")))
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        first = session.sample(PROMPTS)
        with pytest.raises(Closed):
            first.result(30)
        with pytest.raises(Closed):
            session.sample(PROMPTS).result(30)
        assert session.forward_backward(examples(5)).result(60).tokens == 4  # training continues


def test_a_model_that_cannot_be_trained_leaves_no_thread(monkeypatch):
    before = set(threading.enumerate())
    with pytest.raises(OutOfRange):
        opened(training=TrainerConfig(max_rows=0))
    monkeypatch.setattr("symbiosis.app.studio.Trainer", lambda *_: (_ for _ in ()).throw(CannotServe("no")))
    with pytest.raises(CannotServe):
        opened()
    assert not [each for each in set(threading.enumerate()) - before if each.name == "symbiosis-engine"]
