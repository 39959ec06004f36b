"""The engine, seen from an HTTP process: operations go out over IPC, events come back, and each request ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from symbiosis.errors import SymbiosisError
from symbiosis.server.engines.rpc_client import Inbox, RpcClient
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Accepted, Finished, GenerateRequest, Preempted, Rejected, Token
from symbiosis.transport.engine_ipc import IpcClient


class EngineClient(RpcClient):
    """The engine: completions besides its operations."""

    def __init__(self, ipc: IpcClient) -> None:
        super().__init__(ipc)
        self._connected = False
        """Whether the socket of the tokens is."""

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

    async def place(self, request: GenerateRequest, inbox: Inbox, moved: str | None = None) -> tuple[EngineClient, str]:
        """See `Engines`."""
        return self, await self.open(messages.encode_request(request), inbox)

    def can_resume(self, error: SymbiosisError) -> bool:
        """See `Engines`: there is no other engine."""
        return False

    def begin(self, id: str) -> None:
        """See `Engines`."""

    def report_pressure(self, id: str) -> None:
        """See `Engines`: it goes on here."""

    def end(self, id: str, tokens: int) -> None:
        """See `Engines`."""

    async def cancel(self, id: str, number: int | None = None) -> None:
        await self.send({"op": "cancel", "id": id, "number": number})

    def _receive_tokens(self, frame: bytes) -> None:
        if not frame:
            self._connected = True
            self._greeted()
        inboxes, own = self._inboxes, self._peer
        for stream, token in messages.decode_tokens(frame):
            peer, id, number = messages.split_stream(stream)
            if peer == own and (inbox := inboxes.get(id)) is not None:
                inbox.put_nowait((id, number, token))

    def _greeted(self) -> None:
        if self._connected and self._peer is not None:  # both sockets must be connected
            self._replied.set()


class Engines(Protocol):
    """One engine, or those of a cluster."""

    async def place(self, request: GenerateRequest, inbox: Inbox, moved: str | None = None) -> tuple[EngineClient, str]:
        """Send a request to an engine; the engine, and the request's id there. Raises `EngineLost` if there is none.

        `moved`: its id at the engine that it leaves. The id alone in the inbox means that it has to leave.
        """

    def can_resume(self, error: SymbiosisError) -> bool:
        """Whether requests that ended in this error go on at another engine."""

    def begin(self, id: str) -> None:
        """A request has its first token from this engine."""

    def report_pressure(self, id: str) -> None:
        """The engine of a request is out of KV cache and has preempted it: it may have to leave."""

    def end(self, id: str, tokens: int) -> None:
        """A request leaves the cluster after so many tokens."""


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
        self._count = 0
        """Tokens so far."""
        self._pending: set[str] = set()
        """Ids that no engine has accepted yet."""
        self._silent: set[str] = set()
        """Ids without a token."""

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
                        if event.id in self._silent:
                            self._silent.discard(event.id)
                            self._engines.begin(event.id)
                        tokens.append(event.token)
                        self._count += 1
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
            self._engines.end(id, self._count)
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
            elif type(raw) is str:
                moving.add(raw)
            elif raw is None:
                moving |= {id for id, (_, engine) in self._placed.items() if not engine.is_alive()}
            else:
                event = messages.decode_event(raw)
                if isinstance(event, Accepted):
                    self._pending.discard(event.id)
                    continue
                if isinstance(event, Preempted):
                    if event.id in self._placed:  # not of an earlier placement
                        self._engines.report_pressure(event.id)
                    continue
                assert isinstance(event, Token | Finished | Rejected)
                if not isinstance(event, Token) and event.error is not None and self._engines.can_resume(event.error):
                    moving.add(event.id)
                else:
                    found.append(event)
        return found, moving

    async def _place(self, index: int, request: GenerateRequest, moved: str | None = None) -> None:
        engine, id = await self._engines.place(request, self._inbox, moved)
        self._placed[id] = index, engine
        self._pending.add(id)
        self._silent.add(id)

    async def _move(self, ids: set[str]) -> None:
        """Place requests again, each after the tokens of its unfinished completions. Raises `EngineLost`."""
        for id in sorted(ids & self._placed.keys(), key=int):
            index, engine = self._placed.pop(id)
            self._pending.discard(id)
            self._silent.discard(id)
            engine.forget(id)
            await engine.cancel(id)  # no effect at an engine that is lost
            request = self._requests[index]
            keys = [(index, number) for number in range(request.n)]
            for key in keys:
                self._ends.pop(key, None)
            resume = [list(self._tokens[key]) if key in self._tokens else None for key in keys]
            if any(tokens is not None for tokens in resume):
                await self._place(index, replace(request, resume=resume), id)
            else:
                self._engines.end(id, self._count)
