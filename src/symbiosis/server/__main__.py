"""The HTTP process: `python -m symbiosis.server`, with its configuration as one JSON line on stdin.

`symbiosis.app.http_host` starts it. Secrets are sent by stdin because `ps` shows arguments.
The listening socket is inherited, so that a new process can replace a dead one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
import uvloop

from symbiosis.common import file_limits
from symbiosis.server.app import Server
from symbiosis.server.connections.http_protocol import ConnectionLimits, HttpProtocol
from symbiosis.server.connections.listener import Listener
from symbiosis.server.connections.shared_counts import SharedCounts
from symbiosis.server.engines.cluster_client import ClusterClient
from symbiosis.server.engines.engine import Engine
from symbiosis.server.engines.engine_client import EngineClient
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, IpcClient

_LOST_S = 2.0
"""After the engine is lost, requests get an error for this long; then the process ends and frees the port."""
_PARENT_S = 1.0
_RESERVED_FILES = 128
"""File descriptors that are not for connections."""
_SHUTDOWN_S = 30
"""Time for running requests to finish at shutdown."""


def _load_tokenizer(folder: str) -> Any:
    # Where torch can be imported, transformers does so: half of this process's start-up and memory. Tokenizers need none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # "PyTorch was not found"
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _make_engine(config: dict[str, Any]) -> Engine:
    """One engine, or those of a cluster."""
    if "engine" in config:
        return EngineClient(IpcClient(EngineAddress.from_json(config["engine"])))
    return ClusterClient(EngineAddress.from_json(config["director"]), ClusterKey.of(config["secret"]))


async def _wait_for_loss(engine: Engine, parent: int | None) -> None:
    """Returns when the engine is lost, or the parent process has ended: a cluster's engines may outlive it."""
    while parent is None or os.getppid() == parent:
        with suppress(TimeoutError):
            await asyncio.wait_for(engine.lost.wait(), _PARENT_S)
            return


async def _serve(config: dict[str, Any], parent: int) -> None:
    folder = config["tokenizer"]
    tokenizer = None if folder is None else _load_tokenizer(folder)
    engine = _make_engine(config)
    settings = Settings.from_json(config["settings"])
    max_connections = file_limits.raise_open_file_limit() - _RESERVED_FILES
    counts = None if config["counts"] is None else SharedCounts(**config["counts"])
    limits = ConnectionLimits(timeout_s=settings.client_timeout_s, max_connections=max_connections, counts=counts)
    app = Server(engine, ServerTokenizer(tokenizer, settings.max_model_len), settings, config["control"])
    server = Listener(
        uvicorn.Config(
            app.app(),
            http=partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]  # uvicorn only calls it
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_SHUTDOWN_S,
            timeout_keep_alive=75,
        ),
        counts,
        app.drain,
        config["shutdown_delay_s"],
    )
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=config["fd"])]))
    lost = asyncio.create_task(_wait_for_loss(engine, parent if "director" in config else None))
    await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await asyncio.wait({serving}, timeout=_LOST_S)
        server.should_exit = True
        if not server.started:  # it waits for engines
            serving.cancel()
    lost.cancel()
    with suppress(asyncio.CancelledError):
        await serving


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    parent = os.getppid()
    line = sys.stdin.readline()
    if line:  # else the parent process has died
        uvloop.run(_serve(json.loads(line), parent))


if __name__ == "__main__":
    main()
