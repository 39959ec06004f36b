"""The engine as this process sees it: orders go out over the line, events come back, and each order ends once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from symbiosis.errors import EngineLost, SymbiosisError, from_code
from symbiosis.transport.engine_ipc import IpcClient

_START_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """`n` answers to one prompt. `sampling` has fields of `engine.sequences.Sampling`."""

    prompt: Sequence[int]
    sampling: dict[str, Any]
    adapter: str | None
    tenant: str
    n: int = 1


@dataclass(frozen=True, slots=True)
class Token:
    order: int
    """Which of the orders begun together."""
    number: int
    """Which of its answers."""
    token: int
    chosen: float | None = None
    """Its logprob, if asked for."""
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class End:
    order: int
    number: int
    reason: str
    cached: int


class EngineClient:
    """One for a process. Every method raises `EngineLost` once the engine is gone."""

    def __init__(self, line: IpcClient) -> None:
        self._line = line
        self._numbers = itertools.count()
        self._inboxes: dict[str, asyncio.Queue[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Returns when the engine has answered."""
        self._reader = asyncio.create_task(self._read())
        await self._line.send({"op": "hello", "id": "hello"})
        try:
            async with asyncio.timeout(_START_S):
                await self._heard.wait()
        except TimeoutError:
            raise EngineLost("the engine does not answer") from None

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._line.close()

    def is_alive(self) -> bool:
        return not self.lost.is_set()

    def begin(self, orders: Sequence[Order]) -> ActiveRequests:
        """Orders whose events come together. A context manager: what has not ended at its end is cancelled."""
        return ActiveRequests(self, orders)

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        """load, unload, pin, stats or check_adapter; raises what the engine answers with."""
        id, inbox = await self.open({"op": op, **body})
        try:
            event = await inbox.get()
        finally:
            self.forget(id)
        if event is None:
            raise _lost()
        if "refused" in event:
            raise error_of(event["refused"])
        settled: dict[str, Any] = event["settled"]
        return settled

    async def open(self, body: dict[str, Any], inbox: asyncio.Queue[Any] | None = None) -> tuple[str, asyncio.Queue[Any]]:
        """Send a message with an id of its own; what answers it goes to the inbox. None in it: the engine is lost."""
        if self.lost.is_set():
            raise _lost()
        id = str(next(self._numbers))
        self._inboxes[id] = inbox = inbox or asyncio.Queue()
        try:
            await self._line.send({**body, "id": id})
        except BaseException:
            self.forget(id)
            raise
        return id, inbox

    def forget(self, id: str) -> None:
        self._inboxes.pop(id, None)

    async def cancel(self, id: str, number: int | None = None) -> None:
        if not self.lost.is_set():
            await self._line.send({"op": "cancel", "id": id, "number": number})

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        """Let a job stop after the step under way, or after the pass under way; its end comes to its inbox."""
        if not self.lost.is_set():
            await self._line.send({"op": "stop_training", "id": id, "at_once": at_once})

    async def _read(self) -> None:
        try:
            async for message in self._line.messages():
                self._heard.set()
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
    """Orders under way. Entering waits until all are accepted, or raises why one was not."""

    def __init__(self, remote: EngineClient, orders: Sequence[Order]) -> None:
        self._remote, self._orders = remote, orders
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._ids: dict[str, int] = {}
        self._early: list[Any] = []
        self._left: set[tuple[int, int]] = set()

    async def __aenter__(self) -> ActiveRequests:
        try:
            for place, order in enumerate(self._orders):
                body: dict[str, Any] = {"op": "submit", "prompt": order.prompt, "sampling": order.sampling}
                body |= {"adapter": order.adapter, "tenant": order.tenant, "n": order.n}
                id, _ = await self._remote.open(body, self._inbox)
                self._ids[id] = place
                self._left |= {(place, number) for number in range(order.n)}
            accepted = 0
            while accepted < len(self._orders):
                event = await self._next()
                if isinstance(event, dict) and "accepted" in event:
                    accepted += 1
                else:  # others may speak before the last is accepted
                    self._early.append(event)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def events(self) -> AsyncIterator[Token | End]:
        """Until every answer has ended or been cancelled; raises if one failed, or the engine is lost."""
        while self._left:
            event = self._early.pop(0) if self._early else await self._next()
            if isinstance(event, list):
                place = self._ids[event[0]]
                if (place, event[1]) in self._left:
                    yield Token(place, *event[1:])
                continue
            place, number = self._ids[event["id"]], event["number"]
            if (place, number) in self._left:
                self._left.discard((place, number))
                if "error" in event:
                    raise error_of(event["error"])
                yield End(place, number, event["end"], event["cached"])

    async def stop(self, place: int, number: int) -> None:
        """This answer is complete: nothing more comes of it."""
        self._left.discard((place, number))
        id = next(id for id, each in self._ids.items() if each == place)
        await self._remote.cancel(id, number)

    async def _next(self) -> Any:
        event = await self._inbox.get()
        if event is None:
            raise _lost()
        if isinstance(event, dict) and "refused" in event:
            place = self._ids[event["id"]]
            self._left = {each for each in self._left if each[0] != place}
            raise error_of(event["refused"])
        return event

    async def _close(self) -> None:
        for id, place in self._ids.items():
            self._remote.forget(id)
            if any(each[0] == place for each in self._left):
                await asyncio.shield(self._remote.cancel(id))


def error_of(body: dict[str, Any]) -> SymbiosisError:
    error = from_code(body["code"], body["message"])
    if body.get("field"):
        error.field = body["field"]  # type: ignore[attr-defined]
    return error


def _lost() -> EngineLost:
    return EngineLost("the serving engine is gone; it may be started again")
