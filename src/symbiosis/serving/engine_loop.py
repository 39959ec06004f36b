"""Where requests come in and answers go out, while one thread steps the engine.

Whatever arrives (requests, cancels, adapters that were read) is done between
two passes, on the stepping thread: nothing needs a lock. What a pass made goes
out as one batch. Adapters are read and checked on a thread of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from symbiosis.adapters.names import found
from symbiosis.common import denormals
from symbiosis.errors import AdapterExists, AnswerFailed, Closed, PassFailed, SymbiosisError, TooManyRequests
from symbiosis.serving.engine import EngineCore
from symbiosis.serving.lora.adapter_registry import AdapterVersion, PreparedAdapter
from symbiosis.serving.model.sampler import Logprobs
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from symbiosis.serving.scheduling.sequence import Sequence as Answer

_MAX_LOADS = 64
_STUCK_S = 0.01
_log = logging.getLogger("symbiosis")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A request: `n` answers to one prompt."""

    id: str
    """Chosen by whoever asks; no two at once."""
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None
    """As its tenant names it; whose it is, `names.found` says."""
    tenant: str = ""
    n: int = 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """The order is queued; each of its answers will end once."""

    id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The order never began: this is all there will be of it. Or: what a ticket stood for failed."""

    id: str
    error: SymbiosisError


@dataclass(frozen=True, slots=True)
class Token:
    id: str
    number: int
    token: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The one end of one answer; with the error if it failed."""

    id: str
    number: int
    reason: FinishReason
    cached: int = 0
    """Tokens of its prompt that were found in the cache."""
    error: SymbiosisError | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a ticket (load, unload, stats) came to."""

    id: str
    body: dict[str, Any]


Event = Accepted | Rejected | Token | Finished | Result


class EngineLoop:
    """Runs a core until closed. Every method may be called by any thread and returns at once.

    `out` gets what happened, in order, a batch at a time: from the stepping
    thread, so it must be quick, and it must not raise.
    """

    def __init__(self, core: EngineCore, out: Callable[[list[Event]], None]) -> None:
        self._core, self._out = core, out
        self._inbox: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        self._events: list[Event] = []
        self._orders: dict[str, list[Answer]] = {}  # answers that have not ended
        self._places: dict[str, tuple[str, int]] = {}  # sequence -> order, number
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-adapters")
        self._loads: set[str] = set()  # tickets
        self._serving: list[Future[AdapterVersion]] = []
        self.more_figures: Callable[[], dict[str, Any]] = dict
        """What others of this process want to be known by `stats`; quick, and called by the stepping thread."""
        self._loaded = 0
        self._load_s = 0.0
        self._closed = False
        self._stuck = False  # somebody waits, and nothing could be computed
        self._lock = threading.Lock()
        core.call_on_news(lambda: self._put("", self._take_up))
        self._thread = threading.Thread(target=self._run, name="symbiosis-engine", daemon=True)
        self._thread.start()

    def submit(self, order: GenerateRequest, unnamed: PreparedAdapter | None = None) -> None:
        """`Accepted` and then an `Finished` for each answer, or `Rejected`. `unnamed`: by this adapter, which has no name."""
        self._put(order.id, lambda: self._add(order, unnamed))

    def cancel(self, id: str, number: int | None = None) -> None:
        """End an order, or one of its answers; nothing happens if it has ended."""
        self._put("", lambda: self._cancel(id, number))

    def load(self, ticket: str, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Serve the adapter of a folder: `Result` with its hash and seconds, or `Rejected`."""
        self._put(ticket, lambda: self._begin_load(ticket, name, Path(folder), replace))

    def serve(self, name: str, prepared: PreparedAdapter) -> Future[AdapterVersion]:
        """Serve what was prepared under this name, before the next pass. Ends in `Closed` if the engine was closed."""
        served: Future[AdapterVersion] = Future()
        with self._lock:
            if not self._closed:
                self._serving.append(served)
                self._inbox.put(("", lambda: self._serve(name, prepared, served)))
                return served
        served.set_exception(Closed("the engine was closed"))
        return served

    def unload(self, ticket: str, name: str) -> None:
        """Who runs with it ends with it; nobody new gets it. `Result` or `Rejected`."""
        self._put(ticket, lambda: self._settle(ticket, lambda: self._core.remove_adapter(name)))

    def pin(self, ticket: str, name: str, pinned: bool) -> None:
        """Let it stay on the device, or leave like any other. `Result` or `Rejected`."""
        self._put(ticket, lambda: self._settle(ticket, lambda: self._core.pin_adapter(name, pinned)))

    def stats(self, ticket: str) -> None:
        self._put(ticket, lambda: self._events.append(Result(ticket, self._figures())))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End everything: whatever has not ended fails with `Closed`."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join(timeout=60)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _put(self, id: str, action: Callable[[], None]) -> None:
        with self._lock:  # after the thread's last look nothing may be put in
            if not self._closed:
                self._inbox.put((id, action))
                return
        if id:
            self._out([Rejected(id, Closed("the engine was closed"))])

    # On the stepping thread

    def _run(self) -> None:
        denormals.count_as_zero()
        try:
            while self._take():
                self._step()
                self._end_failed()
                self._send()
        except BaseException:
            _log.exception("the engine's loop failed")
            raise
        finally:
            self._end_all()

    def _take(self) -> bool:
        """Do what has arrived; waits if there is nothing else to do. False: the end."""
        wait = self._core.is_idle()
        while True:
            try:
                arrived = self._inbox.get(block=wait or self._stuck, timeout=None if wait else _STUCK_S)
            except Empty:
                return True
            self._stuck = False  # no reason to wait for more before trying
            if arrived is None:
                return False
            arrived[1]()
            self._send()
            wait = self._core.is_idle()

    def _take_up(self) -> None:
        self._core.take_up()
        self._end_failed()

    def _end_failed(self) -> None:
        for answer, error in self._core.take_failed():
            self._end(answer, error)

    def _step(self) -> None:
        self._stuck = False
        before = self._core.passes
        try:
            made = self._core.step()
        except PassFailed as failure:
            _log.exception("a pass failed; its %d answers fail with it", len(failure.requests))
            for answer in failure.requests:
                self._end(answer, PassFailed(str(failure)))
            if not self._core.is_sound():
                raise
            return
        for answer, token, logprobs in made:
            place = self._places.get(answer.id)
            if place is None:
                continue
            if token >= 0:
                self._events.append(Token(*place, token, logprobs))
            if answer.reason is not None:
                self._end(answer)
        if self._core.passes == before and not self._core.is_idle():
            self._stuck = True  # no reason to turn at full speed: what arrives wakes

    def _send(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._out(events)

    def _add(self, order: GenerateRequest, unnamed: PreparedAdapter | None) -> None:
        try:
            if order.id in self._orders:
                raise SymbiosisError(f"there is an order {order.id!r} already: choose another id")
            answers = self._queued(order, unnamed)
        except SymbiosisError as error:
            self._events.append(Rejected(order.id, error))
            return
        self._orders[order.id] = answers
        for answer in answers:
            self._places[answer.id] = (order.id, answer.number)
        self._events.append(Accepted(order.id))

    def _queued(self, order: GenerateRequest, unnamed: PreparedAdapter | None) -> list[Answer]:
        if unnamed is not None:
            return self._core.add_unnamed(order.n, order.prompt, order.sampling, unnamed, tenant=order.tenant)
        adapter = None if order.adapter is None else found(order.adapter, order.tenant, self._core.adapters)
        return self._core.add_several(order.n, order.prompt, order.sampling, adapter=adapter, tenant=order.tenant)

    def _cancel(self, id: str, number: int | None) -> None:
        for answer in list(self._orders.get(id, ())):
            if number is None or answer.number == number:
                self._core.cancel(answer)
                self._end(answer)

    def _end(self, answer: Answer, error: SymbiosisError | None = None) -> None:
        place = self._places.pop(answer.id, None)
        if place is None:
            return
        left = self._orders[place[0]]
        left.remove(answer)
        if not left:
            del self._orders[place[0]]
        reason = answer.reason or FinishReason.FAILED
        if reason is FinishReason.FAILED and error is None:
            error = AnswerFailed("the model gave NaN or infinity where numbers were expected, so no token could be chosen")
        self._events.append(Finished(*place, reason, answer.cached or 0, error))

    def _begin_load(self, ticket: str, name: str, folder: Path, replace: bool) -> None:
        if len(self._loads) >= _MAX_LOADS:
            error = TooManyRequests(f"{len(self._loads)} adapters are being loaded, at most {_MAX_LOADS} may. Try again later")
            self._events.append(Rejected(ticket, error))
        elif name in self._core.adapters and not replace:
            self._events.append(Rejected(ticket, _exists(name)))
        else:
            self._loads.add(ticket)
            self._loader.submit(self._load, ticket, name, folder, replace)

    def _load(self, ticket: str, name: str, folder: Path, replace: bool) -> None:
        """On the loader's thread."""
        begun = time.monotonic()
        found: PreparedAdapter | SymbiosisError
        try:
            found = self._core.prepare(folder)
        except SymbiosisError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - somebody waits for an answer
            _log.exception("an adapter could not be loaded")
            found = SymbiosisError(f"the adapter could not be loaded: {type(error).__name__}")
        seconds = time.monotonic() - begun
        self._put("", lambda: self._end_load(ticket, name, found, replace, seconds))

    def _end_load(self, ticket: str, name: str, found: PreparedAdapter | SymbiosisError, replace: bool, seconds: float) -> None:
        self._loads.discard(ticket)
        if isinstance(found, PreparedAdapter) and name in self._core.adapters and not replace:
            found = _exists(name)
        if isinstance(found, SymbiosisError):
            self._events.append(Rejected(ticket, found))
            return
        version = self._core.put_adapter(name, found)
        self._loaded += 1
        self._load_s += seconds
        self._events.append(Result(ticket, {"hash": version.hash, "generation": version.generation, "seconds": seconds}))

    def _serve(self, name: str, prepared: PreparedAdapter, served: Future[AdapterVersion]) -> None:
        self._serving.remove(served)
        try:
            version = self._core.put_adapter(name, prepared)
        except SymbiosisError as error:
            served.set_exception(error)
        else:
            served.set_result(version)

    def _settle(self, ticket: str, action: Callable[[], None]) -> None:
        try:
            action()
        except SymbiosisError as error:
            self._events.append(Rejected(ticket, error))
        else:
            self._events.append(Result(ticket, {}))

    def _figures(self) -> dict[str, Any]:
        scheduler, pool = self._core.scheduler, self._core.scheduler.pool
        adapters = self._core.figures()
        return {
            "adapters": self._core.adapters,
            "adapters_pinned": sorted(self._core.pinned),
            "adapters_resident": adapters.resident,
            "adapters_loading": len(self._loads),
            "adapter_loads": self._loaded,
            "adapter_load_s": self._load_s,
            "residency": asdict(adapters),
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "pages": pool.count,
            "pages_free": pool.available,
            "pages_cached": pool.cached,
            "page_size": pool.page_size,
            "longest": scheduler.longest,
            "passes": self._core.passes,
            **self.more_figures(),
        }

    def _end_all(self) -> None:
        with self._lock:
            self._closed = True
        closed = Closed("the engine was closed")
        for answers in list(self._orders.values()):
            for answer in list(answers):
                self._core.cancel(answer)
                self._end(answer, closed)
        while not self._inbox.empty():
            arrived = self._inbox.get()
            if arrived is not None and arrived[0]:
                self._events.append(Rejected(arrived[0], closed))
        self._events += [Rejected(ticket, closed) for ticket in self._loads]
        for served in self._serving:
            served.set_exception(closed)
        self._send()


def _exists(name: str) -> AdapterExists:
    return AdapterExists(f"an adapter {name!r} is served already: unload it first, or replace it (load_inplace)")
