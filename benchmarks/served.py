"""An executor in a process of its own, over a random model."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import Any

from benchmarks.shapes import random_model
from benchmarks.tenants import context_for

_START_S = 300.0


def serve(shape: str, device: str, head: bool, link: str, pipe: Any) -> None:
    import torch

    import symbiosis

    with symbiosis.Executor(random_model(shape, device), device=device, host_head=head) as executor:
        pipe.send(executor.listen(link))
        while (asked := pipe.recv()) != "stop":
            if asked == "stats":
                pipe.send(executor.stats())
            elif asked == "reserved":
                pipe.send(torch.cuda.memory_reserved() if device != "cpu" else 0)
            elif asked.startswith("policy "):
                executor.use_policy(asked.removeprefix("policy "))
                pipe.send(None)
            else:
                assert asked == "trim"
                torch.cuda.empty_cache()
                pipe.send(None)


class Served:
    """It starts at once and is waited for when its address is asked for. With the `head` too if asked. A context manager."""

    def __init__(self, shape: str, device: str, *, head: bool = False, link: str = "shm://") -> None:
        context = context_for(device)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(shape, device, head, link, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @cached_property
    def address(self) -> str:
        if not self._pipe.poll(_START_S):
            raise RuntimeError(f"the executor did not start within {_START_S:.0f} s")
        return str(self._pipe.recv())

    def ask(self, what: str) -> Any:
        """Its "stats", the bytes "reserved" by torch, to "trim" those to what is in use, or to use another "policy NAME"."""
        self._pipe.send(what)
        return self._pipe.recv()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.is_alive() and error is None:
            self._pipe.send("stop")
            self._process.join(30)
        self._process.kill()
        self._process.join()
