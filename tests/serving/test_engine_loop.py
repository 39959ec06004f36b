"""The engine loop: every request and every operation ends exactly once."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter

import pytest
from peft import LoraConfig, get_peft_model

from symbiosis.errors import AdapterExists, BadAdapter, Closed, ContextTooLong, PassFailed, UnknownAdapter
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Accepted, Event, Finished, GenerateRequest, Rejected, Result, Token
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling

SAMPLING = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = Sampling(temperature=0.0, max_tokens=400, ignore_eos=True)
POISON = 99


class Inbox:
    """Collects the loop's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait(self, *ids: str, ends: int = 1, seconds: float = 60) -> dict[str, list[Event]]:
        """The events of these ids, once each has ended: `ends` completions, a rejection, or a result."""

        def by_id() -> dict[str, list[Event]]:
            return {id: [event for event in self.events if event.id == id] for id in ids}

        def has_ended() -> bool:
            kinds = [Counter(type(event) for event in events) for events in by_id().values()]
            return all(kind[Finished] >= ends or kind[Rejected] or kind[Result] for kind in kinds)

        with self._changed:
            assert self._changed.wait_for(has_ended, seconds), self.events
            return by_id()


@pytest.fixture
def model(tiny):
    """A model that fails on the poison token."""
    made = copy.deepcopy(tiny)

    def refuse(module, args, kwargs):
        if bool((kwargs["input_ids"] == POISON).any()):
            raise RuntimeError("the device is on fire")

    made.register_forward_pre_hook(refuse, with_kwargs=True)
    return made


@pytest.fixture
def loop(model):
    inbox = Inbox()
    loop = EngineLoop(EngineCore(model, pages=400, page_size=4), inbox)
    loop.inbox = inbox
    yield loop
    loop.close()
    assert not loop.is_alive()


def ends(events: list[Event]) -> list[FinishReason]:
    return [event.reason for event in events if isinstance(event, Finished)]


def test_a_request_is_accepted_and_each_of_its_completions_finishes_once(loop):
    loop.submit(GenerateRequest(id="a", prompt=[1, 2, 3], sampling=SAMPLING, n=3))
    events = loop.inbox.wait("a", ends=3)["a"]
    assert isinstance(events[0], Accepted)
    assert ends(events) == [FinishReason.LENGTH] * 3
    tokens = [[event.token for event in events if isinstance(event, Token) and event.number == number] for number in range(3)]
    assert [len(each) for each in tokens] == [6, 6, 6]
    assert tokens[0] == tokens[1] == tokens[2]  # greedy


def test_a_wrong_request_is_rejected_alone(loop):
    loop.submit(GenerateRequest(id="long", prompt=[1] * 5000, sampling=SAMPLING))
    loop.submit(GenerateRequest(id="unknown", prompt=[1], sampling=SAMPLING, adapter="unknown"))
    loop.submit(GenerateRequest(id="good", prompt=[1], sampling=SAMPLING))
    found = loop.inbox.wait("long", "unknown", "good")
    assert [type(event) for event in found["long"]] == [Rejected]
    assert isinstance(found["long"][0].error, ContextTooLong)
    assert isinstance(found["unknown"][0].error, UnknownAdapter)
    assert ends(found["good"]) == [FinishReason.LENGTH]


def test_a_cancel_finishes_a_request_or_one_of_its_completions(loop):
    loop.submit(GenerateRequest(id="a", prompt=[1, 2], sampling=LONG, n=2))
    loop.cancel("a", 1)
    loop.cancel("unknown")
    events = loop.inbox.wait("a", ends=1)["a"]
    assert [(event.number, event.reason) for event in events if isinstance(event, Finished)] == [(1, FinishReason.CANCELLED)]
    loop.cancel("a")
    loop.cancel("a")
    assert ends(loop.inbox.wait("a", ends=2)["a"]) == [FinishReason.CANCELLED, FinishReason.CANCELLED]


def test_operations_without_end_do_not_stop_the_steps(loop):
    over = threading.Event()

    def again() -> None:
        if not over.is_set():
            loop.call(again)

    for _ in range(3):
        loop.call(again)
    try:
        loop.submit(GenerateRequest(id="a", prompt=[1, 2, 3], sampling=SAMPLING))
        assert ends(loop.inbox.wait("a")["a"]) == [FinishReason.LENGTH]
    finally:
        over.set()


def test_a_failed_step_fails_its_completions_and_the_loop_continues(loop):
    loop.submit(GenerateRequest(id="bad", prompt=[1, POISON], sampling=SAMPLING))
    (_, end) = loop.inbox.wait("bad")["bad"]
    assert isinstance(end.error, PassFailed)
    assert "on fire" not in str(end.error)  # details are for the log
    loop.submit(GenerateRequest(id="good", prompt=[1, 2], sampling=SAMPLING))
    assert ends(loop.inbox.wait("good")["good"]) == [FinishReason.LENGTH]
    loop.stats("stats")
    body = loop.inbox.wait("stats")["stats"][0].body
    assert (body["running"], body["waiting"], body["blocks_free"]) == (0, 0, 400)


def test_the_request_that_fails_a_step_fails_alone_and_the_others_are_unchanged(loop):
    prompts = {f"good {number}": [1, 2 + number] for number in range(5)}
    for id, prompt in prompts.items():
        loop.submit(GenerateRequest(id=id, prompt=prompt, sampling=SAMPLING))
    expected = {id: [each for each in events if isinstance(each, Token)] for id, events in loop.inbox.wait(*prompts).items()}
    loop.inbox.events.clear()
    asked = [*[(id, prompt, 1) for id, prompt in prompts.items()], ("bad", [1, POISON], 1), ("worse", [1] * 9 + [POISON], 3)]
    for repetition in range(3):
        for id, prompt, n in sorted(asked, key=lambda each: hash((each[0], repetition))):
            loop.submit(GenerateRequest(id=id, prompt=prompt, sampling=SAMPLING, n=n))
        found = loop.inbox.wait(*prompts)
        failed = loop.inbox.wait("bad") | loop.inbox.wait("worse", ends=3)
        for id in prompts:
            assert [each for each in found[id] if isinstance(each, Token)] == expected[id]
            assert ends(found[id]) == [FinishReason.LENGTH]
        for id, count in (("bad", 1), ("worse", 3)):
            assert ends(failed[id]) == [FinishReason.FAILED] * count
            assert all(isinstance(each.error, PassFailed) for each in failed[id] if isinstance(each, Finished))
        loop.inbox.events.clear()
    loop.stats("stats")
    body = loop.inbox.wait("stats")["stats"][0].body
    assert (body["running"], body["waiting"], body["blocks_free"]) == (0, 0, 400)
    loop._core.scheduler.check_integrity()


def test_adapters_load_during_steps_and_every_operation_has_a_reply(loop, tiny, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(copy.deepcopy(tiny), config).save_pretrained(tmp_path / "one")
    loop.submit(GenerateRequest(id="meanwhile", prompt=[1, 2], sampling=LONG))
    loop.load("1", "mine", tmp_path / "one")
    loop.load("2", "other", tmp_path / "nowhere")
    loop.inbox.wait("1", "2")
    loop.load("3", "mine", tmp_path / "one")
    loop.load("4", "mine", tmp_path / "one", replace=True)
    loop.unload("5", "unknown")
    found = loop.inbox.wait("1", "2", "3", "4", "5")
    assert isinstance(found["1"][0], Result)
    assert isinstance(found["2"][0].error, BadAdapter)
    assert isinstance(found["3"][0].error, AdapterExists)
    assert isinstance(found["4"][0], Result)
    assert isinstance(found["5"][0].error, UnknownAdapter)
    assert all(len(events) == 1 for events in found.values())
    loop.submit(GenerateRequest(id="with", prompt=[1], sampling=LONG, adapter="mine"))
    loop.unload("6", "mine")
    loop.submit(GenerateRequest(id="without", prompt=[1], sampling=SAMPLING, adapter="mine"))
    found = loop.inbox.wait("with", "without", "6")
    assert ends(found["with"]) == [FinishReason.LENGTH]  # accepted requests keep it
    assert isinstance(found["without"][0], Rejected)
    loop.stats("7")
    assert loop.inbox.wait("7")["7"][0].body["adapters_resident"] == 0


def test_an_adapter_that_cannot_be_read_again_fails_only_its_requests(model, tiny, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    for name in ("one", "two"):
        get_peft_model(copy.deepcopy(tiny), config).save_pretrained(tmp_path / name)
    size = EngineCore(copy.deepcopy(tiny)).prepare(tmp_path / "one").packed.nbytes
    inbox = Inbox()
    loop = EngineLoop(EngineCore(model, pages=400, page_size=4, residency=AdapterCacheConfig(device_bytes=size)), inbox)
    loop.load("1", "one", tmp_path / "one")
    loop.load("2", "two", tmp_path / "two")  # there is memory for one
    inbox.wait("1", "2")
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    loop.submit(GenerateRequest(id="bad", prompt=[1], sampling=SAMPLING, adapter="one", n=2))
    loop.submit(GenerateRequest(id="good", prompt=[1], sampling=SAMPLING, adapter="two"))
    found = inbox.wait("bad", ends=2) | inbox.wait("good")
    assert ends(found["good"]) == [FinishReason.LENGTH]
    assert ends(found["bad"]) == [FinishReason.FAILED] * 2
    assert all(isinstance(event.error, BadAdapter) for event in found["bad"][1:])
    loop.submit(GenerateRequest(id="refused", prompt=[1], sampling=SAMPLING, adapter="one"))
    assert isinstance(inbox.wait("refused")["refused"][0].error, BadAdapter)
    loop.stats("stats")
    assert inbox.wait("stats")["stats"][0].body["adapter_cache"]["failures"] == 1
    loop.close()


def test_closing_ends_every_operation_once(model):
    inbox = Inbox()
    loop = EngineLoop(EngineCore(model, pages=400, page_size=4), inbox)
    for number in range(20):
        loop.submit(GenerateRequest(id=str(number), prompt=[1, number], sampling=LONG, n=2))
    loop.close()
    loop.submit(GenerateRequest(id="late", prompt=[1], sampling=SAMPLING))
    loop.stats("later")
    for number in range(20):
        events = [event for event in inbox.events if event.id == str(number)]
        refused = [event for event in events if isinstance(event, Rejected)]
        errors = [event.error for event in (refused or [event for event in events if isinstance(event, Finished)])]
        assert len(errors) == (1 if refused else 2)
        assert all(isinstance(error, Closed) for error in errors)
    assert [type(event) for event in inbox.events if event.id in ("late", "later")] == [Rejected, Rejected]


def test_an_idle_loop_sleeps(loop):
    loop.submit(GenerateRequest(id="a", prompt=[1, 2], sampling=SAMPLING))
    loop.inbox.wait("a")
    time.sleep(0.2)
    its_time = time.pthread_getcpuclockid(loop._thread.ident)
    before = time.clock_gettime(its_time)
    time.sleep(0.5)
    assert time.clock_gettime(its_time) - before < 0.1
