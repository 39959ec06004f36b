"""Engines leave a cluster one at a time, and others replace them: a rolling restart, or one engine that has to go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from symbiosis.app.cluster.cluster_host import HostLink
from symbiosis.app.cluster.joined_engines import director_address
from symbiosis.errors import EngineLost, UnknownEngine
from symbiosis.transport.engine_ipc import ClusterKey

_POLL_S = 0.05
_CONNECT_S = 30.0


def drain_engines(
    address: str, secret: str, names: Sequence[str], *, timeout_s: float, drained: Callable[[str, float], None]
) -> None:
    """Drain each engine of `names`, or every engine if there are none; `drained` is called with its name and seconds.

    The next one begins when its replacement has joined. Raises `UnknownEngine` before any has begun, and `EngineLost` after
    `timeout_s` for one engine.
    """
    link = HostLink(director_address(address, secret), ClusterKey.of(secret), engines=None)
    try:
        joined = _engines(link, time.monotonic() + _CONNECT_S)
        unknown = [name for name in names if name not in joined]
        if unknown:
            raise UnknownEngine(f"there is no engine {unknown[0]!r}: expected one of {', '.join(sorted(joined))}")
        for name in names or sorted(joined):
            started = time.monotonic()
            link.ask("drain", engine=name)
            while name in (there := _engines(link, started + timeout_s)) or len(there) < len(joined):
                if time.monotonic() > started + timeout_s:
                    what = "has requests" if name in there else "is not replaced"
                    raise EngineLost(f"the engine {name} still {what} after {timeout_s:g} s: see `symbiosis cluster status`")
                time.sleep(_POLL_S)
            drained(name, time.monotonic() - started)
    finally:
        link.close()


def _engines(link: HostLink, deadline: float) -> set[str]:
    while link.table is None:
        if time.monotonic() > deadline:
            raise EngineLost("the director of the cluster cannot be reached; it may be restarted")
        time.sleep(_POLL_S)
    return set(link.table["engines"])
