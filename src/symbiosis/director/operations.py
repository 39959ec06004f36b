"""Operations of the director as coroutines: the RPC server's thread hands them to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from symbiosis.errors import Closed, SymbiosisError
from symbiosis.serving.engine_messages import Rejected, Result
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.engine_ipc import Body

Operation = Callable[[str, Body], Awaitable[Body | None]]
"""Gets the id and the message. Its result is the reply; None: it replies by itself, or never."""
_WITHDRAW = "withdraw"
_log = logging.getLogger("symbiosis")


class Operations:
    """An RPC handler. Create it on the event loop that runs the operations."""

    def __init__(self, rpc: RpcServer) -> None:
        self.rpc = rpc
        self._loop = asyncio.get_running_loop()
        self._table: dict[str, Operation] = {_WITHDRAW: self._withdraw}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_lost: list[Callable[[str], None]] = []
        self._closed = False
        rpc.add_handler(self)

    @property
    def operations(self) -> Collection[str]:
        return self._table.keys()

    def add(self, name: str, operation: Operation) -> None:
        self._table[name] = operation

    def on_lost_peer(self, callback: Callable[[str], None]) -> None:
        """Called on the event loop with the number of each lost peer, after its operations were cancelled."""
        self._on_lost.append(callback)

    # On the RPC server's thread

    def handle(self, id: str, body: Body) -> None:
        if self._closed:
            raise Closed("the director is shutting down")
        self._loop.call_soon_threadsafe(self._start, id, body)

    def drop_peer(self, peer: str) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(self._drop, peer)

    def close(self) -> None:
        self._closed = True

    # On the event loop

    def _start(self, id: str, body: Body) -> None:
        task = asyncio.create_task(self._run(id, body))
        self._tasks[id] = task
        task.add_done_callback(lambda _: self._tasks.pop(id, None))

    async def _run(self, id: str, body: Body) -> None:
        try:
            result = await self._table[body["op"]](id, body)
            if result is not None:
                self.rpc.publish([Result(id, result)])
        except SymbiosisError as error:
            self.rpc.publish([Rejected(id, error)])
        except Exception as error:  # noqa: BLE001 - every operation has a reply
            _log.exception("an operation of the director failed")
            self.rpc.publish([Rejected(id, SymbiosisError(f"the director failed: {type(error).__name__}"))])

    async def _withdraw(self, id: str, body: Body) -> None:
        """End an operation of the same peer without a reply."""
        task = self._tasks.get(f"{id.partition(':')[0]}:{body.get('of')!s}")
        if task is not None:
            task.cancel()

    def _drop(self, peer: str) -> None:
        for id, task in list(self._tasks.items()):
            if id.startswith(f"{peer}:"):
                task.cancel()
        for callback in self._on_lost:
            callback(peer)

    def stop(self) -> list[asyncio.Task[Any]]:
        """Cancel all operations; their tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks
