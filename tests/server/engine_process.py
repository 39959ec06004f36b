"""An engine in a process of its own, for the tests of clusters: prints its address, serves until stdin closes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from symbiosis.transport.engine_ipc import EngineAddress


class EngineProcess:
    """A tiny model with the same weights in every process."""

    def __init__(self, secret: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.engine_process", secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )

    def address(self) -> EngineAddress:
        assert self.process.stdout is not None
        return EngineAddress.from_json(json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it close its engine."""
        self.process.terminate()
        self.process.wait(30)


def main(secret: str) -> None:
    import signal
    import threading

    import torch

    from symbiosis.serving.engine_core import EngineCore
    from symbiosis.serving.engine_service import EngineService
    from symbiosis.transport.engine_ipc import ClusterKey, EngineListener
    from tests.parity.architectures import ARCHITECTURES

    torch.set_num_threads(1)
    model = ARCHITECTURES[0].model().eval()
    listener = EngineListener(host="127.0.0.1", clients=ClusterKey.of(secret))
    engine = EngineService(EngineCore(model, pages=400, page_size=4), listener)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(json.dumps(engine.address.to_json()), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    stop.wait()
    engine.rpc.close()


if __name__ == "__main__":
    main(sys.argv[1])
