"""An engine's membership of a cluster: it joins the director, and joins again whenever the link was lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any

from symbiosis.errors import Closed, EngineLost, SymbiosisError
from symbiosis.server.engines.director_link import DirectorLink
from symbiosis.server.engines.rpc_client import RpcClient
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress

_AGAIN_S = 2.0
_CLOSE_S = 10.0
_log = logging.getLogger("symbiosis")


class JoinRejected(SymbiosisError, code="join_rejected"):
    """The director does not take this engine; the message has its reason."""


class ClusterMembership:
    """Keeps a link to the director on a thread of its own, until closed or rejected. A context manager.

    The director is tried again for as long as it takes: it may start later, or again at the same address. The engine serves
    meanwhile. `facts` are the fields of the `join` operation.
    """

    def __init__(self, director: EngineAddress, key: ClusterKey, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._rejected: SymbiosisError | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(DirectorLink(director, key, self._join).run())
        self._thread = threading.Thread(target=self._run, name="symbiosis-membership", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises `JoinRejected` if the director has rejected this engine, `EngineLost` if the thread has failed."""
        if self._rejected is not None:
            raise JoinRejected(f"the cluster does not take this engine: {self._rejected}")
        if not self._thread.is_alive():
            raise EngineLost("the link to the director has failed: see the log above")

    def close(self) -> None:
        """Leave: the director loses the link."""
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> ClusterMembership:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the thread of this object

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        except SymbiosisError as error:
            self._rejected = error
        except BaseException:
            _log.exception("the link to the director failed")
            raise
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # cancelled tasks end
            self._loop.close()

    async def _join(self, director: RpcClient) -> None:
        """For as long as this director lives. Raises why it rejects this engine."""
        while director.is_alive():
            with suppress(Closed):
                await director.ask("join", **self._facts)  # again: it may have lost this engine for a while
            with suppress(TimeoutError):
                await asyncio.wait_for(director.lost.wait(), _AGAIN_S)
