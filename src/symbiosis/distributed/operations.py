"""Operations that all shards do in the order of their leader.

The leader announces an operation with its arguments, and all ranks do it: they run the same forward pass, or exchange
tensors. If one fails, the ranks are out of step, and every later operation raises `ShardLost`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from symbiosis.common import denormals
from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.parallel_model import ParallelModel
from symbiosis.errors import ShardLost, SymbiosisError

_KEEP_ALIVE_S = 10.0
_JOIN_S = 5.0
_STOP, _KEEP_ALIVE = "stop", "keep alive"
_log = logging.getLogger("symbiosis")

Handler = Callable[[bytes], None]


class OperationLeader:
    """Of rank 0. Operations of several threads run one after the other, in the order of their calls."""

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.on_lost: Callable[[ShardLost], None] = lambda error: None
        """Called once, on any thread, when an operation has failed."""
        self._turns = _FifoLock()
        self._lost: ShardLost | None = None
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep_alive, name="symbiosis-shards", daemon=True)
        self._keeper.start()

    @contextmanager
    def operation(self, kind: str, arguments: bytes | Sequence[bytes] = b"") -> Iterator[None]:
        """Announce an operation; the body does this rank's part. Raises `ShardLost` if it fails, and ever after.

        `arguments` are the same for all other ranks, or one for each.
        """
        with self._turns:
            if self._lost is not None:
                raise self._lost
            try:
                self._announce(kind, arguments)
                yield
            except Exception as error:
                raise self._lose(error) from error

    def _announce(self, kind: str, arguments: bytes | Sequence[bytes]) -> None:
        if isinstance(arguments, bytes):
            self.mesh.announce(*_encode(kind, arguments))
            return
        messages = {rank: _encode(kind, each) for rank, each in zip(self.mesh.others, arguments, strict=True)}
        for work in [work for rank, message in messages.items() for work in self.mesh.announce_to(rank, *message)]:
            work.wait()

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def stop(self) -> None:
        """End the operations of all ranks."""
        self._stopped.set()
        with self._turns:
            if self._lost is None:
                self._lost = ShardLost("the shards were stopped")
                self.mesh.announce_end(*_encode(_STOP, b""))
        self._keeper.join(timeout=_JOIN_S)

    def _lose(self, error: Exception) -> ShardLost:
        if isinstance(error, ShardLost):
            self._lost = error
        else:
            self._lost = ShardLost(f"the shards cannot go on: {type(error).__name__}: {error}")
        self.mesh.announce_end(*_encode(_STOP, b""))
        if not self._stopped.is_set():
            _log.error("%s", self._lost)
            self.on_lost(self._lost)
        return self._lost

    def _keep_alive(self) -> None:
        """A message now and then: each rank notices when another has ended."""
        while not self._stopped.wait(_KEEP_ALIVE_S):
            with suppress(ShardLost), self.operation(_KEEP_ALIVE):
                continue
            return


@dataclass(frozen=True, slots=True, eq=False)
class FirstShard:
    """The first shard's part of a model, and the operations that it leads."""

    parallel: ParallelModel
    leader: OperationLeader

    def start(self, kind: str, arguments: bytes, do: Callable[[], None]) -> None:
        """An operation that may fail on all ranks alike, which reply by `follow_start`. Raises the first rank's error."""
        failed: Exception | None = None
        with self.leader.operation(kind, arguments):
            try:
                do()
            except Exception as error:  # noqa: BLE001 - a model's code may raise anything
                failed = error
            others = [float(self.parallel.mesh.receive_reply((1,), rank)) for rank in self.parallel.mesh.others]
            if failed is None and not all(others):
                raise SymbiosisError(f"shard {1 + others.index(0.0)} cannot start: see its log")
        if failed is not None:
            raise failed


def follow_start(parallel: ParallelModel, do: Callable[[], None]) -> None:
    """The part of another rank in `FirstShard.start`."""
    try:
        do()
    except Exception:  # noqa: BLE001 - the first rank raises
        _log.debug("shard %d cannot start", parallel.mesh.rank, exc_info=True)
        parallel.mesh.reply(torch.zeros(1))
        return
    parallel.mesh.reply(torch.ones(1))


class OperationFollower:
    """Of another rank. `handlers` do this rank's part, by the kind of operation."""

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.handlers: dict[str, Handler] = {_KEEP_ALIVE: lambda arguments: None}
        self.on_lost: Callable[[ShardLost], None] = lambda error: None
        self._thread = threading.Thread(target=self._run, name="symbiosis-shard", daemon=True)

    def add(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers |= handlers

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        denormals.flush_to_zero()
        try:
            while True:
                header = torch.empty(2, dtype=torch.int64)
                self.mesh.receive_announced(header)
                kind_length, length = header.tolist()
                message = torch.empty(kind_length + length, dtype=torch.uint8)
                self.mesh.receive_announced(message)
                content = message.numpy().tobytes()
                kind = content[:kind_length].decode()
                if kind == _STOP:
                    return
                if kind not in self.handlers:
                    raise SymbiosisError(f"shard {self.mesh.rank} cannot do {kind!r}: start all shards with the same options")
                self.handlers[kind](content[kind_length:])
        except Exception as error:  # noqa: BLE001 - whatever it is: the ranks are out of step
            _log.exception("shard %d of %d cannot go on", self.mesh.rank, self.mesh.size)
            self.on_lost(ShardLost(f"shard {self.mesh.rank} of {self.mesh.size} cannot go on: {error}"))


def _encode(kind: str, arguments: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    name = kind.encode()
    header = torch.tensor([len(name), len(arguments)], dtype=torch.int64)
    return header, torch.frombuffer(bytearray(name + arguments), dtype=torch.uint8)


class _FifoLock:
    """A lock that is taken in the order of requests: a thread that steps all the time does not starve the others."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
