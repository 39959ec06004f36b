"""The director's process: `python -m symbiosis.director`, with its configuration as one JSON line on stdin.

It prints its address as one JSON line, and ends on SIGTERM or when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from symbiosis.cluster.policies.objective import Objective
from symbiosis.director.director import Director, DirectorConfig
from symbiosis.errors import SymbiosisError


async def _run(values: dict[str, Any]) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_reader(sys.stdin.fileno(), stopped.set)  # it closes when the parent has ended
    objective = Objective(**values.pop("objective", {}))
    director = Director(DirectorConfig(**{**values, "state": Path(values["state"]), "objective": objective}))
    print(json.dumps(director.address.to_json()), flush=True)
    try:
        await director.run(stopped)
    finally:
        await director.close()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.readline()
    if not line:
        return  # the parent has ended
    try:
        uvloop.run(_run(json.loads(line)))
    except SymbiosisError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
