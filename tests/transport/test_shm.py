"""Shared memory: neither end can make the other crash or read wrong memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile

import pytest
import torch

from symbiosis.errors import BadMessage
from symbiosis.split.executor.policies import NoBatching
from symbiosis.transport.addresses import runtime_folder
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.shared_memory import SharedMemory, open_shared
from symbiosis.transport.zmq_client import ConnectionCut
from tests.conftest import Serve


def test_a_tenant_cannot_shrink_or_grow_the_arena(serve: Serve, tiny, ids):
    served = serve("shm")
    model, raw = served.connect("ann"), served.raw("bob")
    path = raw.welcome["arena"]["path"]
    fd = os.open(path, os.O_RDWR)
    for size in (0, 4096, 1 << 40):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    assert (model(ids).logits - tiny(ids).logits).abs().max() < 1e-6


def open_arena(path: object, size: object = 4096) -> int:
    """The bytes of the arena that a tenant opens for this reference."""
    return len(open_shared({"path": path, "bytes": size})[0])


def test_only_a_sealed_anonymous_file_of_the_right_size_is_an_arena():
    arena = SharedMemory(4096)
    path = arena.reference()["path"]
    assert open_arena(path) == 4096
    for size in (0, -1, 4095, 8192, "x", None):
        with pytest.raises(BadMessage):
            open_arena(path, size)
    arena.close()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/x", "/proc/self/mem", "/proc/1/fd/../mem", "", None, "/proc/1/fd/1\n"]
)
def test_a_path_that_is_no_open_file_of_a_process_is_rejected(path):
    with pytest.raises(BadMessage):
        open_arena(path)


def test_a_plain_file_is_never_written_to():
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        with pytest.raises(BadMessage):
            open_arena(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(BadMessage):
        open_arena(f"/proc/{os.getpid()}/fd/{unsealed}")
    os.close(unsealed)


def test_the_arena_of_a_killed_executor_cuts_the_connection():
    with pytest.raises(ConnectionCut):
        open_arena("/proc/4194304/fd/3")


def test_nothing_is_left_in_the_runtime_folder_after_close(serve: Serve, ids):
    before = set(runtime_folder().iterdir())
    served = serve("shm")
    served.connect()(ids)
    assert set(runtime_folder().iterdir()) > before
    served.close()
    assert set(runtime_folder().iterdir()) == before


def count_open_arenas() -> int:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("symbiosis-arena" in os.readlink(fd) for fd in fds if os.path.islink(fd))


def test_closed_sessions_free_their_arenas(serve: Serve, ids):
    at_first = count_open_arenas()
    served = serve("shm")
    watcher = served.connect("bob")
    before = count_open_arenas()
    models = [served.connect() for _ in range(5)]
    assert count_open_arenas() > before
    for model in models:
        model(ids)
        model.symbiosis.close()
    while served.executor.stats()["sessions"] > 1:
        watcher(ids)
    assert count_open_arenas() == before
    served.close()
    assert count_open_arenas() == at_first


def test_writes_during_a_call_change_only_the_writers_own_reply(serve: Serve):
    """A tenant can write to its arena at any time: here between check and run."""
    served = serve("shm")
    ann, eve = served.raw("ann"), served.raw("bob")
    arena = eve.welcome["arena"]
    fd = os.open(arena["path"], os.O_RDWR)
    arena_bytes = mmap.mmap(fd, arena["bytes"])
    os.close(fd)

    class OverwritingPolicy(NoBatching):
        def decide(self, *arguments):
            arena_bytes[: 1 << 16] = os.urandom(1 << 16)
            return super().decide(*arguments)

    rows = torch.randn(6, 64)
    expected = ann.request(Message(Kind.CALL, layers=(0,), tensors=(rows,))).tensors[0]
    served.executor.use_policy(OverwritingPolicy())
    eve.request(Message(Kind.CALL, layers=(0,), tensors=(torch.ones(6, 64),)))
    assert torch.equal(ann.request(Message(Kind.CALL, layers=(0,), tensors=(rows,))).tensors[0], expected)


def test_without_memory_for_one_more_channel_only_that_one_is_rejected(serve: Serve, tiny, ids, monkeypatch):
    from symbiosis.errors import TooManyCalls

    served = serve("shm")
    model = served.connect()
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "__init__", lambda self, size: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(TooManyCalls, match="Too many open files"):
            served.raw("bob")
    assert (model(ids).logits - tiny(ids).logits).abs().max() < 1e-6
    served.raw("bob")
