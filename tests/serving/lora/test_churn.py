"""Adapters loaded, replaced and unloaded under traffic: every answer is that of the version its order was accepted with.

The desk says everything in the order in which it happened, so what a name meant when an order was accepted is known exactly.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from symbiosis.errors import UnknownAdapter
from symbiosis.serving.engine import EngineCore
from symbiosis.serving.engine_loop import Accepted, EngineLoop, Event, Finished, GenerateRequest, Rejected, Result, Token
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.scheduling.sequence import FinishReason
from tests.serving.lora.residents import PROMPTS, WISH, World, make_world, use_levels

NAMES = ["n0", "n1", "n2", "n3", "n4"]
CONTENTS = 10


@dataclass
class Asked:
    name: str | None
    prompt: int
    n: int
    content: str | None = None
    """What the name meant when the order was accepted."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: list[Finished] = field(default_factory=list)
    refused: list[Rejected] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


class Ledger:
    """Reads what the desk says, in order."""

    def __init__(self) -> None:
        self.orders: dict[str, Asked] = {}
        self.tickets: dict[str, tuple[str, str | None]] = {}
        self.settled: dict[str, threading.Event] = {}
        self.meaning: dict[str, str | None] = dict.fromkeys(NAMES)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, dict] = {}

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Rejected | Finished) and event.error is not None:
                event.error.with_traceback(None)  # whose frames would keep alive what the desk did just then
            if event.id in self.orders:
                self._order(self.orders[event.id], event)
            else:
                self._ticket(event)

    def _ticket(self, event: Event) -> None:
        if event.id in self.tickets:
            name, content = self.tickets[event.id]
            if isinstance(event, Result):
                self.meaning[name] = content
                self.counts["loads" if content else "unloads"] += 1
            elif content is not None or not isinstance(event.error, UnknownAdapter):
                self.wrong.append(f"{name} {content}: {event}")
        elif isinstance(event, Result):
            self.figures[event.id] = event.body
        self.settled[event.id].set()

    def _order(self, asked: Asked, event: Event) -> None:
        if isinstance(event, Accepted):
            asked.content = "base" if asked.name is None else self.meaning[asked.name]
            if asked.content is None:
                self.wrong.append(f"{asked.name} means nothing, and an order with it was accepted")
        elif isinstance(event, Token):
            asked.tokens.setdefault(event.number, []).append(event.token)
        elif isinstance(event, Finished):
            asked.ends.append(event)
        else:
            asked.refused.append(event)
            if asked.name is None or self.meaning[asked.name] is not None:
                self.wrong.append(f"{asked.name} means {self.meaning.get(asked.name)}: {event}")
        if asked.refused or len(asked.ends) == asked.n:
            asked.over.set()


class Churn:
    """A desk, and threads that use it all at once until `stop`."""

    def __init__(self, core: EngineCore, world: World) -> None:
        self.ledger, self.world = Ledger(), world
        self.desk = EngineLoop(core, self.ledger)
        self.stop = threading.Event()
        self._numbers = itertools.count()
        self.errors: list[BaseException] = []

    def run(self, seconds: float) -> None:
        roles = [self._ask] * 6 + [self._change] * 2
        threads = [threading.Thread(target=self._guarded, args=(role, seed)) for seed, role in enumerate(roles)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        while not self.errors and min(self.seen()) <= 1:
            time.sleep(0.1)  # on a slow machine
        self.stop.set()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "hung"
        assert not self.errors, self.errors

    def seen(self) -> tuple[int, int, int]:
        """What must have happened for this to mean anything: adapters that made room, answers and loads."""
        counts = self.ledger.counts
        return self.figures()["residency"]["device_evictions"], counts["answered"], counts["loads"]

    def _guarded(self, role, seed: int) -> None:
        try:
            role(random.Random(seed))
        except BaseException as error:
            self.errors.append(error)

    def _ask(self, rng: random.Random) -> None:
        while not self.stop.is_set():
            asked = [self._submit(rng) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.1:
                self.desk.cancel(rng.choice(asked))
            for id in asked:
                assert self.ledger.orders[id].over.wait(60), f"{id} hangs"
                self._check(self.ledger.orders[id])

    def _submit(self, rng: random.Random) -> str:
        id, name = f"o{next(self._numbers)}", rng.choice([*NAMES, *NAMES, None])
        self.ledger.orders[id] = asked = Asked(name, rng.randrange(len(PROMPTS)), rng.choice([1, 1, 2]))
        tenant = rng.choice(["ann", "bob", "eve"])
        self.desk.submit(
            GenerateRequest(id=id, prompt=PROMPTS[asked.prompt], sampling=WISH, adapter=name, tenant=tenant, n=asked.n)
        )
        return id

    def _check(self, asked: Asked) -> None:
        self.ledger.counts["refused" if asked.refused else "answered"] += 1
        assert len(asked.refused) + len(asked.ends) in (1, asked.n), asked
        for end in asked.ends:
            said = asked.tokens.get(end.number, [])
            expected = self.world.says[asked.content][asked.prompt]
            if end.reason is FinishReason.CANCELLED:
                assert said == expected[: len(said)], asked
            else:
                assert (end.reason, said) == (FinishReason.LENGTH, expected), asked

    def _change(self, rng: random.Random) -> None:
        while not self.stop.is_set():
            name, content = rng.choice(NAMES), f"a{rng.randrange(CONTENTS)}"
            self.change(name, None if rng.random() < 0.2 else content)
            time.sleep(0.01 * rng.random())

    def change(self, name: str, content: str | None) -> None:
        ticket = f"t{next(self._numbers)}"
        self.ledger.tickets[ticket], self.ledger.settled[ticket] = (name, content), threading.Event()
        if content is None:
            self.desk.unload(ticket, name)
        else:
            self.desk.load(ticket, name, self.world.path(content), replace=True)
        assert self.ledger.settled[ticket].wait(60), "a load hangs"

    def figures(self) -> dict:
        ticket = f"s{next(self._numbers)}"
        self.ledger.settled[ticket] = threading.Event()
        self.desk.stats(ticket)
        assert self.ledger.settled[ticket].wait(60)
        return self.ledger.figures[ticket]


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory) -> World:
    return make_world(tiny, tmp_path_factory.mktemp("adapters"), CONTENTS)


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("copying", [False, True], ids=["one level", "two levels"])
@pytest.mark.parametrize("seconds", [5, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_every_answer_is_its_versions_while_adapters_come_and_go(world, monkeypatch, copying, seconds):
    use_levels(monkeypatch, copying=copying)
    largest = max(
        EngineCore(copy.deepcopy(world.base)).prepare(world.path(name)).packed.nbytes for name in world.says.keys() - {"base"}
    )
    config = AdapterCacheConfig(device_bytes=largest + 4096, host_bytes=2 * largest, slots=4, max_wait_s=0.02)
    flats, adapters, threads = alive(PackedAdapter), alive(EngineAdapter), threading.active_count()
    core = EngineCore(copy.deepcopy(world.base), pages=200, page_size=4, residency=config)
    churn = Churn(core, world)
    churn.run(seconds)
    ledger = churn.ledger
    assert not ledger.wrong, ledger.wrong[:5]
    assert all(asked.over.is_set() for asked in ledger.orders.values())
    for name in NAMES:
        churn.change(name, None)
    until = time.monotonic() + 30
    while (found := churn.figures()["residency"])["loading"] or found["resident"]:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    figures = churn.figures()
    print(ledger.counts, figures)
    assert (figures["running"], figures["waiting"], figures["pages_free"]) == (0, 0, figures["pages"])
    assert figures["residency"]["registered"] == figures["residency"]["device_bytes"] == figures["residency"]["host_bytes"] == 0
    assert min(churn.seen()) > 1
    core._residency.check_integrity()
    core.scheduler.check_integrity()
    assert not core._requests
    churn.desk.close()
    assert (alive(PackedAdapter), alive(EngineAdapter)) == (flats, adapters), "adapters that nobody needs are still there"
    del core, churn, ledger
    gc.collect()
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= threads
