"""Adapters registered, replaced and removed under traffic: every completion is that of the version it was accepted with.

The engine loop emits events in order, so the version of a name at the time of acceptance is known exactly.
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
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Accepted, Event, Finished, GenerateRequest, Preempted, Rejected, Result, Token
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.lora.lora_weights import EngineAdapter
from symbiosis.serving.lora.packed_adapter import PackedAdapter
from symbiosis.serving.scheduling.sequence import FinishReason
from tests.serving.lora.adapter_world import PROMPTS, SAMPLING, World, make_world, use_pools

NAMES = ["n0", "n1", "n2", "n3", "n4"]
CONTENTS = 10


@dataclass
class TrackedRequest:
    name: str | None
    prompt: int
    n: int
    content: str | None = None
    """The version of the name when the request was accepted."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: list[Finished] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


class Ledger:
    """Reads the events of the engine loop, in order."""

    def __init__(self) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.operations: dict[str, tuple[str, str | None]] = {}
        self.settled: dict[str, threading.Event] = {}
        self.versions: dict[str, str | None] = dict.fromkeys(NAMES)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.figures: dict[str, dict] = {}

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Rejected | Finished) and event.error is not None:
                event.error.with_traceback(None)  # its frames would keep adapters alive
            if event.id in self.requests:
                self._track(self.requests[event.id], event)
            else:
                self._track_operation(event)

    def _track_operation(self, event: Event) -> None:
        if event.id in self.operations:
            name, content = self.operations[event.id]
            if isinstance(event, Result):
                self.versions[name] = content
                self.counts["loads" if content else "unloads"] += 1
            elif content is not None or not isinstance(event.error, UnknownAdapter):
                self.wrong.append(f"{name} {content}: {event}")
        elif isinstance(event, Result):
            self.figures[event.id] = event.body
        self.settled[event.id].set()

    def _track(self, tracked: TrackedRequest, event: Event) -> None:
        if isinstance(event, Accepted):
            tracked.content = "base" if tracked.name is None else self.versions[tracked.name]
            if tracked.content is None:
                self.wrong.append(f"{tracked.name} is not registered, and a request with it was accepted")
        elif isinstance(event, Token):
            tracked.tokens.setdefault(event.number, []).append(event.token)
        elif isinstance(event, Finished):
            tracked.ends.append(event)
        elif not isinstance(event, Preempted):
            tracked.rejected.append(event)
            if tracked.name is None or self.versions[tracked.name] is not None:
                self.wrong.append(f"{tracked.name} is {self.versions.get(tracked.name)}: {event}")
        if tracked.rejected or len(tracked.ends) == tracked.n:
            tracked.over.set()


class Churn:
    """An engine loop, and threads that use it concurrently until `stop`."""

    def __init__(self, core: EngineCore, world: World) -> None:
        self.ledger, self.world = Ledger(), world
        self.loop = EngineLoop(core, self.ledger)
        self.stop = threading.Event()
        self._numbers = itertools.count()
        self.errors: list[BaseException] = []

    def run(self, seconds: float) -> None:
        roles = [self._send_requests] * 6 + [self._change_adapters] * 2
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
        """The test needs some of each: evictions, completions, loads."""
        counts = self.ledger.counts
        return self.figures()["adapter_cache"]["device_evictions"], counts["completed"], counts["loads"]

    def _guarded(self, role, seed: int) -> None:
        try:
            role(random.Random(seed))
        except BaseException as error:
            self.errors.append(error)

    def _send_requests(self, rng: random.Random) -> None:
        while not self.stop.is_set():
            tracked = [self._submit(rng) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.1:
                self.loop.cancel(rng.choice(tracked))
            for id in tracked:
                assert self.ledger.requests[id].over.wait(60), f"{id} hangs"
                self._check(self.ledger.requests[id])

    def _submit(self, rng: random.Random) -> str:
        id, name = f"o{next(self._numbers)}", rng.choice([*NAMES, *NAMES, None])
        self.ledger.requests[id] = tracked = TrackedRequest(name, rng.randrange(len(PROMPTS)), rng.choice([1, 1, 2]))
        tenant = rng.choice(["a", "b", "c"])
        self.loop.submit(
            GenerateRequest(id=id, prompt=PROMPTS[tracked.prompt], sampling=SAMPLING, adapter=name, tenant=tenant, n=tracked.n)
        )
        return id

    def _check(self, tracked: TrackedRequest) -> None:
        self.ledger.counts["rejected" if tracked.rejected else "completed"] += 1
        assert len(tracked.rejected) + len(tracked.ends) in (1, tracked.n), tracked
        for end in tracked.ends:
            tokens = tracked.tokens.get(end.number, [])
            expected = self.world.completions[tracked.content][tracked.prompt]
            if end.reason is FinishReason.CANCELLED:
                assert tokens == expected[: len(tokens)], tracked
            else:
                assert (end.reason, tokens) == (FinishReason.LENGTH, expected), tracked

    def _change_adapters(self, rng: random.Random) -> None:
        while not self.stop.is_set():
            name, content = rng.choice(NAMES), f"a{rng.randrange(CONTENTS)}"
            self.change(name, None if rng.random() < 0.2 else content)
            time.sleep(0.01 * rng.random())

    def change(self, name: str, content: str | None) -> None:
        operation = f"t{next(self._numbers)}"
        self.ledger.operations[operation], self.ledger.settled[operation] = (name, content), threading.Event()
        if content is None:
            self.loop.unload(operation, name)
        else:
            self.loop.load(operation, name, self.world.path(content), replace=True)
        assert self.ledger.settled[operation].wait(60), "a load hangs"

    def figures(self) -> dict:
        operation = f"s{next(self._numbers)}"
        self.ledger.settled[operation] = threading.Event()
        self.loop.stats(operation)
        assert self.ledger.settled[operation].wait(60)
        return self.ledger.figures[operation]


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory) -> World:
    return make_world(tiny, tmp_path_factory.mktemp("adapters"), CONTENTS)


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("copying", [False, True], ids=["device pool", "host and device pools"])
@pytest.mark.parametrize("seconds", [5, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_every_completion_is_that_of_its_version_under_churn(world, monkeypatch, copying, seconds):
    use_pools(monkeypatch, copying=copying)
    largest = max(
        EngineCore(copy.deepcopy(world.base)).prepare(world.path(name)).packed.nbytes
        for name in world.completions.keys() - {"base"}
    )
    config = AdapterCacheConfig(device_bytes=largest + 4096, host_bytes=2 * largest, slots=4, max_wait_s=0.02)
    flats, adapters, threads = alive(PackedAdapter), alive(EngineAdapter), threading.active_count()
    core = EngineCore(copy.deepcopy(world.base), pages=200, page_size=4, residency=config)
    churn = Churn(core, world)
    churn.run(seconds)
    ledger = churn.ledger
    assert not ledger.wrong, ledger.wrong[:5]
    assert all(tracked.over.is_set() for tracked in ledger.requests.values())
    for name in NAMES:
        churn.change(name, None)
    until = time.monotonic() + 30
    while (found := churn.figures()["adapter_cache"])["loading"] or found["resident"]:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    figures = churn.figures()
    print(ledger.counts, figures)
    assert (figures["running"], figures["waiting"], figures["blocks_free"]) == (0, 0, figures["blocks"])
    assert (
        figures["adapter_cache"]["registered"]
        == figures["adapter_cache"]["device_bytes"]
        == figures["adapter_cache"]["host_bytes"]
        == 0
    )
    assert min(churn.seen()) > 1
    core._adapter_cache.check_integrity()
    core.scheduler.check_integrity()
    assert core.is_idle()
    churn.loop.close()
    assert (alive(PackedAdapter), alive(EngineAdapter)) == (flats, adapters), "unreferenced adapters are still alive"
    del core, churn, ledger
    gc.collect()
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= threads
