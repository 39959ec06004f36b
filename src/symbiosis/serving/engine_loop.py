"""Runs the engine core on one thread: operations in, events out.

Operations (requests, cancels, loaded adapters) run between two steps on the stepping thread, without locks. The events of
one step leave as one batch. Adapters are read and checked on a loader thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from symbiosis.adapters.names import resolve_adapter_name
from symbiosis.common import denormals
from symbiosis.errors import AdapterExists, AnswerFailed, Closed, PassFailed, SymbiosisError, TooManyRequests, UnknownAdapter
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_messages import Accepted, Event, Finished, GenerateRequest, Preempted, Rejected, Result, Token
from symbiosis.serving.lora.adapter_registry import AdapterVersion, PreparedAdapter
from symbiosis.serving.scheduling.sequence import FinishReason, Sequence

_MAX_LOADS = 64
_STALL_S = 0.01
_log = logging.getLogger("symbiosis")
_OnClosed = Callable[[SymbiosisError], None]


class EngineLoop:
    """Steps a core until closed. Every method is thread-safe and returns at once.

    `publish` receives events in order, a batch at a time, and `publish_tokens` the tokens of a step (stream and token in
    turns) of requests with a stream. The stepping thread calls them: they must be quick and must not raise.
    """

    def __init__(
        self,
        core: EngineCore,
        publish: Callable[[list[Event]], None],
        publish_tokens: Callable[[list[int]], None] = lambda values: None,
    ) -> None:
        self._core, self._publish, self._publish_tokens = core, publish, publish_tokens
        self._inbox: SimpleQueue[tuple[_OnClosed | None, Callable[[], None]] | None] = SimpleQueue()
        self._events: list[Event] = []
        self._requests: dict[str, list[Sequence]] = {}  # unfinished sequences by request id
        self._request_ids: dict[str, str] = {}  # by sequence id
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-adapters")
        self._loads: set[str] = set()  # operation ids
        self._num_loads = 0
        self._load_s = 0.0
        self._takes_requests = True
        self._closed = False
        self._is_stalled = False  # sequences wait, and the last step computed nothing
        self._lock = threading.Lock()
        core.on_adapter_change(lambda: self._put(None, core.poll_adapters))
        self._thread = threading.Thread(target=self._run, name="symbiosis-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest, unnamed: PreparedAdapter | None = None) -> None:
        """`Accepted` and a `Finished` for each completion, or `Rejected`. `unnamed` is an adapter without a name."""
        self._put_operation(request.id, lambda: self._add(request, unnamed))

    def cancel(self, id: str, number: int | None = None) -> None:
        """Finish a request, or one of its completions; no effect on finished ones."""
        self._put(None, lambda: self._cancel(id, number))

    def cancel_all(self, prefix: str) -> None:
        """Finish the requests whose ids begin so: their peer is lost."""
        self._put(None, lambda: self._cancel_all(prefix))

    def load(self, id: str, name: str, location: str, *, replace: bool = False) -> None:
        """Serve the adapter at a location: `Result` with its hash, generation and seconds, or `Rejected`."""
        folder = self._core.folders.find(location)
        self._put_operation(id, lambda: self._begin_load(id, name, folder, replace))

    def serve(self, name: str, prepared: PreparedAdapter) -> Future[AdapterVersion]:
        """Serve a prepared adapter under this name from the next step on. Fails with `Closed` if the loop is closed."""
        served: Future[AdapterVersion] = Future()
        self._put(served.set_exception, lambda: self._serve(name, prepared, served))
        return served

    def unload(self, id: str, name: str) -> None:
        """Remove a name; accepted requests keep the adapter. `Result` or `Rejected`."""
        self._put_operation(id, lambda: self._reply(id, lambda: self._core.remove_adapter(name)))

    def pin(self, id: str, name: str, pinned: bool) -> None:
        """Pin an adapter to the device, or unpin it. `Result` or `Rejected`."""
        self._put_operation(id, lambda: self._reply(id, lambda: self._core.pin_adapter(name, pinned)))

    def stats(self, id: str) -> None:
        """`Result` with statistics of scheduler, KV cache and adapters."""
        self._put_operation(id, lambda: self._events.append(Result(id, self._stats())))

    def fetch_stats(self) -> Future[dict[str, Any]]:
        """The same within this process. Fails with `Closed` if the loop is closed."""
        fetched: Future[dict[str, Any]] = Future()
        self._put(fetched.set_exception, lambda: fetched.set_result(self._stats()))
        return fetched

    def call(self, action: Callable[[], None]) -> None:
        """Run it on the stepping thread, unless the loop is closed."""
        self._put(None, action)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end_requests(self) -> int:
        """Unfinished requests fail with `Closed`, and new ones; operations go on until `close`. How many there were."""
        ended: Future[int] = Future()
        self._put(lambda error: ended.set_result(0), lambda: ended.set_result(self._end_requests()))
        return ended.result()

    def close(self) -> None:
        """Unfinished requests and operations fail with `Closed`."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join(timeout=60)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _put(self, on_closed: _OnClosed | None, action: Callable[[], None]) -> None:
        with self._lock:  # nothing may enter the inbox after the thread has emptied it for the last time
            if not self._closed:
                self._inbox.put((on_closed, action))
                return
        if on_closed is not None:
            on_closed(Closed("the engine was closed"))

    def _put_operation(self, id: str, action: Callable[[], None]) -> None:
        """An operation that ends in an event."""
        self._put(lambda error: self._publish([Rejected(id, error)]), action)

    # On the stepping thread

    def _run(self) -> None:
        denormals.flush_to_zero()
        try:
            while self._run_operations():
                self._step()
                self._send()
        except BaseException:
            _log.exception("the engine loop failed")
            raise
        finally:
            self._close_all()

    def _run_operations(self) -> bool:
        """Run the operations that are in the inbox; waits for one if the core is idle. False: the loop was closed."""
        count = self._inbox.qsize()  # not those that come meanwhile: there may always be more
        while True:
            if not count:
                self._send()  # the events of all of them at once: their receiver competes for the interpreter lock
                is_idle = self._core.is_idle()
                if not is_idle and not self._is_stalled:
                    return True
                try:
                    operation = self._inbox.get(timeout=None if is_idle else _STALL_S)
                except Empty:
                    return True
                count = self._inbox.qsize()
            else:
                operation = self._inbox.get()
                count -= 1
            self._is_stalled = False  # the operation may have changed what can be computed
            if operation is None:
                return False
            operation[1]()

    def _step(self) -> None:
        self._is_stalled = False
        num_steps = self._core.num_steps
        try:
            sampled = self._core.step()
        except PassFailed as failure:
            _log.exception("a step failed, and with it its %d completions", len(failure.requests))
            for sequence in failure.requests:
                self._finish(sequence, PassFailed(str(failure)))
            if not self._core.is_sound():
                raise
            return
        values: list[int] = []
        for sequence, token, logprobs in sampled:
            if token >= 0:
                if sequence.stream >= 0 and logprobs is None:
                    values.append(sequence.stream)
                    values.append(token)
                elif (id := self._request_ids.get(sequence.id)) is not None:
                    self._events.append(Token(id, sequence.number, token, logprobs))
            if sequence.reason is not None:
                self._finish(sequence)
        if values:
            self._publish_tokens(values)
        if self._core.num_steps == num_steps and not self._core.is_idle():
            self._is_stalled = True  # do not spin: wait a moment for operations

    def _send(self) -> None:
        preempted = {self._request_ids.get(sequence.id) for sequence in self._core.take_preempted()}
        self._events += [Preempted(id) for id in preempted if id is not None]
        for sequence, error in self._core.take_failed():
            self._finish(sequence, error)
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _add(self, request: GenerateRequest, unnamed: PreparedAdapter | None) -> None:
        try:
            if not self._takes_requests:
                raise Closed("the engine was closed")
            if request.id in self._requests:
                raise SymbiosisError(f"request {request.id!r} exists already: choose another id")
            adapter: str | PreparedAdapter | None = request.adapter if unnamed is None else unnamed
            model = None
            if isinstance(adapter, str):  # the version is fixed within this operation, when the request is queued
                adapter, model = self._resolve(adapter, request.tenant)
            sequences = self._core.add_several(
                request.n,
                request.prompt,
                request.sampling,
                adapter=adapter,
                tenant=request.tenant,
                resume=request.resume,
                source=request.source,
                model=model,
            )
        except SymbiosisError as error:
            self._events.append(Rejected(request.id, error))
            return
        if request.stream >= 0:
            for sequence in sequences:
                sequence.stream = request.stream + sequence.number
        self._requests[request.id] = sequences
        self._request_ids.update((sequence.id, request.id) for sequence in sequences)
        self._events.append(Accepted(request.id))
        for sequence in list(sequences):
            if sequence.reason is not None:  # it was resumed after its last token
                self._finish(sequence)

    def _resolve(self, name: str, tenant: str) -> tuple[str | None, str | None]:
        """The adapter or the model that a tenant calls so. An adapter of its own comes first. Raises `UnknownAdapter`."""
        try:
            return resolve_adapter_name(name, tenant, self._core.adapter_names), None
        except UnknownAdapter:
            if name in self._core.chains.by_name:
                return None, name
            raise

    def _cancel(self, id: str, number: int | None) -> None:
        for sequence in list(self._requests.get(id, ())):
            if number is None or sequence.number == number:
                self._core.cancel(sequence)
                self._finish(sequence)

    def _cancel_all(self, prefix: str) -> None:
        lost = [id for id in self._requests if id.startswith(prefix)]
        if lost:
            _log.warning("a peer is lost: its %d requests are cancelled", len(lost))
        for id in lost:
            self._cancel(id, None)

    def _finish(self, sequence: Sequence, error: SymbiosisError | None = None) -> None:
        id = self._request_ids.pop(sequence.id, None)
        if id is None:
            return
        unfinished = self._requests[id]
        unfinished.remove(sequence)
        if not unfinished:
            del self._requests[id]
        reason = sequence.reason or FinishReason.FAILED
        if reason is FinishReason.FAILED and error is None:
            error = AnswerFailed("no token could be sampled: the model's logits are NaN or infinite")
        cached, tokens = sequence.num_cached_tokens or 0, sequence.output_length
        self._events.append(Finished(id, sequence.number, reason, cached, tokens, error))

    def _begin_load(self, id: str, name: str, folder: Path, replace: bool) -> None:
        if len(self._loads) >= _MAX_LOADS:
            message = (
                f"too many adapters are loading: 1 new + {len(self._loads)} loading > {_MAX_LOADS} allowed. Try again later"
            )
            self._events.append(Rejected(id, TooManyRequests(message)))
        elif name in self._core.adapter_names and not replace:
            self._events.append(Rejected(id, _exists(name)))
        elif name in self._core.chains.by_name:
            self._events.append(Rejected(id, AdapterExists(f"{name!r} is the name of a model: choose another")))
        else:
            self._loads.add(id)
            self._loader.submit(self._load, id, name, folder, replace)

    def _load(self, id: str, name: str, folder: Path, replace: bool) -> None:
        """On the loader thread."""
        start_s = time.monotonic()
        loaded: PreparedAdapter | SymbiosisError
        try:
            loaded = self._core.prepare(folder)
        except SymbiosisError as error:
            loaded = error
        except Exception as error:  # noqa: BLE001 - every operation has a reply
            _log.exception("an adapter could not be loaded")
            loaded = SymbiosisError(f"the adapter could not be loaded: {type(error).__name__}")
        seconds = time.monotonic() - start_s
        self._put(None, lambda: self._end_load(id, name, loaded, replace, seconds))

    def _end_load(self, id: str, name: str, loaded: PreparedAdapter | SymbiosisError, replace: bool, seconds: float) -> None:
        self._loads.discard(id)
        if isinstance(loaded, PreparedAdapter) and name in self._core.adapter_names and not replace:
            loaded = _exists(name)
        if isinstance(loaded, SymbiosisError):
            self._events.append(Rejected(id, loaded))
            return
        version = self._core.put_adapter(name, loaded)
        self._num_loads += 1
        self._load_s += seconds
        self._events.append(Result(id, {"hash": version.hash, "generation": version.generation, "seconds": seconds}))

    def _serve(self, name: str, prepared: PreparedAdapter, served: Future[AdapterVersion]) -> None:
        try:
            served.set_result(self._core.put_adapter(name, prepared))
        except SymbiosisError as error:
            served.set_exception(error)

    def _reply(self, id: str, action: Callable[[], None]) -> None:
        try:
            action()
        except SymbiosisError as error:
            self._events.append(Rejected(id, error))
        else:
            self._events.append(Result(id, {}))

    def _stats(self) -> dict[str, Any]:
        scheduler, block_manager = self._core.scheduler, self._core.scheduler.block_manager
        adapters = self._core.adapter_stats()
        return {
            "models": self._core.chains.stats(),
            "adapters": self._core.adapters,
            "adapter_models": self._core.adapter_models,
            "adapters_pinned": sorted(self._core.pinned),
            "adapters_on_device": self._core.adapters_on_device,
            "adapters_resident": adapters.resident,
            "adapters_loading": len(self._loads),
            "adapter_loads": self._num_loads,
            "adapter_load_s": self._load_s,
            "adapter_cache": asdict(adapters),
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "blocks": block_manager.num_blocks,
            "blocks_free": block_manager.num_free_blocks,
            "blocks_cached": block_manager.num_cached_blocks,
            "host_blocks": block_manager.host.num_blocks,
            "host_blocks_used": block_manager.host.num_used,
            "host_blocks_stored": block_manager.host.num_stored,
            "host_blocks_restored": block_manager.host.num_restored,
            "blocks_fetched": block_manager.num_received,
            "blocks_sent": block_manager.num_sent,
            "preemptions": scheduler.num_preemptions,
            "block_size": block_manager.block_size,
            "max_model_len": scheduler.max_model_len,
            "steps": self._core.num_steps,
            "rows": self._core.num_rows,
            "tokens": self._core.num_sampled,
        }

    def _end_requests(self) -> int:
        self._takes_requests = False
        count = len(self._requests)
        for sequences in list(self._requests.values()):
            for sequence in list(sequences):
                self._core.cancel(sequence)
                self._finish(sequence, Closed("the engine was closed"))
        return count

    def _close_all(self) -> None:
        with self._lock:
            self._closed = True
        self._end_requests()
        closed = Closed("the engine was closed")
        while not self._inbox.empty():
            operation = self._inbox.get()
            if operation is not None and operation[0] is not None:
                operation[0](closed)
        self._events += [Rejected(id, closed) for id in self._loads]
        self._send()


def _exists(name: str) -> AdapterExists:
    return AdapterExists(f"an adapter {name!r} is served already: unload it first, or replace it (load_inplace)")
