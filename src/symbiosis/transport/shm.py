"""The link between processes of one user on one host: rows lie in shared memory, only headers travel.

The executor makes each channel's arena as a sealed anonymous file: a tenant
cannot shrink it under the executor's feet, and nothing is left behind when
either side is killed. The first half carries calls, the second answers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from symbiosis.errors import AddressInUse, BadAddress, Closed, HelloFirst, SymbiosisError, TooLarge, TooManyCalls
from symbiosis.gpu import driver
from symbiosis.transport.base import Peer
from symbiosis.transport.gpu_channel import REQUEST, GpuCaller, GpuChannel, ProcessWatcher
from symbiosis.transport.messages import Kind, Message, is_call
from symbiosis.transport.shared_memory import SharedMemory, open_shared, owner
from symbiosis.transport.zmq_client import ZmqLink
from symbiosis.transport.zmq_server import ZmqPort

_log = logging.getLogger("symbiosis")
_NAME = re.compile(r"(?!.*\.lock$)[A-Za-z0-9][A-Za-z0-9._-]{0,47}")


def parse(address: str) -> str:
    """The name in `shm://NAME`; empty for "choose one". Raises `BadAddress`."""
    name = address.removeprefix("shm://").removesuffix("/")
    if not address.startswith("shm://") or (name and not _NAME.fullmatch(name)):
        raise BadAddress(f"{address!r} is not an address: expected shm://NAME, with letters, digits, '.', '_' and '-'")
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


class ShmArena:
    """The executor's view of a channel's shared memory: calls in the first half, answers in the second."""

    def __init__(self, size: int) -> None:
        self.shared = SharedMemory(2 * size)
        both = torch.frombuffer(self.shared.memory, dtype=torch.uint8)
        self.calls, self.answers = both[:size], both[size:]

    def close(self) -> None:
        self.shared.close()


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


class ShmPort(ZmqPort):
    same_host = True

    def __init__(self, address: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        name = parse(address) or f"executor-{os.getpid()}-{secrets.token_hex(4)}"
        folder = runtime_folder()
        self._channels: dict[Peer, GpuChannel] = {}
        self._lock = _lock(folder / f"{name}.lock", f"shm://{name}")
        self._files = [folder / name, folder / f"{name}.lock"]
        super().__init__(f"ipc://{folder / name}", tokens=tokens, max_bytes=max_bytes)
        self.address = f"shm://{name}"

    def _welcome(self, peer: Peer, message: Message) -> None:
        if peer.link_state.arena is None:
            try:
                peer.link_state.arena = ShmArena(self._max_bytes)
            except OSError as error:
                raise TooManyCalls(f"the executor has no shared memory left for one more channel: {error}") from None
        message.body["arena"] = peer.link_state.arena.shared.reference()
        super()._welcome(peer, message)

    def _read(self, peer: Peer, frame: memoryview) -> Message | SymbiosisError:
        if peer.link_state.arena is None and is_call(frame):
            # its rows lie in an arena that went when the channel was forgotten: it cannot even be read
            return HelloFirst("the executor does not know this channel: say HELLO first")
        return super()._read(peer, frame)

    def is_polled(self) -> bool:
        return bool(self._channels)

    def poll(self) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        for peer, channel in list(self._channels.items()):
            if not channel.has_call():
                continue
            try:
                message = channel.take()
            except SymbiosisError as error:
                self.reply(peer, Message(Kind.ERROR, REQUEST, body={"code": error.code, "message": str(error)}))
                continue
            yield peer, message

    def places(self, peer: Peer, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        channel = self._channels.get(peer)
        return None if channel is None or not channel.busy else channel.places(shapes, dtype)

    def keeps(self, peer: Peer) -> bool:
        return peer in self._channels

    def open_channel(self, peer: Peer, size: int, device: torch.device) -> dict[str, Any]:
        if not 0 < size <= 2 * self._max_bytes:
            raise TooLarge(f"a channel of {size} bytes: expected 1 to {2 * self._max_bytes}, for a call and its answer")
        known = self._channels.get(peer)
        if known is not None and known.busy:
            raise TooManyCalls("a call of this channel has not been answered yet: its memory cannot go now")
        channel = GpuChannel(size, self._max_bytes, device)
        self._close_channel(peer)
        self._channels[peer] = channel
        return channel.reference()

    def _close_channel(self, peer: Peer) -> None:
        channel = self._channels.pop(peer, None)
        if channel is not None:
            channel.close()

    def reply(self, peer: Peer, message: Message) -> bool:
        channel = self._channels.get(peer)
        if channel is None or not channel.busy or message.request != REQUEST:
            return super().reply(peer, message)
        told = message.kind is Kind.REPLY or super().reply(peer, message)
        channel.answer(message)
        return told

    def _arena_in(self, peer: Peer) -> Tensor | None:
        arena = peer.link_state.arena
        return arena.calls if arena else None

    def _arena_out(self, peer: Peer) -> Tensor | None:
        arena = peer.link_state.arena
        return arena.answers if arena else None

    def forget(self, peer: Peer) -> None:
        super().forget(peer)
        self._close_channel(peer)
        if peer.link_state.arena is not None:
            peer.link_state.arena.close()
            peer.link_state.arena = None

    def close(self) -> None:
        super().close()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._lock.close()


class ShmLink(ZmqLink):
    def __init__(self, address: str, *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        name = parse(address)
        self._gpu: torch.device | None = None
        self._their_gpu = torch.device("cuda")
        self._callers: dict[int, tuple[GpuCaller, ProcessWatcher]] = {}  # by stream
        self._opening = threading.Lock()
        self._is_closing = False
        if not name:
            raise BadAddress("shm:// needs the name that the executor's listen() returned")
        super().__init__(address, f"ipc://{runtime_folder() / name}", token=token, hello=hello, grace_s=grace_s)

    def open_arena(self, welcome: Message) -> Tensor:
        reference = welcome.body.get("arena")
        memory = open_shared(reference)
        self._executor = owner(reference)
        if self._executor == os.getpid():
            welcome.body["gpu"] = None  # the driver opens no memory of the same process
        return torch.frombuffer(memory, dtype=torch.uint8)

    def use_gpu(self, device: torch.device, theirs: torch.device) -> None:
        """Make calls whose rows are on `device` without the host (transport/gpu_channel.py); `theirs` is the executor's GPU."""
        self._gpu, self._their_gpu = device, theirs

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        rows, gpu = message.tensors[0], self._gpu
        if gpu is None or rows.device != gpu or not rows.is_floating_point():
            return super().call(message, widths)
        known = self._callers.get(driver.current_stream(gpu))
        if known is None:
            try:
                known = self._open_caller(gpu)
            except driver.DriverError as error:
                _log.warning("no channel on the executor's GPU (%s): calls go through shared memory", error)
                self._gpu = None
                return super().call(message, widths)
        return known[0].call(message, widths)

    def _open_caller(self, gpu: torch.device) -> tuple[GpuCaller, ProcessWatcher]:
        """That of the current stream."""
        stream = driver.current_stream(gpu)
        with self._opening:
            if self._is_closing:
                raise Closed("this session was closed; connect again")
            if stream not in self._callers:
                self._callers[stream] = self._new_caller(gpu)
            return self._callers[stream]

    def _new_caller(self, gpu: torch.device) -> tuple[GpuCaller, ProcessWatcher]:
        connection = self.connect()
        try:
            caller = GpuCaller(connection, gpu, self._their_gpu)
        except BaseException:
            connection.close()
            raise
        try:
            return caller, ProcessWatcher(self._executor, caller)
        except BaseException:
            caller.close()
            raise

    def close(self) -> None:
        """Raises the error of the last call on the GPU, if nobody has heard of it yet."""
        with self._opening:
            self._is_closing = True
            callers, self._callers = list(self._callers.values()), {}
        with ExitStack() as closing:  # each of them, whatever the others raise
            closing.callback(super().close)
            for caller, watch in callers:
                closing.callback(watch.stop)  # after it: if the executor dies now, somebody must let the stream go on
                closing.callback(caller.close)
