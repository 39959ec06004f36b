"""The engine, seen from an HTTP process: operations go out over IPC, events come back, and each request ends once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from symbiosis.errors import EngineLost
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Event, Finished, GenerateRequest, JobEvent, Token
from symbiosis.transport.engine_ipc import IpcClient

_START_TIMEOUT_S = 60.0


class EngineClient:
    """One per process. Every method raises `EngineLost` once the engine is gone."""

    def __init__(self, ipc: IpcClient) -> None:
        self._ipc = ipc
        self._ids = itertools.count()
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Returns when the engine has replied."""
        self._reader = asyncio.create_task(self._read())
        await self._ipc.send({"op": "hello", "id": "hello"})
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._connected.wait()
        except TimeoutError:
            raise EngineLost(f"the engine did not reply within {_START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._ipc.close()

    def is_alive(self) -> bool:
        return not self.lost.is_set()

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

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """The result of load, unload, pin, stats or check_adapter. Raises the engine's error."""
        id, inbox = await self.open({"op": op, **body})
        try:
            event = _decode(await inbox.get())
        finally:
            self.forget(id)
        if isinstance(event, messages.Rejected):
            raise event.error
        assert isinstance(event, messages.Result)
        return event.body

    async def open(self, body: dict[str, Any], inbox: asyncio.Queue[Any] | None = None) -> tuple[str, asyncio.Queue[Any]]:
        """Send an operation with a new id; its encoded events go to the inbox. None in it: the engine is lost."""
        if self.lost.is_set():
            raise _lost()
        id = str(next(self._ids))
        self._inboxes[id] = inbox = inbox or asyncio.Queue()
        try:
            await self._ipc.send({**body, "id": id})
        except BaseException:
            self.forget(id)
            raise
        return id, inbox

    def forget(self, id: str) -> None:
        """Drop further events of this id."""
        self._inboxes.pop(id, None)

    async def cancel(self, id: str, number: int | None = None) -> None:
        if not self.lost.is_set():
            await self._ipc.send({"op": "cancel", "id": id, "number": number})

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        """Stop a job after its current step, or after the current batch; its end goes to its inbox."""
        if not self.lost.is_set():
            await self._ipc.send({"op": "stop_training", "id": id, "at_once": at_once})

    async def _read(self) -> None:
        try:
            async for message in self._ipc.messages():
                self._connected.set()
                if message.get("beat") is False:
                    return
                for event in message.get("events", ()):
                    inbox = self._inboxes.get(event[0] if isinstance(event, list) else event["id"])
                    if inbox is not None:
                        inbox.put_nowait(event)
        finally:
            self.lost.set()
            for inbox in self._inboxes.values():
                inbox.put_nowait(None)


class ActiveRequests:
    """Submitted requests and their events."""

    def __init__(self, client: EngineClient, requests: Sequence[GenerateRequest]) -> None:
        self._client, self._requests = client, requests
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._indices: dict[str, int] = {}  # by id
        self._early: list[Event | JobEvent] = []
        self._unfinished: set[tuple[str, int]] = set()

    async def start(self) -> None:
        """Send the requests; returns when all are accepted. Raises why one was rejected."""
        for index, request in enumerate(self._requests):
            id, _ = await self._client.open(messages.encode_request(request), self._inbox)
            self._indices[id] = index
            self._unfinished |= {(id, number) for number in range(request.n)}
        num_accepted = 0
        while num_accepted < len(self._requests):
            event = await self._next()
            if isinstance(event, messages.Accepted):
                num_accepted += 1
            else:  # the first request may have events before the last is accepted
                self._early.append(event)

    async def events(self) -> AsyncIterator[tuple[int, Token | Finished]]:
        """(index of the request, event) until every completion has finished or was stopped.

        Raises the error of a completion that failed, or `EngineLost`.
        """
        while self._unfinished:
            event = self._early.pop(0) if self._early else await self._next()
            assert isinstance(event, Token | Finished)
            if (event.id, event.number) not in self._unfinished:
                continue
            if isinstance(event, Finished):
                self._unfinished.discard((event.id, event.number))
                if event.error is not None:
                    raise event.error
            yield self._indices[event.id], event

    async def stop(self, event: Token) -> None:
        """The completion of this token is complete: cancel it and drop its further events."""
        self._unfinished.discard((event.id, event.number))
        await self._client.cancel(event.id, event.number)

    async def _next(self) -> Event | JobEvent:
        event = _decode(await self._inbox.get())
        if isinstance(event, messages.Rejected):
            self._unfinished = {each for each in self._unfinished if each[0] != event.id}
            raise event.error
        return event

    async def close(self) -> None:
        """Cancel unfinished requests."""
        for id in self._indices:
            self._client.forget(id)
            if any(each[0] == id for each in self._unfinished):
                await asyncio.shield(self._client.cancel(id))


def _decode(raw: Any) -> Event | JobEvent:
    """An event of an inbox. Raises `EngineLost`."""
    if raw is None:
        raise _lost()
    return messages.decode_event(raw)


def _lost() -> EngineLost:
    return EngineLost("the serving engine is gone; it may be restarted")
