"""Blocks between the engines of a cluster: this engine sends those it has, and fetches those it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from symbiosis.serving.block_exchange.block_client import BlockClient
from symbiosis.serving.block_exchange.block_fetches import BlockFetches
from symbiosis.serving.block_exchange.block_server import BlockServer
from symbiosis.serving.block_exchange.messages import Piece
from symbiosis.serving.model.block_memory import BlockMemory
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.transport.engine_ipc import EngineListener

_QUIET_S = 1.0
_log = logging.getLogger("symbiosis")


class BlockExchange:
    """Both ends, with their threads, until closed."""

    def __init__(
        self,
        listener: EngineListener,
        model: str,
        block_manager: BlockManager,
        memory: BlockMemory,
        fetches: BlockFetches,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """`model` is the fingerprint of the model. `call` runs a function on the engine's thread, between two steps."""
        self._memory, self._fetches, self._call = memory, fetches, call
        layout = f"{memory.layout} of {model}"
        self._server = BlockServer(listener, block_manager, memory, layout, call)
        self._client = BlockClient(listener, layout, memory.block_bytes, self)
        fetches.connect(self._client)

    def receive(self, number: int, piece: Piece, content: bytes | memoryview, seconds: float) -> None:
        """See `FetchReceiver`."""
        try:
            received = self._memory.stage(content)
        except Exception:  # noqa: BLE001 - such as no device memory: nothing depends on these blocks
            _log.exception("blocks of another engine could not be taken: they are computed")
            self._client.end(number)
            self.end(number)
        else:
            self._call(partial(self._fetches.receive, number, piece, received, seconds))

    def end(self, number: int) -> None:
        """See `FetchReceiver`."""
        self._call(partial(self._fetches.end, number))

    def finish(self, *, requests_left: bool) -> None:
        """Before the engine ends: let targets finish. If requests have just left, targets will come for their blocks."""
        self._server.finish(_QUIET_S if requests_left else 0.0)

    def close(self) -> None:
        self._server.close()
        self._client.close()
