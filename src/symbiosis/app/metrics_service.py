"""The engine process's RPC handler for metrics of HTTP processes: one owner of their sums."""

from __future__ import annotations

from typing import Any

from symbiosis.errors import BadMessage
from symbiosis.server.metrics.counts import MetricSums
from symbiosis.serving.engine_messages import Result
from symbiosis.serving.ipc_server import IpcServer


class MetricsService:
    """`count` adds what a process counted, without a result; `metrics` results in the sums."""

    operations = ("count", "metrics")

    def __init__(self, ipc_server: IpcServer) -> None:
        self._ipc_server, self._sums = ipc_server, MetricSums()
        ipc_server.add_handler(self)

    def handle(self, id: str, body: dict[str, Any]) -> None:
        if body.get("op") == "metrics":
            self._ipc_server.publish([Result(id, {"sums": self._sums.to_json()})])
            return
        try:
            self._sums.add(body["counted"])
        except (KeyError, TypeError, ValueError):
            raise BadMessage("count: expected a list of names, labels and numbers") from None

    def drop_peer(self, peer: str) -> None:
        """What it counted stays."""

    def close(self) -> None:
        """Nothing is in progress."""
