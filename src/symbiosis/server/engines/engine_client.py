"""The engine, seen from an HTTP process: operations go out over IPC, events come back, and each request ends once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from symbiosis.errors import EngineLost, SymbiosisError
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Accepted, Event, Finished, GenerateRequest, JobEvent, Rejected, Token
from symbiosis.transport.engine_ipc import IpcClient

_START_TIMEOUT_S = 60.0
_HELLO_S = 0.1
_ids = itertools.count()  # of operations, over all engines of this process


class Inbox:
    """Encoded events of some operations, for one task. None: the engine is lost.

    A token without logprobs is a tuple (id, index of the completion, token).
    """

    __slots__ = ("_events", "_waiter")

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, event: Any) -> None:
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Any]:
        """All events there are; waits for the first."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events


AnyInbox = Inbox | asyncio.Queue[Any]


class EngineClient:
    """One per process. Every method raises `EngineLost` once the engine is gone."""

    def __init__(self, ipc: IpcClient) -> None:
        self._ipc = ipc
        self._inboxes: dict[int, AnyInbox] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._peer: int | None = None
        """This process's number in streams."""
        self._connected = asyncio.Event()
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Returns when the engine has replied."""
        self._ipc.open(self._receive, self._receive_tokens)
        self._watcher = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while self._peer is None or not self._connected.is_set():  # both sockets must be connected
                    await self._ipc.send({"op": "hello", "id": "0"})
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._connected.wait(), _HELLO_S)
        except TimeoutError:
            raise EngineLost(f"the engine did not reply within {_START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()  # operations that have not ended end as if the engine was lost
            await asyncio.wait({self._watcher})
        self._ipc.close()

    def is_alive(self) -> bool:
        return not self.lost.is_set()

    @property
    def num_open(self) -> int:
        """Operations that have not ended, requests included."""
        return len(self._inboxes)

    @asynccontextmanager
    async def submit(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[ActiveRequests]:
        """Requests whose events are read together, once all are accepted; the exit cancels unfinished ones.

        Raises why a request was rejected.
        """
        active = ActiveRequests(self, requests)
        try:
            await active.start()
            yield active
        finally:
            await active.close()

    async def place(self, request: GenerateRequest, inbox: Inbox) -> tuple[EngineClient, str]:
        """See `Engines`."""
        return self, await self.open(messages.encode_request(request), inbox)

    def can_resume(self, error: SymbiosisError) -> bool:
        """See `Engines`: there is no other engine."""
        return False

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """The result of an operation, such as load, stats or check_adapter. Raises the engine's error."""
        inbox = Inbox()
        id = await self.open({"op": op, **body}, inbox)
        try:
            return _result(await inbox.take())
        finally:
            self.forget(id)

    async def acquire(self, tenant: str) -> str:
        """Take a place of the tenant's rate limits; its id. Raises `TooManyRequests`."""
        inbox = Inbox()
        id = await self.open({"op": "acquire", "tenant": tenant}, inbox)
        try:
            _result(await inbox.take())
        except asyncio.CancelledError:
            await asyncio.shield(self.release(id))  # it may be taken by now
            raise
        finally:
            self.forget(id)
        return id

    async def release(self, id: str) -> None:
        """Give a place back."""
        await self.send({"op": "release", "id": id})

    async def send(self, body: dict[str, Any]) -> None:
        """Send an operation that has no result; nothing happens if the engine is lost."""
        if not self.lost.is_set():
            await self._ipc.send(body)

    async def open(self, body: dict[str, Any], inbox: AnyInbox) -> str:
        """Send an operation with a new id, which is returned; its events go to the inbox."""
        if self.lost.is_set():
            raise _lost()
        id = str(number := next(_ids))
        self._inboxes[number] = inbox
        try:
            await self._ipc.send({**body, "id": id})
        except BaseException:
            self.forget(id)
            raise
        return id

    def forget(self, id: str) -> None:
        """Drop further events of this id."""
        self._inboxes.pop(int(id), None)

    async def cancel(self, id: str, number: int | None = None) -> None:
        await self.send({"op": "cancel", "id": id, "number": number})

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        """Stop a job after its current step, or after the current batch; its end goes to its inbox."""
        await self.send({"op": "stop_training", "id": id, "at_once": at_once})

    def _receive_tokens(self, frame: bytes) -> None:
        if not frame:
            self._connected.set()
        inboxes, own = self._inboxes, self._peer
        for stream, token in messages.decode_tokens(frame):
            peer, id, number = messages.split_stream(stream)
            if peer == own and (inbox := inboxes.get(id)) is not None:
                inbox.put_nowait((id, number, token))

    def _receive(self, message: dict[str, Any]) -> None:
        if message.get("beat") is False:
            self._ipc.lost.set()
        self._peer = message.get("peer", self._peer)
        for event in message.get("events", ()):
            if (inbox := self._inboxes.get(int(event[0] if isinstance(event, list) else event["id"]))) is not None:
                inbox.put_nowait(event)

    async def _watch(self) -> None:
        try:
            await self._ipc.lost.wait()
        finally:
            self.lost.set()
            for inbox in self._inboxes.values():
                inbox.put_nowait(None)


class Engines(Protocol):
    """One engine, or those of a cluster."""

    async def place(self, request: GenerateRequest, inbox: Inbox) -> tuple[EngineClient, str]:
        """Send a request to an engine; the engine, and the request's id there. Raises `EngineLost` if there is none."""

    def can_resume(self, error: SymbiosisError) -> bool:
        """Whether requests that ended in this error go on at another engine."""


class ActiveRequests:
    """Submitted requests and their events.

    It keeps the tokens of each completion. A request whose engine is lost goes on at another one, if there is one, after these
    tokens. Each placement has an id of its own, so nothing that an engine sends late is delivered.
    """

    def __init__(self, engines: Engines, requests: Sequence[GenerateRequest]) -> None:
        self._engines, self._requests = engines, requests
        self._inbox = Inbox()
        self._placed: dict[str, tuple[int, EngineClient]] = {}
        """Index of the request, and its engine, by id."""
        self._tokens: dict[tuple[int, int], list[int]] = {}
        """Of each unfinished completion: by index of the request, and number."""
        self._ends: dict[tuple[int, int], Finished] = {}
        """That arrived before the last tokens."""
        self._early: list[Token | Finished] = []
        self._pending: set[str] = set()
        """Ids that no engine has accepted yet."""

    async def start(self) -> None:
        """Send the requests; returns when all are accepted. Raises why one was rejected."""
        for index, request in enumerate(self._requests):
            self._tokens |= {(index, number): [] for number in range(request.n)}
            await self._place(index, request)
        while self._pending:
            arrived, moving = await self._take()
            for event in arrived:
                if isinstance(event, Rejected):
                    self._placed.pop(event.id, None)
                    raise event.error
                self._early.append(event)  # the first request may have events before the last is accepted
            await self._move(moving)

    async def events(self) -> AsyncIterator[list[tuple[int, Token | Finished]]]:
        """(index of the request, event), all there are at a time, until every completion has finished or was stopped.

        Raises the error of a completion that failed, or `EngineLost`, after the events before it.
        """
        while self._tokens:
            early, self._early = self._early, []
            arrived, moving = (early, set[str]()) if early else await self._take()
            events: list[tuple[int, Token | Finished]] = []
            failure: SymbiosisError | None = None
            try:
                for event in arrived:
                    placed = self._placed.get(event.id)
                    if placed is None:
                        continue  # of an earlier placement
                    if isinstance(event, Rejected):
                        raise event.error
                    index, end = placed[0], None
                    key = index, event.number
                    if (tokens := self._tokens.get(key)) is None:
                        continue
                    if isinstance(event, Token):
                        tokens.append(event.token)
                        events.append((index, event))
                        end = self._ends.get(key) if self._ends else None
                    else:
                        end = self._ends[key] = event
                    if end is not None and len(tokens) >= end.tokens:
                        del self._tokens[key], self._ends[key]
                        if end.error is not None:
                            raise end.error
                        events.append((index, end))
            except SymbiosisError as error:
                failure = error
            yield events
            if failure is not None:
                raise failure
            await self._move(moving)

    async def stop(self, event: Token) -> None:
        """The completion of this token is complete: cancel it and drop its further events."""
        index, engine = self._placed[event.id]
        self._tokens.pop((index, event.number), None)
        await engine.cancel(event.id, event.number)

    async def close(self) -> None:
        """Cancel unfinished requests."""
        unfinished = {index for index, _ in self._tokens}
        for id, (_, engine) in self._placed.items():
            engine.forget(id)
        left = [engine.cancel(id) for id, (index, engine) in self._placed.items() if index in unfinished]
        if left:
            await asyncio.shield(asyncio.gather(*left))

    async def _take(self) -> tuple[list[Token | Finished | Rejected], set[str]]:
        """All events there are, waits for the first; and the ids of requests whose engine has sent its last."""
        found: list[Token | Finished | Rejected] = []
        moving: set[str] = set()
        for raw in await self._inbox.take():
            if type(raw) is tuple:
                found.append(Token(str(raw[0]), raw[1], raw[2]))
            elif raw is None:
                moving |= {id for id, (_, engine) in self._placed.items() if not engine.is_alive()}
            else:
                event = messages.decode_event(raw)
                if isinstance(event, Accepted):
                    self._pending.discard(event.id)
                    continue
                assert isinstance(event, Token | Finished | Rejected)
                if not isinstance(event, Token) and event.error is not None and self._engines.can_resume(event.error):
                    moving.add(event.id)
                else:
                    found.append(event)
        return found, moving

    async def _place(self, index: int, request: GenerateRequest) -> None:
        engine, id = await self._engines.place(request, self._inbox)
        self._placed[id] = index, engine
        self._pending.add(id)

    async def _move(self, ids: set[str]) -> None:
        """Place requests again, each after the tokens of its unfinished completions. Raises `EngineLost`."""
        for id in sorted(ids & self._placed.keys(), key=int):
            index, engine = self._placed.pop(id)
            self._pending.discard(id)
            engine.forget(id)
            request = self._requests[index]
            keys = [(index, number) for number in range(request.n)]
            for key in keys:
                self._ends.pop(key, None)
            resume = [list(self._tokens[key]) if key in self._tokens else None for key in keys]
            if any(tokens is not None for tokens in resume):
                await self._place(index, replace(request, resume=resume))


def _decode(raw: Any) -> Event | JobEvent:
    """An event of an inbox. Raises `EngineLost`."""
    if raw is None:
        raise _lost()
    return messages.decode_event(raw)


def _result(events: list[Any]) -> dict[str, Any]:
    """The body of an operation's result. Raises its error."""
    event = _decode(events[0])
    if isinstance(event, Rejected):
        raise event.error
    assert isinstance(event, messages.Result)
    return event.body


def _lost() -> EngineLost:
    return EngineLost("the serving engine is gone; it may be restarted")
