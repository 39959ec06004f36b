"""The processes that hold the parts of a model, and messages between them.

Message passing is torch.distributed's: gloo for tensors on a CPU, NCCL for tensors on GPUs.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed

from symbiosis.errors import SymbiosisError

_START_TIMEOUT = timedelta(seconds=600)  # the others may still load the model
_DATA_TIMEOUT = timedelta(seconds=60)  # of one message within an operation
_CONTROL_TIMEOUT = timedelta(seconds=120)  # the leader sends something every few seconds
_END_TIMEOUT = timedelta(seconds=2)
_NEVER = timedelta(days=365)
_dist: Any = distributed  # it has no types for its groups
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """This process among the shards of a model."""

    rank: int
    size: int
    master: str
    """HOST:PORT at which the shards find each other; rank 0 listens there."""

    @staticmethod
    def from_environment() -> ShardAddress | None:
        """As `torchrun` sets it; None outside of it."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = [os.environ.get(name) for name in names]
        if any(value is None for value in found):
            return None
        rank, size, host, port = (str(value) for value in found)
        return ShardAddress(int(rank), int(size), f"{host}:{port}")


class ShardMesh:
    """Point-to-point messages between `size` shards. Rank 0 is the leader.

    `control` messages are small and between any threads that use different `lane`s; `data` messages belong to operations,
    which all ranks take part in in the same order.
    """

    def __init__(
        self, rank: int, size: int, store: Any, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called now and then while this waits for others at the start: it raises if there is no hope."""
        self.rank, self.size, self.device, self._check = rank, size, device, check
        self.sent_bytes = self.received_bytes = 0
        """Of data, without control messages."""
        self._store = store
        self._control = _dist.ProcessGroupGloo(_dist.PrefixStore("control", store), rank, size, _CONTROL_TIMEOUT)
        self._requests = _dist.ProcessGroupGloo(_dist.PrefixStore("requests", store), rank, size, _NEVER)
        prefix = _dist.PrefixStore("data", store)
        if device.type == "cuda":
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = _DATA_TIMEOUT
            torch.cuda.set_device(device)
            self._data: Any = _dist.ProcessGroupNCCL(prefix, rank, size, options)
        else:
            self._data = _dist.ProcessGroupGloo(prefix, rank, size, _DATA_TIMEOUT)

    @staticmethod
    def join(address: ShardAddress, device: torch.device, check: Callable[[], None] = lambda: None) -> ShardMesh:
        """Wait until all shards have joined. Raises `SymbiosisError` if they do not."""
        host, _, port = address.master.rpartition(":")
        try:
            store = _dist.TCPStore(
                host, int(port), address.size, address.rank == 0, timeout=_START_TIMEOUT, wait_for_workers=False
            )
            store.set(f"joined/{address.rank}", socket.gethostname())
            _wait_for(store, [f"joined/{rank}" for rank in range(address.size)], check)
            return ShardMesh(address.rank, address.size, store, device, check)
        except (RuntimeError, ValueError) as error:
            raise SymbiosisError(
                f"shard {address.rank} of {address.size} did not find the others at {address.master}: {error}"
            ) from error

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def arrive(self, name: str) -> None:
        """As `wait_for_all`, without waiting."""
        self._store.set(f"{name}/{self.rank}", b"")

    def wait_for_all(self, name: str) -> None:
        """Wait until all ranks have called this or `arrive` with the same name, which may be used once."""
        self.arrive(name)
        _wait_for(self._store, [f"{name}/{rank}" for rank in range(self.size)], self._check)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """One rank of a host after the other, in the order of ranks. The name may be used once."""
        host = socket.gethostname()
        self._store.set(f"{name}/host/{self.rank}", host)
        _wait_for(self._store, [f"{name}/host/{rank}" for rank in range(self.rank)], self._check)
        before = [rank for rank in range(self.rank) if self._store.get(f"{name}/host/{rank}").decode() == host]
        _wait_for(self._store, [f"{name}/done/{rank}" for rank in before], self._check)
        yield
        self._store.set(f"{name}/done/{self.rank}", b"")

    def check_same(self, name: str, value: str) -> None:
        """Raise `SymbiosisError` unless all ranks call this with the same value."""
        self._store.set(f"{name}/value/{self.rank}", value)
        keys = [f"{name}/value/{rank}" for rank in range(self.size)]
        _wait_for(self._store, keys, self._check)
        found = [self._store.get(key).decode() for key in keys]
        differing = [rank for rank in range(self.size) if found[rank] != found[0]]
        if differing:
            raise SymbiosisError(f"shard {differing[0]} has another {name} than shard 0: start all shards with the same model")

    def announce(self, *headers: Tensor) -> None:
        """Send headers to all other ranks."""
        for work in [work for rank in self.others for work in self.announce_to(rank, *headers)]:
            work.wait()

    def announce_to(self, rank: int, *headers: Tensor) -> list[Any]:
        """Send headers to a rank. They must stay as they are until all of the returned has been waited for."""
        return [self._control.send([header], rank, 0) for header in headers]

    def receive_announced(self, header: Tensor) -> None:
        """Wait for the leader's next header."""
        self._control.recv([header], 0, 0).wait()

    def announce_end(self, *headers: Tensor) -> None:
        """As `announce`, to those that still listen."""
        works: list[Any] = []
        for header, rank in itertools.product(headers, self.others):
            with suppress(RuntimeError):
                works.append(self._control.send([header], rank, 0))
        for work in works:
            with suppress(RuntimeError):
                work.wait(_END_TIMEOUT)

    def reply(self, tensor: Tensor) -> None:
        """Send a float32 tensor on the CPU to the leader, as a part of an operation."""
        self._control.send([tensor], 0, 0).wait()

    def receive_reply(self, shape: Sequence[int], rank: int) -> Tensor:
        """Wait for a rank's `reply`."""
        tensor = torch.empty(tuple(shape), dtype=torch.float32)
        self._control.recv([tensor], rank, 0).wait()
        return tensor

    def request(self, header: Tensor) -> Any:
        """Send a header to the leader. The header must stay as it is, and the returned be kept, until it has arrived."""
        return self._requests.send([header], 0, self.rank)

    def receive_request(self, header: Tensor, rank: int) -> None:
        """Wait for the next request of a rank."""
        self._requests.recv([header], rank, rank).wait()

    def sibling(self, name: str) -> ShardMesh:
        """The same shards with messages of their own, for other threads. All ranks call this with the same name, once."""
        return ShardMesh(self.rank, self.size, _dist.PrefixStore(name, self._store), self.device, self._check)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by the sum of all ranks', in place. All ranks get the same numbers."""
        self.sent_bytes += tensor.nbytes
        self.received_bytes += tensor.nbytes
        self._data.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """The tensors [R, widths[rank]] of all ranks, side by side."""
        works = [work for rank in self.others for work in self.send([tensor], rank)]
        received = {rank: self.receive([((tensor.shape[0], widths[rank]), tensor.dtype)], rank) for rank in self.others}
        parts = {self.rank: tensor} | {rank: each.wait()[0] for rank, each in received.items()}
        for work in works:
            work.wait()
        return torch.cat([parts[rank] for rank in range(self.size)], dim=1)

    def send(self, tensors: Sequence[Tensor], rank: int) -> list[Any]:
        """Send tensors to a rank. They must stay as they are until all of the returned has been waited for."""
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        return [self._data.send([packed], rank, 0) for packed in _pack(tensors)]

    def receive(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], rank: int) -> ReceivedTensors:
        """Tensors of these shapes and dtypes from a rank."""
        received = ReceivedTensors(shapes, self.device)
        received.works = [self._data.recv([packed], rank, 0) for packed in received.packed]
        self.received_bytes += sum(packed.nbytes for packed in received.packed)
        return received


class ReceivedTensors:
    """Tensors that are on their way."""

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self.works: list[Any] = []
        self.packed = [torch.empty(size, dtype=dtype, device=device) for size, dtype in _packed_sizes(shapes)]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        tensors: list[Tensor] = []
        packed, offset = iter(self.packed), 0
        current: Tensor | None = None
        for shape, dtype in self._shapes:
            size = prod(shape)
            if size == 0:
                tensors.append(torch.empty(shape, dtype=dtype, device=self._device))
                continue
            if current is None or current.dtype is not dtype or offset == current.numel():
                current, offset = next(packed), 0
            tensors.append(current[offset : offset + size].view(shape))
            offset += size
        return tensors


def _wait_for(store: Any, keys: list[str], check: Callable[[], None]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT.total_seconds()
    while keys and not store.check(keys):
        check()
        if time.monotonic() > deadline:
            raise SymbiosisError(f"the other shards did not come within {_START_TIMEOUT.total_seconds():.0f} s")
        time.sleep(_POLL_S)


def _packed_sizes(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    """Sizes of messages: neighbours of one dtype travel together."""
    found: list[tuple[int, torch.dtype]] = []
    for shape, dtype in shapes:
        size = prod(shape)
        if size == 0:
            continue
        if found and found[-1][1] is dtype:
            found[-1] = (found[-1][0] + size, dtype)
        else:
            found.append((size, dtype))
    return found


def _pack(tensors: Sequence[Tensor]) -> list[Tensor]:
    groups: list[list[Tensor]] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if groups and groups[-1][0].dtype is tensor.dtype:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return [
        group[0].contiguous().view(-1) if len(group) == 1 else torch.cat([each.reshape(-1) for each in group])
        for group in groups
    ]
