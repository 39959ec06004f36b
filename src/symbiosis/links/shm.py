"""The link between processes of one user on one host: rows lie in shared memory, only headers travel.

The executor makes each channel's arena as a sealed anonymous file: a tenant
cannot shrink it under the executor's feet, and nothing is left behind when
either side is killed. The first half carries calls, the second answers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import zmq

from symbiosis.errors import AddressInUse, BadAddress, BadMessage, HelloFirst, SymbiosisError, TooManyCalls
from symbiosis.links.base import Peer
from symbiosis.links.dial import ConnectionCut, WireLink
from symbiosis.links.wire import WirePort
from symbiosis.messages import Message, is_call

_NAME = re.compile(r"(?!.*\.lock$)[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_ARENA_PATH = re.compile(r"/proc/\d+/fd/\d+")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def parse(address: str) -> str:
    """The name in `shm://NAME`; empty for "choose one". Raises `BadAddress`."""
    name = address.removeprefix("shm://").removesuffix("/")
    if not address.startswith("shm://") or (name and not _NAME.fullmatch(name)):
        raise BadAddress(f"{address!r} is no address: expected shm://NAME, with letters, digits, '.', '_' and '-'")
    return name


def runtime_folder() -> Path:
    """A folder of this user for sockets; nobody else can look in."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a folder of our own in it, checked below
    folder = Path(base) / f"symbiosis-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadAddress(f"{folder} belongs to somebody else or is open to others: remove it and try again")
    return folder


@dataclass(slots=True)
class Arena:
    fd: int
    memory: mmap.mmap

    @classmethod
    def create(cls, size: int) -> Arena:
        fd = os.memfd_create("symbiosis-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, mmap.mmap(fd, size))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        os.close(self.fd)  # the mapping goes with its last view


def _lock(path: Path, address: str) -> TextIO:
    """Hold `path` locked, so that one executor has a name. Raises `AddressInUse`."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except BlockingIOError:
            file.close()
            raise AddressInUse(f"{address} is taken by another executor: choose another name") from None
        file.close()  # its last owner removed it between our two steps


class ShmPort(WirePort):
    def __init__(self, address: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        name = parse(address) or f"executor-{os.getpid()}-{secrets.token_hex(4)}"
        folder = runtime_folder()
        self._lock = _lock(folder / f"{name}.lock", f"shm://{name}")
        self._files = [folder / name, folder / f"{name}.lock"]
        super().__init__(f"ipc://{folder / name}", tokens=tokens, max_bytes=max_bytes)
        self.address = f"shm://{name}"

    def _welcome(self, peer: Peer, message: Message) -> None:
        if peer.link_state.arena is None:
            try:
                peer.link_state.arena = Arena.create(2 * self._max_bytes)
            except OSError as error:
                raise TooManyCalls(f"the executor has no shared memory left for one more channel: {error}") from None
        path = f"/proc/{os.getpid()}/fd/{peer.link_state.arena.fd}"
        message.body["arena"] = {"path": path, "bytes": 2 * self._max_bytes}
        super()._welcome(peer, message)

    def _read(self, peer: Peer, frame: zmq.Frame) -> Message | SymbiosisError:
        if peer.link_state.arena is None and is_call(frame.buffer):
            # its rows lie in an arena that went when the channel was forgotten: it cannot even be read
            return HelloFirst("the executor does not know this channel: say HELLO first")
        return super()._read(peer, frame)

    def _arena_in(self, peer: Peer) -> memoryview | None:
        arena = peer.link_state.arena
        return memoryview(arena.memory)[: self._max_bytes] if arena else None

    def _arena_out(self, peer: Peer) -> memoryview | None:
        arena = peer.link_state.arena
        return memoryview(arena.memory)[self._max_bytes :] if arena else None

    def forget(self, peer: Peer) -> None:
        super().forget(peer)
        if peer.link_state.arena is not None:
            peer.link_state.arena.close()
            peer.link_state.arena = None

    def close(self) -> None:
        super().close()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._lock.close()


class ShmLink(WireLink):
    def __init__(self, address: str, *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        name = parse(address)
        if not name:
            raise BadAddress("shm:// needs the name that the executor's listen() returned")
        super().__init__(address, f"ipc://{runtime_folder() / name}", token=token, hello=hello, grace_s=grace_s)

    def open_arena(self, welcome: Message) -> Any:
        try:
            path, size = str(welcome.body["arena"]["path"]), int(welcome.body["arena"]["bytes"])
        except (KeyError, TypeError, ValueError):
            raise BadMessage("the executor's welcome names no shared memory") from None
        if not _ARENA_PATH.fullmatch(path):
            raise BadMessage(f"the executor names {path!r} as shared memory, which is none")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConnectionCut from None  # killed since it said so, or in a pid namespace of its own
        except OSError as error:
            raise BadMessage(f"the executor's shared memory cannot be opened: {error}") from None
        try:
            # a sealed anonymous file and nothing else: never write into whatever a stranger names
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size or size <= 0:
                raise BadMessage(f"{path} is no arena of {size} bytes")
            return memoryview(mmap.mmap(fd, size))
        except OSError as error:
            raise BadMessage(f"{path} is no arena: {error}") from None
        finally:
            os.close(fd)
