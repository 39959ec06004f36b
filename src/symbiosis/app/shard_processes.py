"""The processes of a sharded executor, their devices and addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

import torch

from symbiosis.distributed.mesh import ShardAddress, ShardMesh
from symbiosis.errors import BadAddress, SymbiosisError

_STOP_S = 20.0


def rank_of_shard() -> int:
    """0 in the process that starts the others."""
    given = ShardAddress.from_environment()
    return 0 if given is None else given.rank


def device_of_shard(device: str, shards: int, rank: int) -> torch.device:
    """The device of a shard: one GPU each. Raises `SymbiosisError` if there are too few."""
    if shards < 2:
        raise SymbiosisError(f"--shards {shards}: expected at least 2")
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise SymbiosisError(f"--device {device} with --shards: expected cpu or cuda, each shard takes a GPU of its own")
    local = int(os.environ.get("LOCAL_RANK", rank))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", shards))
    if here > torch.cuda.device_count():
        raise SymbiosisError(f"{here} shards on this machine need as many GPUs: it has {torch.cuda.device_count()}")
    return torch.device("cuda", local)


def listen_address(address: str, rank: int) -> str:
    """Where a shard listens: at a tcp:// port that is higher by its rank, or at a shm:// name that ends with it."""
    if rank == 0:
        return address
    scheme, mark, rest = address.partition("://")
    if scheme == "shm":
        return f"{scheme}{mark}{rest and f'{rest}-{rank}'}"
    host, _, port = rest.rpartition(":")
    if not port.isdecimal():
        raise BadAddress(f"{address!r} is not an address: expected tcp://HOST:PORT or shm://NAME")
    return f"{scheme}{mark}{host}:{int(port) + rank if int(port) else 0}"


class ShardProcesses:
    """The shards of which this process is one. A context manager.

    Under `torchrun` they are its processes. Otherwise this is shard 0, and the others are its children.
    """

    def __init__(self, shards: int, arguments: Sequence[str]) -> None:
        """`arguments`: of the `symbiosis` command, for the children."""
        self._processes: list[subprocess.Popen[bytes]] = []
        given = ShardAddress.from_environment()
        if given is not None:
            if given.size != shards:
                raise SymbiosisError(f"--shards {shards}: torchrun has started {given.size} processes")
            self.address = given
            return
        self.address = ShardAddress(0, shards, f"127.0.0.1:{_free_port()}")
        host, _, port = self.address.master.rpartition(":")
        common = {**os.environ, "WORLD_SIZE": str(shards), "LOCAL_WORLD_SIZE": str(shards)}
        common |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        command = [sys.executable, "-m", "symbiosis", *arguments]
        try:
            for rank in range(1, shards):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(subprocess.Popen(command, env=environment))
        except OSError:
            self.stop()
            raise

    def join(self, device: torch.device) -> ShardMesh:
        """Wait until all shards are there. On a CPU they share its cores."""
        if device.type == "cpu":
            here = int(os.environ.get("LOCAL_WORLD_SIZE", self.address.size))
            torch.set_num_threads(max(1, torch.get_num_threads() // here))
        return ShardMesh.join(self.address, device, self.check)

    def check(self) -> None:
        """Raise `SymbiosisError` if a shard has ended."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise SymbiosisError(f"shard {rank} has ended with {process.returncode}: see the log above")

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> ShardProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
