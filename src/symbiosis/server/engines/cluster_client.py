"""The engines of a cluster, seen from an HTTP process: requests go on at another engine if theirs is lost, closes or leaves.

The director chooses engines. Tokens come from engines directly. Without the director, requests go to the least loaded of the
engines that are known.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from symbiosis.errors import Closed, EngineLost, SymbiosisError
from symbiosis.server.engines.director_link import DirectorLink
from symbiosis.server.engines.engine_client import ActiveRequests, EngineClient
from symbiosis.server.engines.prompt_blocks import hash_blocks
from symbiosis.server.engines.rpc_client import AnyInbox, Inbox, RpcClient, lost_error, result_of
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import GenerateRequest
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, IpcClient

_CONNECT_S = 10.0
_SILENCE_S = 3.0  # an engine sends a heartbeat every second
_PROGRESS_S = 0.05
_KNOWN_S = 2.0
"""An engine that the director has chosen is known here within this time, or it is gone."""
_CLOSING_S = 0.05
_AGAIN_S = 1.0
_log = logging.getLogger("symbiosis")


class ClusterClient:
    """One per HTTP process, with the interface `Engine`."""

    def __init__(self, director: EngineAddress, key: ClusterKey, *, patience_s: float = 30.0) -> None:
        """Without an engine or a director, requests and operations fail with `EngineLost` after `patience_s`.

        Requests wait for busy engines without a limit of their own.
        """
        self._key, self._patience_s = key, patience_s
        self._link = DirectorLink(director, key, self._follow)
        self._engines: dict[str, EngineClient] = {}
        self._addresses: dict[str, EngineAddress] = {}
        self._unreachable: set[str] = set()
        """Engines of the director's table that were lost, or could not be reached, since."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._placements: dict[str, _Placement] = {}
        """By id."""
        self._adapters: dict[tuple[str, str | None], set[str]] = {}
        """Engines that an adapter of a tenant was used on."""
        self._watch_id = ""
        self._first: list[int] = []
        self._ended: list[tuple[int, int]] = []
        self._preempted: list[int] = []
        self._owners: dict[str, RpcClient] = {}
        """Directors that operations were sent to."""
        self.lost = asyncio.Event()
        """Never set: engines and directors come back."""

    async def start(self) -> None:
        """Returns when the director has replied."""
        self._link.start()
        await self._link.get(self._patience_s)
        self._start_task(self._report_progress())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    def is_alive(self) -> bool:
        """Whether an engine is there."""
        return any(engine.is_alive() for engine in self._engines.values())

    @property
    def engines(self) -> list[str]:
        """Names of the engines that take requests."""
        return sorted(self._engines)

    # Operations of the director

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        return await (await self._link.get(self._patience_s)).ask(op, **body)

    async def open(self, body: dict[str, Any], inbox: AnyInbox) -> str:
        """Its last event is `EngineLost` if this director is lost."""
        client, last = await self._link.get(self._patience_s), _OpenOperation(inbox)
        id = last.id = await client.open(body, last)
        self._owners[id] = client
        return id

    async def send(self, body: dict[str, Any]) -> None:
        if self._link.client is not None:
            await self._link.client.send(body)

    def forget(self, id: str) -> None:
        if (client := self._owners.pop(id, None)) is not None:
            client.forget(id)

    async def acquire(self, tenant: str) -> str:
        while True:
            client = await self._link.get(self._patience_s)
            try:
                id = await client.acquire(tenant)
            except EngineLost:
                if client.is_alive():
                    raise
            else:  # a director that is lost has given back what it held for this process
                self._owners[id] = client
                return id

    async def release(self, id: str) -> None:
        if (client := self._owners.pop(id, None)) is not None:
            await client.release(id)

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        if (client := self._owners.get(id)) is not None:
            await client.stop_training(id, at_once=at_once)

    # Engines

    async def _follow(self, client: RpcClient) -> None:
        """Keep to the director's table of engines, for as long as it lives."""
        inbox = Inbox()
        self._watch_id = await client.open({"op": "watch"}, inbox)
        for placement in self._placements.values():
            placement.number = 0  # of another director
        while client.is_alive():
            for raw in await inbox.take():
                if raw is None:
                    return
                if "engines" in raw:
                    addresses = {name: EngineAddress.from_json(each) for name, each in raw["engines"].items()}
                    self._add_engines(addresses)
                for number in raw.get("move", ()):
                    self._leave(number)

    def _leave(self, number: int) -> None:
        for id, placement in self._placements.items():
            if placement.number == number:
                placement.inbox.put_nowait(id)

    def _add_engines(self, addresses: Mapping[str, EngineAddress]) -> None:
        """Connect to new engines. The others stay until their link is lost: a director that has just started knows none."""
        self._unreachable &= addresses.keys()
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                self._addresses[name] = address
                self._start_task(self._use(name, address))

    async def _use(self, name: str, address: EngineAddress) -> None:
        """An engine, until it is lost."""
        engine = EngineClient(IpcClient(address, self._key, timeout_s=_SILENCE_S))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await engine.start()
        except (EngineLost, TimeoutError):
            _log.warning("engine %s at %s cannot be reached: it takes no requests", name, address.messages)
        else:
            self._unreachable.discard(name)
            async with self._changed:
                self._engines[name] = engine
                self._changed.notify_all()
            await engine.lost.wait()
            _log.warning("engine %s is lost", name)
        finally:
            self._unreachable.add(name)
            if self._engines.get(name) is engine:
                del self._engines[name]
                for names in self._adapters.values():
                    names.discard(name)
            if self._addresses.get(name) == address:
                del self._addresses[name]
            await engine.close()  # its requests go on elsewhere
        await asyncio.sleep(_AGAIN_S)
        if self._link.client is not None:  # the director may have kept it
            await self._link.client.send({"op": "watch", "id": self._watch_id})

    # Requests

    @asynccontextmanager
    async def submit(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[ActiveRequests]:
        """As `EngineClient.submit`. Seeds are fixed here: another engine must sample what the first would have sampled."""
        active = ActiveRequests(self, [_with_seed(request) for request in requests])
        try:
            await active.start()
            yield active
        finally:
            await active.close()

    async def place(self, request: GenerateRequest, inbox: Inbox, moved: str | None = None) -> tuple[EngineClient, str]:
        """See `engine_client.Engines`."""
        before = None if moved is None else self._placements.pop(moved, None)
        number, unreachable, left = 0, set(self._unreachable), ""
        if before is not None:
            number = before.number
            unreachable.add(before.engine)  # the director may not know yet that it is lost, or closes
            if before.client.is_alive():
                left = before.engine
        try:
            async with asyncio.timeout(self._patience_s) as patience:
                while True:
                    name, number, owner = await self._choose(request, number, unreachable, patience)
                    try:
                        engine = await self._find(name)
                        source = self._addresses.get(left or owner) if name != (left or owner) else None
                        id = await engine.open(messages.encode_request(replace(request, source=source)), inbox)
                    except EngineLost:
                        unreachable.add(name)
                        await asyncio.sleep(_CLOSING_S)
                        continue
                    self._placements[id] = _Placement(number, inbox, name, engine)
                    if request.adapter is not None:
                        self._adapters.setdefault((request.tenant, request.adapter), set()).add(name)
                    return engine, id
        except TimeoutError:
            self._finish(number, 0)
            raise EngineLost(f"no engine of the cluster took the request within {self._patience_s:g} s") from None
        except BaseException:
            self._finish(number, 0)
            raise

    async def _choose(
        self, request: GenerateRequest, moved: int, unreachable: Collection[str], patience: asyncio.Timeout
    ) -> tuple[str, int, str]:
        """The name of an engine, the number of the placement, and an engine that has more of the prompt, or nothing.

        `unreachable` engines are chosen if there is no other. `patience` begins again while engines are there.
        """
        while True:
            client = self._link.client
            if client is not None and client.is_alive():
                with suppress(EngineLost):
                    return await self._ask_director(client, request, moved, unreachable, patience)
                if client.is_alive():
                    raise EngineLost("no engine of the cluster is there: try again in a moment")
            known = self._known(request)
            if known:
                return min(known, key=lambda name: (self._engines[name].num_open, name)), 0, ""
            await asyncio.sleep(_PROGRESS_S)

    def _known(self, request: GenerateRequest) -> list[str]:
        """Engines that can take the request without the director."""
        alive = [name for name, engine in self._engines.items() if engine.is_alive()]
        if request.adapter is None:
            return alive
        used = self._adapters.get((request.tenant, request.adapter), set())
        return [name for name in alive if name in used]

    async def _ask_director(
        self, client: RpcClient, request: GenerateRequest, moved: int, unreachable: Collection[str], patience: asyncio.Timeout
    ) -> tuple[str, int, str]:
        generated = 0 if request.resume is None else max(len(each or ()) for each in request.resume)
        body = {
            "op": "place",
            "tenant": request.tenant,
            "adapter": request.adapter,
            "prompt": len(request.prompt),
            "generated": generated,
            "blocks": hash_blocks(request.prompt, request.tenant, request.adapter),
            "moved": moved,
            "unreachable": sorted(unreachable),
        }
        inbox = Inbox()
        id = await client.open(body, inbox)
        try:
            while (events := await self._wait_for(inbox)) is None:
                if self.is_alive():  # engines are busy, and the director has the request in its queue
                    patience.reschedule(asyncio.get_running_loop().time() + self._patience_s)
            reply = result_of(events)
        except asyncio.CancelledError:
            await asyncio.shield(client.send({"op": "withdraw", "id": "0", "of": id}))
            raise
        finally:
            client.forget(id)
        return reply["engine"], reply["placement"], reply["source"] or ""

    async def _wait_for(self, inbox: Inbox) -> list[Any] | None:
        """The events of an inbox, or None after some time without one."""
        try:
            async with asyncio.timeout(min(_KNOWN_S, self._patience_s / 2)):
                return await inbox.take()
        except TimeoutError:
            return None

    async def _find(self, name: str) -> EngineClient:
        """Raises `EngineLost`."""
        if name not in self._engines:
            with suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_S), self._changed:
                    await self._changed.wait_for(lambda: name in self._engines)
        engine = self._engines.get(name)
        if engine is None:
            raise EngineLost(f"the engine {name} is gone")
        return engine

    def can_resume(self, error: SymbiosisError) -> bool:
        """See `engine_client.Engines`."""
        return isinstance(error, Closed | EngineLost)

    def begin(self, id: str) -> None:
        """See `engine_client.Engines`."""
        if (placement := self._placements.get(id)) is not None and placement.number > 0:
            self._first.append(placement.number)

    def report_pressure(self, id: str) -> None:
        """See `engine_client.Engines`."""
        if (placement := self._placements.get(id)) is not None and placement.number > 0:
            self._preempted.append(placement.number)

    def end(self, id: str, tokens: int) -> None:
        """See `engine_client.Engines`."""
        if (placement := self._placements.pop(id, None)) is not None:
            self._finish(placement.number, tokens)

    def _finish(self, number: int, tokens: int) -> None:
        if number > 0:
            self._ended.append((number, tokens))

    async def _report_progress(self) -> None:
        """Many events are one message."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if self._first or self._ended or self._preempted:
                body = {"op": "progress", "id": "0", "first": self._first, "ended": self._ended, "preempted": self._preempted}
                self._first, self._ended, self._preempted = [], [], []
                await self.send(body)

    def _start_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class _Placement:
    """A request at an engine."""

    number: int
    """At the director; 0 if it does not know the request."""
    inbox: Inbox
    engine: str
    client: EngineClient


class _OpenOperation:
    """An inbox for which the loss of the director is an event of the operation."""

    def __init__(self, inbox: AnyInbox) -> None:
        self._inbox, self.id = inbox, ""

    def put_nowait(self, event: Any) -> None:
        if event is None:
            event = messages.encode_event(messages.Rejected("", lost_error()), self.id)
        self._inbox.put_nowait(event)


def _with_seed(request: GenerateRequest) -> GenerateRequest:
    if request.sampling.seed is not None or request.sampling.is_greedy:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(62)))
