"""Shared memory: neither end can pull the ground from under the other's feet."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile

import pytest
import torch

from symbiosis.errors import BadMessage
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.shared_memory import SharedMemory
from symbiosis.transport.shm import ShmLink, runtime_folder
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


def opened(path: object, size: object = 4096) -> object:
    link = ShmLink.__new__(ShmLink)
    return link.open_arena(Message(Kind.WELCOME, body={"arena": {"path": path, "bytes": size}}))


def test_only_a_sealed_anonymous_file_of_the_right_size_is_an_arena():
    arena = SharedMemory(4096)
    path = arena.reference()["path"]
    assert len(opened(path)) == 4096
    for size in (0, -1, 4095, 8192, "x", None):
        with pytest.raises(BadMessage):
            opened(path, size)
    arena.close()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/x", "/proc/self/mem", "/proc/1/fd/../mem", "", None, "/proc/1/fd/1\n"]
)
def test_a_path_that_is_no_open_file_of_a_process_is_refused(path):
    with pytest.raises(BadMessage):
        opened(path)


def test_a_plain_file_is_never_written_to():
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        with pytest.raises(BadMessage):
            opened(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(BadMessage):
        opened(f"/proc/{os.getpid()}/fd/{unsealed}")
    os.close(unsealed)


def test_an_arena_of_an_executor_that_was_just_killed_is_looked_for_again():
    with pytest.raises(ConnectionCut):
        opened("/proc/4194304/fd/3")


def test_nothing_is_left_in_the_runtime_folder_after_close(serve: Serve, ids):
    before = set(runtime_folder().iterdir())
    served = serve("shm")
    served.connect()(ids)
    assert set(runtime_folder().iterdir()) > before
    served.close()
    assert set(runtime_folder().iterdir()) == before


def open_arenas() -> int:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("symbiosis-arena" in os.readlink(fd) for fd in fds if os.path.islink(fd))


def test_closed_sessions_give_their_arenas_back(serve: Serve, ids):
    at_first = open_arenas()
    served = serve("shm")
    watcher = served.connect("bob")
    before = open_arenas()
    models = [served.connect() for _ in range(5)]
    assert open_arenas() > before
    for model in models:
        model(ids)
        model.symbiosis.close()
    while served.executor.stats()["sessions"] > 1:
        watcher(ids)
    assert open_arenas() == before
    served.close()
    assert open_arenas() == at_first


def test_what_a_tenant_writes_while_its_call_runs_changes_only_its_own_answer(serve: Serve):
    """The arena is the tenant's to scribble in at any time: here between check and run."""
    served = serve("shm")
    ann, eve = served.raw("ann"), served.raw("bob")
    arena = eve.welcome["arena"]
    fd = os.open(arena["path"], os.O_RDWR)
    scribble = mmap.mmap(fd, arena["bytes"])
    os.close(fd)
    service = served.executor._service.batcher
    real = service.policy

    class Scribbling:
        name = "scribbling"

        def decide(self, pending, heard, costs, now):
            scribble[: 1 << 16] = os.urandom(1 << 16)
            return real.decide(pending, heard, costs, now)

    rows = torch.randn(6, 64)
    expected = ann.request(Message(Kind.CALL, layers=(0,), tensors=(rows,))).tensors[0]
    service.policy = Scribbling()
    eve.request(Message(Kind.CALL, layers=(0,), tensors=(torch.ones(6, 64),)))
    assert torch.equal(ann.request(Message(Kind.CALL, layers=(0,), tensors=(rows,))).tensors[0], expected)


def test_without_memory_for_one_more_channel_that_one_is_refused(serve: Serve, tiny, ids, monkeypatch):
    from symbiosis.errors import TooManyCalls

    served = serve("shm")
    model = served.connect()
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "__init__", lambda self, size: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        with pytest.raises(TooManyCalls, match="Too many open files"):
            served.raw("bob")
    assert (model(ids).logits - tiny(ids).logits).abs().max() < 1e-6
    served.raw("bob")
