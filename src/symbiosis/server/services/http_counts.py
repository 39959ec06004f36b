"""RPC handler for statistics: one owner of what the HTTP processes have counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.server.metrics.counts import MetricSums
from symbiosis.serving.engine_messages import JobEvent, Rejected, Result
from symbiosis.serving.rpc_server import RpcServer

_FLUSH_S = 0.2
Deliver = Callable[[dict[str, Any] | SymbiosisError], None]
"""Gets statistics, or why there are none, on any thread."""


class HttpCounts:
    """Sums of the counts of all HTTP processes, and the numbers of jobs that the control process reports.

    A process starts with `report`, whose events ask it to flush; `count` adds what it counted. `statistics` results in what
    `collect` delivers.
    """

    operations = ("report", "count", "statistics")

    def __init__(self, rpc: RpcServer, collect: Callable[[Deliver], None]) -> None:
        self._rpc, self._collect = rpc, collect
        self._sums = MetricSums()
        self._jobs: list[tuple[str, str, int]] = []
        self._reports: dict[str, str] = {}  # ids by peer
        self._flushed: dict[str, int] = {}  # number of the last flush by peer
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        rpc.add_handler(self)

    def flush(self) -> None:
        """Wait for what every process has counted so far. A process that does not reply in time is left out."""
        with self._changed:
            number, asked = next(self._numbers), dict(self._reports)
            self._rpc.publish([JobEvent(id, {"flush": number}) for id in asked.values()])
            self._changed.wait_for(
                lambda: all(peer not in self._reports or self._flushed[peer] >= number for peer in asked), _FLUSH_S
            )

    def http(self) -> dict[str, Any]:
        """Requests and latencies."""
        with self._changed:
            return self._sums.http()

    def tenants(self) -> dict[str, dict[str, int]]:
        """Requests and tokens by tenant."""
        with self._changed:
            return self._sums.tenants()

    def jobs(self) -> list[tuple[str, str, int]]:
        """Tenant, state and number of jobs."""
        return self._jobs

    # On the IPC thread

    def handle(self, id: str, body: dict[str, Any]) -> None:
        peer, op = id.partition(":")[0], body.get("op")
        if op == "statistics":
            self._collect(lambda result: self._rpc.publish([_reply(id, result)]))
        elif op == "report":
            with self._changed:
                self._reports[peer], self._flushed[peer] = id, 0
        else:
            try:
                self._add(peer, body)
            except (KeyError, TypeError, ValueError):
                raise BadMessage("count: expected a list of names, labels and numbers") from None

    def _add(self, peer: str, body: dict[str, Any]) -> None:
        jobs = [(str(tenant), str(state), int(count)) for tenant, state, count in body.get("jobs", ())]
        flush = int(body.get("flush", 0))
        with self._changed:
            self._sums.add(body["counted"])
            if "jobs" in body:
                self._jobs = jobs
            if peer in self._flushed:
                self._flushed[peer] = max(self._flushed[peer], flush)
            self._changed.notify_all()

    def drop_peer(self, peer: str) -> None:
        """What it counted stays."""
        with self._changed:
            self._reports.pop(peer, None)
            self._flushed.pop(peer, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is in progress."""


def _reply(id: str, result: dict[str, Any] | SymbiosisError) -> Result | Rejected:
    return Rejected(id, result) if isinstance(result, SymbiosisError) else Result(id, result)
