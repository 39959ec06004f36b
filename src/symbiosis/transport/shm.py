"""The link between processes of one user on one host: tensors are in shared memory, and only headers are sent.

The executor creates each channel's arena as a sealed anonymous file. A tenant cannot shrink it while the executor reads,
and nothing is left behind when either side is killed. The first half holds calls, the second half replies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from symbiosis.errors import AddressInUse, Closed, HelloFirst, SymbiosisError, TooLarge, TooManyCalls
from symbiosis.gpu import driver
from symbiosis.transport.addresses import parse_shm_address, runtime_folder, shm_endpoint
from symbiosis.transport.base import Peer
from symbiosis.transport.gpu_channel import REQUEST, GpuCaller, GpuChannel, ProcessWatcher
from symbiosis.transport.messages import Kind, Message, is_call
from symbiosis.transport.shared_memory import SharedMemory, open_shared
from symbiosis.transport.zmq_client import ZmqLink
from symbiosis.transport.zmq_server import ZmqPort

__all__ = ["ShmLink", "ShmPort", "runtime_folder"]
_log = logging.getLogger("symbiosis")


def _halves(memory: Any) -> tuple[Tensor, Tensor]:
    """The arenas of calls and of replies in a channel's shared memory."""
    both = torch.frombuffer(memory, dtype=torch.uint8)
    return both[: len(both) // 2], both[len(both) // 2 :]


def _lock_name(path: Path, address: str) -> TextIO:
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
        file.close()  # its last owner removed it between the two steps


class ShmPort(ZmqPort):
    same_host = True

    def __init__(self, address: str, *, tokens: Mapping[str, str], max_bytes: int) -> None:
        name = parse_shm_address(address) or f"executor-{os.getpid()}-{secrets.token_hex(4)}"
        folder = runtime_folder()
        self._channels: dict[Peer, GpuChannel] = {}
        self._lock = _lock_name(folder / f"{name}.lock", f"shm://{name}")
        self._files = [folder / name, folder / f"{name}.lock"]
        super().__init__(f"ipc://{folder / name}", tokens=tokens, max_bytes=max_bytes)
        self.address = f"shm://{name}"

    def _welcome(self, peer: Peer, message: Message) -> None:
        state = peer.port_state
        if state.arena is None:
            try:
                state.arena = SharedMemory(2 * self._max_bytes)
            except OSError as error:
                raise TooManyCalls(f"the executor has no shared memory left for one more channel: {error}") from None
            state.call_arena, state.reply_arena = _halves(state.arena.memory)
        message.body["arena"] = state.arena.reference()
        super()._welcome(peer, message)

    def _read(self, peer: Peer, frame: memoryview) -> Message | SymbiosisError:
        if peer.port_state.arena is None and is_call(frame):
            # Its rows are in an arena that was freed with the forgotten channel: the frame cannot be decoded.
            return HelloFirst("the executor does not know this channel: send HELLO first")
        return super()._read(peer, frame)

    def needs_polling(self) -> bool:
        return bool(self._channels)

    def poll(self) -> Iterable[tuple[Peer, Message | SymbiosisError]]:
        for peer, channel in list(self._channels.items()):
            if not channel.has_call():
                continue
            try:
                message = channel.take()
            except SymbiosisError as error:
                self.reply(peer, Message.from_error(error, REQUEST))
                continue
            yield peer, message

    def reply_buffers(self, peer: Peer, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        channel = self._channels.get(peer)
        return None if channel is None or not channel.busy else channel.reply_buffers(shapes, dtype)

    def has_channel(self, peer: Peer) -> bool:
        return peer in self._channels

    def open_channel(self, peer: Peer, size: int, device: torch.device) -> dict[str, Any]:
        if not 0 < size <= 2 * self._max_bytes:
            raise TooLarge(f"a channel of {size} bytes: expected 1 to {2 * self._max_bytes}, for a call and its reply")
        known = self._channels.get(peer)
        if known is not None and known.busy:
            raise TooManyCalls("a call of this channel is in flight: its memory cannot be replaced now")
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
        sent = message.kind is Kind.REPLY or super().reply(peer, message)
        channel.reply(message)
        return sent

    def forget(self, peer: Peer) -> None:
        super().forget(peer)
        self._close_channel(peer)
        state = peer.port_state
        if state.arena is not None:
            state.arena.close()
            state.arena = state.call_arena = state.reply_arena = None

    def close(self) -> None:
        super().close()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._lock.close()


class ShmLink(ZmqLink):
    def __init__(self, address: str, *, token: str | None, hello: dict[str, Any], grace_s: float) -> None:
        endpoint = shm_endpoint(address)
        self._gpu: torch.device | None = None
        self._executor_gpu = torch.device("cuda")
        self._callers: dict[int, tuple[GpuCaller, ProcessWatcher]] = {}  # by stream
        self._opening = threading.Lock()
        self._is_closing = False
        super().__init__([(address, endpoint)], token=token, hello=hello, grace_s=grace_s)

    def open_arenas(self, welcome: Message) -> tuple[Tensor, Tensor]:
        memory, self._executor_pid = open_shared(welcome.body.get("arena"))
        if self._executor_pid == os.getpid():
            welcome.body["gpu"] = None  # the driver cannot open memory of the same process
        return _halves(memory)

    def use_gpu(self, device: torch.device, executor_device: torch.device) -> None:
        """Calls whose rows are on `device` run without host waits (transport/gpu_channel.py)."""
        self._gpu, self._executor_gpu = device, executor_device

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        rows, gpu = message.tensors[0], self._gpu
        if gpu is None or rows.device != gpu or not rows.is_floating_point():
            return super().call(message, widths)
        known = self._callers.get(driver.current_stream(gpu))
        if known is None:
            try:
                known = self._open_caller(gpu)
            except driver.DriverError as error:
                _log.warning("no channel on the executor's GPU (%s): calls use shared host memory", error)
                self._gpu = None
                return super().call(message, widths)
        return known[0].call(message, widths)

    def _open_caller(self, gpu: torch.device) -> tuple[GpuCaller, ProcessWatcher]:
        """The caller of the current stream."""
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
            caller = GpuCaller(connection, gpu, self._executor_gpu)
        except BaseException:
            connection.close()
            raise
        try:
            return caller, ProcessWatcher(self._executor_pid, caller)
        except BaseException:
            caller.close()
            raise

    def close(self) -> None:
        """Raises the error of the last GPU call, if no later call has raised it."""
        with self._opening:
            self._is_closing = True
            callers, self._callers = list(self._callers.values()), {}
        with ExitStack() as closing:  # closes all, whatever some raise
            closing.callback(super().close)
            for caller, watcher in callers:
                closing.callback(watcher.stop)  # runs after `caller.close`, whose stream it unblocks if the executor dies
                closing.callback(caller.close)
