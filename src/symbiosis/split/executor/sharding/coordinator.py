"""Runs operations on all shards in one order.

The leader decides the order: it announces each operation to the others. An operation belongs to the rank whose tenant
asked for it, its origin: rows go from the origin to the others, results come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symbiosis.common import denormals
from symbiosis.distributed.mesh import ShardMesh
from symbiosis.errors import ShardLost, SymbiosisError

_MAX_HANDLES = 24
_KEEP_ALIVE_S = 10.0
_log = logging.getLogger("symbiosis")


class OperationKind(IntEnum):
    """What all ranks do."""

    KEEP_ALIVE = 0
    STOP = 1
    CALL = 2
    """Each rank computes its part of a layer."""
    GATHER = 3
    """Each rank sends its part of a layer's weights to the origin."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Announced to all ranks."""

    kind: OperationKind
    origin: int
    handles: tuple[int, ...] = ()
    is_backward: bool = False
    rows: int = 0
    choices: int = 0
    """Of experts: how many of them for each row."""

    def to_tensor(self) -> Tensor:
        fields = [self.kind, self.origin, int(self.is_backward), self.rows, self.choices, len(self.handles), *self.handles]
        return torch.tensor(fields + [0] * (_HEADER_SIZE - len(fields)), dtype=torch.int64)

    @staticmethod
    def from_tensor(header: Tensor) -> Operation:
        kind, origin, is_backward, rows, choices, count, *handles = header.tolist()
        return Operation(OperationKind(kind), origin, tuple(handles[:count]), bool(is_backward), rows, choices)


_HEADER_SIZE = 6 + _MAX_HANDLES
_STOP = Operation(OperationKind.STOP, 0)
_JOIN_S = 5.0


class ShardCoordinator:
    """Of one rank. `take_part` does another rank's operation on this one.

    If a rank is lost, every operation of the others raises `ShardLost` from then on, and `on_lost` is called once.
    """

    def __init__(self, mesh: ShardMesh, take_part: Callable[[Operation], None]) -> None:
        self.mesh = mesh
        self.on_lost: Callable[[ShardLost], None] = lambda error: None
        self._take_part = take_part
        self._turn = threading.Lock()  # the leader's: one operation at a time
        self._submit = threading.Lock()  # another rank's: one request at a time
        self._pending: tuple[Callable[[], Any], Future[Any]] | None = None
        self._request: Any = None  # on its way to the leader
        self._ending = threading.Lock()
        self._has_requested_stop = False
        self._lost: ShardLost | None = None
        self._stopped = threading.Event()
        targets: list[Callable[[], None]] = [self._follow]
        if mesh.is_leader:
            targets = [*(partial(self._serve_requests, rank) for rank in mesh.others), self._keep_alive]
        self._threads = [threading.Thread(target=target, name="symbiosis-shard", daemon=True) for target in targets]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def run(self, operation: Operation, do: Callable[[], Any]) -> Any:
        """Run an operation of this rank: `do` does its part of it, while the others do theirs."""
        assert operation.origin == self.mesh.rank
        if self.mesh.is_leader:
            with self._turn:
                self._check()
                try:
                    self.mesh.announce(operation.to_tensor())
                    return do()
                except Exception as error:  # whatever it is: the ranks are out of step
                    raise self._lose(error) from error
        with self._submit:
            self._check()
            result: Future[Any] = Future()
            self._pending = (do, result)
            if self._lost is not None:  # it may have seen no pending operation
                raise self._lost
            try:
                self._request = self.mesh.request(operation.to_tensor())
            except RuntimeError as error:
                raise self._lose(error) from error
            return result.result()

    def stop(self) -> None:
        """End the operations of all ranks: none can go on without this one."""
        self._stopped.set()
        if self.mesh.is_leader:
            with self._turn:
                self._lose(SymbiosisError("the leader was closed"))
        else:
            self._request_stop()
        for thread in self._threads:
            thread.join(timeout=_JOIN_S)

    def _request_stop(self) -> None:
        """Ask the leader to stop all; once."""
        with self._ending:
            if not self._has_requested_stop:
                self._has_requested_stop = True
                with suppress(RuntimeError):  # it has ended
                    self._request = self.mesh.request(_STOP.to_tensor())

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._stopped.is_set():
            raise ShardLost("the shards were stopped")

    def _lose(self, error: BaseException) -> ShardLost:
        """From now on every operation fails."""
        with self._ending:
            if self._lost is not None:
                return self._lost
            self._lost = ShardLost(f"shard {self.mesh.rank} of {self.mesh.size} cannot go on: {error}")
        if self.mesh.is_leader:
            self.mesh.announce_end(_STOP.to_tensor())
        pending = self._pending
        if pending is not None and not pending[1].done():
            pending[1].set_exception(self._lost)
        if not self._stopped.is_set():
            _log.error("%s", self._lost)
            self.on_lost(self._lost)
        return self._lost

    def _serve_requests(self, rank: int) -> None:
        """The leader's thread for the operations of another rank."""
        denormals.flush_to_zero()
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64)
        try:
            while True:
                self.mesh.receive_request(header, rank)
                operation = Operation.from_tensor(header)
                if operation.kind is OperationKind.STOP:
                    with self._turn:
                        self._lose(SymbiosisError(f"shard {rank} was closed"))
                    return
                with self._turn, torch.no_grad():
                    self._check()
                    self.mesh.announce(header)
                    self._take_part(operation)
        except Exception as error:  # noqa: BLE001 - as above
            self._lose(error)

    def _keep_alive(self) -> None:
        """A message now and then: a rank that does not read them is noticed by the others."""
        while not self._stopped.wait(_KEEP_ALIVE_S):
            with self._turn:
                if self._lost is not None or self._stopped.is_set():
                    return
                try:
                    self.mesh.announce(Operation(OperationKind.KEEP_ALIVE, 0).to_tensor())
                except RuntimeError as error:
                    self._lose(error)

    def _follow(self) -> None:
        """Another rank's thread: do what the leader announces."""
        denormals.flush_to_zero()
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64)
        try:
            while True:
                self.mesh.receive_announced(header)
                operation = Operation.from_tensor(header)
                if operation.kind is OperationKind.STOP:
                    self._lose(SymbiosisError("the leader has ended"))
                    self._request_stop()  # ends the leader's thread for this rank
                    return
                if operation.kind is OperationKind.KEEP_ALIVE:
                    continue
                with torch.no_grad():
                    self._do_own() if operation.origin == self.mesh.rank else self._take_part(operation)
        except Exception as error:  # noqa: BLE001 - as above
            self._lose(error)

    def _do_own(self) -> None:
        assert self._pending is not None
        do, result = self._pending
        self._pending = None
        try:
            found = do()
        except Exception as error:
            lost = self._lose(error)
            if not result.done():
                result.set_exception(lost)
            raise
        result.set_result(found)
