"""The desk: exactly one end for everything that was asked, whatever happens in between."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter

import pytest
from peft import LoraConfig, get_peft_model

from symbiosis.errors import AdapterExists, BadAdapter, Closed, ContextTooLong, PassFailed, UnknownAdapter
from symbiosis.serving.engine import EngineCore
from symbiosis.serving.engine_loop import Accepted, EngineLoop, Event, Finished, GenerateRequest, Rejected, Result, Token
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling

WISH = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = Sampling(temperature=0.0, max_tokens=400, ignore_eos=True)
POISON = 99


class Mail:
    """Collects what the desk says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._news:
            self.events += events
            self._news.notify_all()

    def wait(self, *ids: str, ends: int = 1, seconds: float = 60) -> dict[str, list[Event]]:
        """What was said about these, once each has come to its end: `ends` answers, a refusal, or a ticket settled."""

        def by_id() -> dict[str, list[Event]]:
            return {id: [event for event in self.events if event.id == id] for id in ids}

        def over() -> bool:
            kinds = [Counter(type(event) for event in events) for events in by_id().values()]
            return all(kind[Finished] >= ends or kind[Rejected] or kind[Result] for kind in kinds)

        with self._news:
            assert self._news.wait_for(over, seconds), self.events
            return by_id()


@pytest.fixture
def model(tiny):
    """Fails if it sees the poison."""
    made = copy.deepcopy(tiny)

    def refuse(module, args, kwargs):
        if bool((kwargs["input_ids"] == POISON).any()):
            raise RuntimeError("the device is on fire")

    made.register_forward_pre_hook(refuse, with_kwargs=True)
    return made


@pytest.fixture
def desk(model):
    mail = Mail()
    desk = EngineLoop(EngineCore(model, pages=400, page_size=4), mail)
    desk.mail = mail
    yield desk
    desk.close()
    assert not desk.is_alive()


def ends(events: list[Event]) -> list[FinishReason]:
    return [event.reason for event in events if isinstance(event, Finished)]


def test_an_order_is_accepted_and_each_of_its_answers_ends_once(desk):
    desk.submit(GenerateRequest(id="a", prompt=[1, 2, 3], sampling=WISH, n=3))
    events = desk.mail.wait("a", ends=3)["a"]
    assert isinstance(events[0], Accepted)
    assert ends(events) == [FinishReason.LENGTH] * 3
    tokens = [[event.token for event in events if isinstance(event, Token) and event.number == number] for number in range(3)]
    assert [len(each) for each in tokens] == [6, 6, 6]
    assert tokens[0] == tokens[1] == tokens[2]  # greedy


def test_what_is_wrong_with_an_order_refuses_it_alone(desk):
    desk.submit(GenerateRequest(id="long", prompt=[1] * 5000, sampling=WISH))
    desk.submit(GenerateRequest(id="unknown", prompt=[1], sampling=WISH, adapter="nobody"))
    desk.submit(GenerateRequest(id="good", prompt=[1], sampling=WISH))
    found = desk.mail.wait("long", "unknown", "good")
    assert [type(event) for event in found["long"]] == [Rejected]
    assert isinstance(found["long"][0].error, ContextTooLong)
    assert isinstance(found["unknown"][0].error, UnknownAdapter)
    assert ends(found["good"]) == [FinishReason.LENGTH]


def test_a_cancel_ends_an_order_or_one_of_its_answers(desk):
    desk.submit(GenerateRequest(id="a", prompt=[1, 2], sampling=LONG, n=2))
    desk.cancel("a", 1)
    desk.cancel("nobody")
    events = desk.mail.wait("a", ends=1)["a"]
    assert [(event.number, event.reason) for event in events if isinstance(event, Finished)] == [(1, FinishReason.CANCELLED)]
    desk.cancel("a")
    desk.cancel("a")
    assert ends(desk.mail.wait("a", ends=2)["a"]) == [FinishReason.CANCELLED, FinishReason.CANCELLED]


def test_a_pass_that_fails_fails_its_answers_and_the_loop_goes_on(desk):
    desk.submit(GenerateRequest(id="bad", prompt=[1, POISON], sampling=WISH))
    (_, end) = desk.mail.wait("bad")["bad"]
    assert isinstance(end.error, PassFailed)
    assert "on fire" not in str(end.error)  # what happened inside is for the log
    desk.submit(GenerateRequest(id="good", prompt=[1, 2], sampling=WISH))
    assert ends(desk.mail.wait("good")["good"]) == [FinishReason.LENGTH]
    desk.stats("figures")
    body = desk.mail.wait("figures")["figures"][0].body
    assert (body["running"], body["waiting"], body["pages_free"]) == (0, 0, 400)


def test_who_makes_a_pass_fail_fails_alone_and_the_others_get_what_they_would_have_got(desk):
    prompts = {f"good {number}": [1, 2 + number] for number in range(5)}
    for id, prompt in prompts.items():
        desk.submit(GenerateRequest(id=id, prompt=prompt, sampling=WISH))
    expected = {id: [each for each in events if isinstance(each, Token)] for id, events in desk.mail.wait(*prompts).items()}
    desk.mail.events.clear()
    asked = [*[(id, prompt, 1) for id, prompt in prompts.items()], ("bad", [1, POISON], 1), ("worse", [1] * 9 + [POISON], 3)]
    for turn in range(3):
        for id, prompt, n in sorted(asked, key=lambda each: hash((each[0], turn))):
            desk.submit(GenerateRequest(id=id, prompt=prompt, sampling=WISH, n=n))
        found = desk.mail.wait(*prompts)
        failed = desk.mail.wait("bad") | desk.mail.wait("worse", ends=3)
        for id in prompts:
            assert [each for each in found[id] if isinstance(each, Token)] == expected[id]
            assert ends(found[id]) == [FinishReason.LENGTH]
        for id, count in (("bad", 1), ("worse", 3)):
            assert ends(failed[id]) == [FinishReason.FAILED] * count
            assert all(isinstance(each.error, PassFailed) for each in failed[id] if isinstance(each, Finished))
        desk.mail.events.clear()
    desk.stats("figures")
    body = desk.mail.wait("figures")["figures"][0].body
    assert (body["running"], body["waiting"], body["pages_free"]) == (0, 0, 400)
    desk._core.scheduler.check_integrity()


def test_adapters_are_loaded_beside_the_steps_and_every_ticket_is_settled(desk, tiny, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(copy.deepcopy(tiny), config).save_pretrained(tmp_path / "one")
    desk.submit(GenerateRequest(id="meanwhile", prompt=[1, 2], sampling=LONG))
    desk.load("1", "mine", tmp_path / "one")
    desk.load("2", "other", tmp_path / "nowhere")
    desk.mail.wait("1", "2")
    desk.load("3", "mine", tmp_path / "one")
    desk.load("4", "mine", tmp_path / "one", replace=True)
    desk.unload("5", "nobody")
    found = desk.mail.wait("1", "2", "3", "4", "5")
    assert isinstance(found["1"][0], Result)
    assert isinstance(found["2"][0].error, BadAdapter)
    assert isinstance(found["3"][0].error, AdapterExists)
    assert isinstance(found["4"][0], Result)
    assert isinstance(found["5"][0].error, UnknownAdapter)
    assert all(len(events) == 1 for events in found.values())
    desk.submit(GenerateRequest(id="with", prompt=[1], sampling=LONG, adapter="mine"))
    desk.unload("6", "mine")
    desk.submit(GenerateRequest(id="without", prompt=[1], sampling=WISH, adapter="mine"))
    found = desk.mail.wait("with", "without", "6")
    assert ends(found["with"]) == [FinishReason.LENGTH]  # who runs with it keeps it
    assert isinstance(found["without"][0], Rejected)
    desk.stats("7")
    assert desk.mail.wait("7")["7"][0].body["adapters_resident"] == 0


def test_an_adapter_that_cannot_be_read_again_fails_those_who_ask_for_it_and_nobody_else(model, tiny, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    for name in ("one", "two"):
        get_peft_model(copy.deepcopy(tiny), config).save_pretrained(tmp_path / name)
    size = EngineCore(copy.deepcopy(tiny)).prepare(tmp_path / "one").packed.nbytes
    mail = Mail()
    desk = EngineLoop(EngineCore(model, pages=400, page_size=4, residency=AdapterCacheConfig(device_bytes=size)), mail)
    desk.load("1", "one", tmp_path / "one")
    desk.load("2", "two", tmp_path / "two")  # there is room for one
    mail.wait("1", "2")
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    desk.submit(GenerateRequest(id="bad", prompt=[1], sampling=WISH, adapter="one", n=2))
    desk.submit(GenerateRequest(id="good", prompt=[1], sampling=WISH, adapter="two"))
    found = mail.wait("bad", ends=2) | mail.wait("good")
    assert ends(found["good"]) == [FinishReason.LENGTH]
    assert ends(found["bad"]) == [FinishReason.FAILED] * 2
    assert all(isinstance(event.error, BadAdapter) for event in found["bad"][1:])
    desk.submit(GenerateRequest(id="refused", prompt=[1], sampling=WISH, adapter="one"))
    assert isinstance(mail.wait("refused")["refused"][0].error, BadAdapter)
    desk.stats("figures")
    assert mail.wait("figures")["figures"][0].body["residency"]["failures"] == 1
    desk.close()


def test_closing_ends_everything_once(model):
    mail = Mail()
    desk = EngineLoop(EngineCore(model, pages=400, page_size=4), mail)
    for number in range(20):
        desk.submit(GenerateRequest(id=str(number), prompt=[1, number], sampling=LONG, n=2))
    desk.close()
    desk.submit(GenerateRequest(id="late", prompt=[1], sampling=WISH))
    desk.stats("later")
    for number in range(20):
        events = [event for event in mail.events if event.id == str(number)]
        refused = [event for event in events if isinstance(event, Rejected)]
        errors = [event.error for event in (refused or [event for event in events if isinstance(event, Finished)])]
        assert len(errors) == (1 if refused else 2)
        assert all(isinstance(error, Closed) for error in errors)
    assert [type(event) for event in mail.events if event.id in ("late", "later")] == [Rejected, Rejected]


def test_an_idle_desk_sleeps(desk):
    desk.submit(GenerateRequest(id="a", prompt=[1, 2], sampling=WISH))
    desk.mail.wait("a")
    time.sleep(0.2)
    its_time = time.pthread_getcpuclockid(desk._thread.ident)
    before = time.clock_gettime(its_time)
    time.sleep(0.5)
    assert time.clock_gettime(its_time) - before < 0.1
