"""A process with operations, an engine or a cluster's director, seen from an HTTP process."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any, Protocol

from symbiosis.errors import EngineLost
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Event, JobEvent, Rejected
from symbiosis.transport.engine_ipc import IpcClient

_START_TIMEOUT_S = 60.0
_HELLO_S = 0.1
_ids = itertools.count()  # of operations, over all servers of this process


class Inbox:
    """Encoded events of some operations, for one task. None: the server is lost.

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


class AnyInbox(Protocol):
    """Where events of an operation go. None: the server is lost."""

    def put_nowait(self, event: Any) -> None: ...


class RpcClient:
    """One per process and server. Every method raises `EngineLost` once the server is gone."""

    def __init__(self, ipc: IpcClient) -> None:
        self._ipc = ipc
        self._inboxes: dict[int, AnyInbox] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._peer: int | None = None
        """This process's number at the server."""
        self._replied = asyncio.Event()
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Returns when the server has replied."""
        self._ipc.open(self._receive, self._receive_tokens)
        self._watcher = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not self._replied.is_set():
                    await self._ipc.send({"op": "hello", "id": "0"})
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._replied.wait(), _HELLO_S)
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

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """The result of an operation, such as load, stats or check_adapter. Raises the engine's error."""
        inbox = Inbox()
        id = await self.open({"op": op, **body}, inbox)
        try:
            return result_of(await inbox.take())
        finally:
            self.forget(id)

    async def send(self, body: dict[str, Any]) -> None:
        """Send an operation that has no result; nothing happens if the engine is lost."""
        if not self.lost.is_set():
            await self._ipc.send(body)

    async def open(self, body: dict[str, Any], inbox: AnyInbox) -> str:
        """Send an operation with a new id, which is returned; its events go to the inbox."""
        if self.lost.is_set():
            raise lost_error()
        id = str(number := next(_ids))
        self._inboxes[number] = inbox
        try:
            await self._ipc.send({**body, "id": id})
        except BaseException:
            self.forget(id)
            raise
        return id

    async def acquire(self, tenant: str) -> str:
        """Take a place of the tenant's rate limits; its id. Raises `TooManyRequests`."""
        inbox = Inbox()
        id = await self.open({"op": "acquire", "tenant": tenant}, inbox)
        try:
            result_of(await inbox.take())
        except asyncio.CancelledError:
            await asyncio.shield(self.release(id))  # it may be taken by now
            raise
        finally:
            self.forget(id)
        return id

    async def release(self, id: str) -> None:
        """Give a place back."""
        await self.send({"op": "release", "id": id})

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        """Stop a job after its current step, or after the current batch; its end goes to its inbox."""
        await self.send({"op": "stop_training", "id": id, "at_once": at_once})

    def forget(self, id: str) -> None:
        """Drop further events of this id."""
        self._inboxes.pop(int(id), None)

    def _receive_tokens(self, frame: bytes) -> None:
        """A server without tokens sends none."""

    def _receive(self, message: dict[str, Any]) -> None:
        if message.get("beat") is False:
            self._ipc.lost.set()
        if self._peer is None and "peer" in message:
            self._peer = message["peer"]
            self._greeted()
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

    def _greeted(self) -> None:
        """The server has replied."""
        self._replied.set()


def decode(raw: Any) -> Event | JobEvent:
    """An event of an inbox. Raises `EngineLost`."""
    if raw is None:
        raise lost_error()
    return messages.decode_event(raw)


def result_of(events: list[Any]) -> dict[str, Any]:
    """The body of an operation's result. Raises its error."""
    event = decode(events[0])
    if isinstance(event, Rejected):
        raise event.error
    assert isinstance(event, messages.Result)
    return event.body


def lost_error() -> EngineLost:
    return EngineLost("the serving engine is gone; it may be restarted")
