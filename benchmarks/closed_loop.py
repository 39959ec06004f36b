"""Clients that send requests without a pause to models of one engine, or of several: for `zoo_serving`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

STAY = 4  # times the load
_TICK_S, _MAX_GAP_S = 0.05, 1.0  # a step may hold the interpreter for a part of a second


class Clock:
    """Seconds in which this process could run: on a shared machine others may stop it (SIGSTOP) for a while."""

    def __init__(self) -> None:
        self.stopped_s = 0.0
        self._last = 0.0

    def start(self) -> None:
        if not self._last:
            self._last = time.perf_counter()
            threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> float:
        return time.perf_counter() - self.stopped_s

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_S)
            now = time.perf_counter()
            if now - self._last > _MAX_GAP_S:
                self.stopped_s += now - self._last - _TICK_S
            self._last = now


CLOCK = Clock()


@dataclass
class Client:
    """Sends its requests one after the other."""

    number: int
    model: int
    left: int
    sequence: Any = None
    sent: float = 0.0
    latencies: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)


class Clients:
    """The load of one run."""

    def __init__(self, *, count: int, models: int, requests: int, prompt: int, new: int, vocabulary: int, seed: int) -> None:
        """`count` clients, each with so many requests to one of so many models. Prompts depend on the seed."""
        from symbiosis.serving.scheduling.sequence import Sampling

        self._prompt, self._vocabulary, self._seed = prompt, vocabulary, seed
        self._sampling = Sampling(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.all = [Client(number, number % models, requests) for number in range(count)]
        self.tokens = 0

    def prompt(self, client: Client) -> list[int]:
        import torch

        generator = torch.Generator().manual_seed(1000 * (1000 * self._seed + client.number) + client.left)
        return torch.randint(1, self._vocabulary, (self._prompt,), generator=generator).tolist()  # type: ignore[no-any-return]

    def begin(self) -> None:
        now = CLOCK.now()
        for client in self.all:
            client.sent = now

    def send(self, client: Client, core: Any, **names: Any) -> None:
        client.sequence = core.add(self.prompt(client), self._sampling, **names)

    def collect(self, clients: Sequence[Client]) -> None:
        """Take the answers that are complete. Their clients want to send again."""
        for client in clients:
            if client.sequence is not None and client.sequence.reason is not None:
                now = CLOCK.now()
                client.latencies.append(now - client.sent)
                client.outputs.append(client.sequence.outputs)
                self.tokens += len(client.sequence.outputs)
                client.sequence, client.sent, client.left = None, now, client.left - 1

    def waiting(self, model: int | None = None) -> list[Client]:
        """Clients that have a request to send."""
        return [each for each in self.all if each.sequence is None and each.left and model in (None, each.model)]


def step(core: Any) -> None:
    steps = core.num_steps
    core.step()
    if core.num_steps == steps and not core.is_idle():
        core.wait(1.0)


def run_one_engine(core: Any, clients: Clients, names: Callable[[Client], dict[str, Any]]) -> None:
    clients.begin()
    while waiting := clients.waiting():
        for client in waiting:
            clients.send(client, core, **names(client))
        while not clients.waiting() and not core.is_idle():
            step(core)
            clients.collect(clients.all)


def run_turns(cores: Sequence[Any], clients: Clients) -> None:
    """A step of each engine in turn."""
    clients.begin()
    while any(client.left for client in clients.all):
        for model, core in enumerate(cores):
            for client in clients.waiting(model):
                clients.send(client, core)
            if not core.is_idle():
                step(core)
                clients.collect([client for client in clients.all if client.model == model])


class Slots:
    """Engines of the models that are loaded."""

    def __init__(self, count: int, load: Callable[[int, int], Any]) -> None:
        """`load`: the engine of a model, in a slot."""
        self._load = load
        self.load_s: list[float] = []
        self.loaded: deque[tuple[int, int, Any, float, float]] = deque()
        """Model, slot, engine, when it was loaded, seconds that took; the first loaded first."""
        for number in range(count):
            self.load(number, number)

    def load(self, model: int, slot: int) -> None:
        started = CLOCK.now()
        core = self._load(model, slot)
        now = CLOCK.now()
        self.load_s.append(now - started)
        self.loaded.append((model, slot, core, now, now - started))


def run_provisioned(slots: Slots, clients: Clients) -> None:
    slots.load_s.clear()
    clients.begin()
    while any(client.left for client in clients.all):
        missing = {client.model: client.sent for client in reversed(clients.waiting())}
        for model, *_ in slots.loaded:
            missing.pop(model, None)
        for position, (model, slot, core, loaded, took) in enumerate(list(slots.loaded)):
            is_leaving = bool(missing) and not position and CLOCK.now() - loaded >= STAY * took
            is_leaving = is_leaving or (bool(missing) and not clients.waiting(model) and core.is_idle())
            if not is_leaving:
                for client in clients.waiting(model):
                    clients.send(client, core)
            elif core.is_idle():
                slots.loaded.remove((model, slot, core, loaded, took))
                del core
                slots.load(min(missing, key=lambda each: missing[each]), slot)
                break
            if not core.is_idle():
                step(core)
                clients.collect([client for client in clients.all if client.model == model])
