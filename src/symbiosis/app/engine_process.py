"""An engine of a cluster in a process of its own: `python -m symbiosis.app.engine_process`.

Its configuration is one JSON line on stdin, the fields of `MemberConfig`: `ps` shows arguments, and it has a secret. Stdin
stays open: the process ends when its launcher does. Exit status 0: SIGTERM, SIGINT or the end of stdin; 1: it could not start,
or has failed; 2: the cluster does not take it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from queue import SimpleQueue

from transformers.utils.logging import disable_progress_bar

from symbiosis.app.cluster_membership import JoinRejected
from symbiosis.app.engine_member import EngineMember, MemberConfig
from symbiosis.common import file_limits
from symbiosis.errors import SymbiosisError

_STDIN = 0


def _follow_launcher() -> None:
    """End with the launcher, at once while the model loads."""
    while os.read(_STDIN, 4096):  # not `sys.stdin`: its lock, held by this thread, would abort the interpreter's exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(config: MemberConfig) -> None:
    with EngineMember(config) as member:
        stopped, signals = threading.Event(), SimpleQueue[int]()

        def stop() -> None:
            signals.get()
            stopped.set()

        threading.Thread(target=stop, name="symbiosis-signals", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            # the main thread may hold the event's lock where a signal interrupts it
            signal.signal(number, lambda received, _: signals.put(received))
        member.run(stopped)


def main() -> int:
    """The exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.readline()
    if not line:  # the launcher has ended
        return 0
    threading.Thread(target=_follow_launcher, name="symbiosis-launcher", daemon=True).start()
    name = ""
    disable_progress_bar()  # several engines start at once on one terminal
    try:
        config = MemberConfig.from_json(json.loads(line))
        name = f" {config.name}"
        file_limits.raise_open_file_limit()
        _serve(config)
    except SymbiosisError as error:
        print(f"engine{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, JoinRejected) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
