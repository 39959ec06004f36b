"""The HTTP process: `python -m symbiosis.server`, with its settings as one JSON line on stdin.

Started by `symbiosis.app.http_host`. Secrets come by stdin since `ps` shows arguments.
The listening socket is inherited, so a new process can take over from one that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from typing import Any

import uvicorn
from transformers import AutoTokenizer

from symbiosis.common import file_limits
from symbiosis.server.app import Server
from symbiosis.server.engine_client import EngineClient
from symbiosis.server.requests.connection_timeouts import TimeoutProtocol
from symbiosis.server.settings import Settings
from symbiosis.server.tokenizer import ServerTokenizer
from symbiosis.transport.engine_ipc import IpcClient

_LOST_S = 2.0
"""After the engine is gone, everybody is told so for this long; then the port is free for the next one."""
_OWN_FILES = 128
_FINISH_S = 30
"""At the end, running answers have so long to finish."""


def _protocol(patience_s: float) -> type[asyncio.Protocol]:
    """As many connections as this process may have, less what it needs itself."""
    most = file_limits.raise_open_file_limit()

    class Protocol(TimeoutProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, patience_s=patience_s, most=most - _OWN_FILES, **options)

    return Protocol


async def _serve(told: dict[str, Any]) -> None:
    folder = told["tokenizer"]
    tokenizer = None if folder is None else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    remote = EngineClient(IpcClient(told["line"]))
    settings = Settings.from_json(told["settings"])
    server = uvicorn.Server(
        uvicorn.Config(
            Server(remote, ServerTokenizer(tokenizer, settings.longest), settings).app(),
            http=_protocol(settings.patience_s),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_FINISH_S,
            timeout_keep_alive=75,
            backlog=2048,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=told["fd"])]))
    lost = asyncio.create_task(remote.lost.wait())
    await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await asyncio.wait({serving}, timeout=_LOST_S)
        server.should_exit = True
    lost.cancel()
    await serving


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.readline()
    if line:  # else: whoever started this is gone
        asyncio.run(_serve(json.loads(line)))


if __name__ == "__main__":
    main()
