"""Calls between processes on one GPU, without host waits.

Rows are in GPU memory that the executor allocates for one channel alone. Frames (`messages`) are in a ring of slots in host
memory. The tenant's host writes the frame. The tenant's *stream* does the rest: it copies the rows in, sets the counter of
arrived calls, waits for the counter of completed calls, and reads the reply. So the tenant's Python runs ahead of the GPU.
The executor polls the counters, batches the arrived calls and launches them; its stream sets the counters of completed ones.

A stream executes in order, so a channel never holds two calls at once, however far the host has run ahead. A tenant has one
channel for each of its streams, shared by all threads that use the stream: forward and backward share one.

    GPU memory:  rows of the call | its reply
    host memory: counters (one page) | ring of frames
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symbiosis.common.bounded_dict import evict_oldest
from symbiosis.errors import BadMessage, ExecutorLost, SymbiosisError, TooLarge
from symbiosis.gpu import driver
from symbiosis.transport.base import flatten_rows
from symbiosis.transport.messages import Kind, Message, decode, encode, lay_out, lay_out_tensors
from symbiosis.transport.poller import Wakeup
from symbiosis.transport.shared_memory import SharedMemory, open_shared
from symbiosis.transport.zmq_client import Connection, ConnectionCut

_PAGE_BYTES = 4096
_RING_SLOTS = 256
_SLOT_BYTES = 1024
_HOST_BYTES = _PAGE_BYTES + _RING_SLOTS * _SLOT_BYTES
_LENGTH = struct.Struct("<I")
_ARRIVED, _DONE, _FAILED = 0, 16, 32  # indices of the counters: in separate cache lines, since two processors write them
_LOST = 0xFFFFFFFF  # value of the counter `_FAILED`: the executor is gone
_GRANULARITY_BYTES = 4 << 20  # a channel's size is a multiple of this
_MAX_CACHED_CALLS = 4096  # per channel and end
REQUEST = (1 << 64) - 1
"""The request number of every call on a channel: only one is in flight."""
_FAR_AHEAD = 1 << 30  # a counter this far ahead unblocks every waiting stream


def _slot_offset(number: int) -> int:
    return _PAGE_BYTES + number % _RING_SLOTS * _SLOT_BYTES


def _views(memory: Tensor, shapes: Iterable[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Consecutive tensors of these shapes in a channel's memory."""
    shapes = list(shapes)
    offsets, end = lay_out((shape[0], shape[1], dtype) for shape, dtype in shapes)
    if end > len(memory):
        raise TooLarge(f"{end} bytes do not fit a channel of {len(memory)} bytes")
    return [
        memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for offset, (shape, dtype) in zip(offsets, shapes, strict=True)
    ]


def _copy(targets: list[Tensor], sources: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Copy in one launch; a single tensor launches faster by itself."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources)


class GpuChannel:
    """The executor's end."""

    def __init__(self, size: int, max_call_bytes: int, device: torch.device) -> None:
        """Allocates at least `size` bytes for a call and its reply. The rows of a call have at most `max_call_bytes`."""
        self._shared = SharedMemory(_HOST_BYTES)
        try:
            self._memory = driver.DeviceMemory(-(-size // _GRANULARITY_BYTES) * _GRANULARITY_BYTES, device)
            try:
                self._memory.bytes.zero_()  # no tenant reads data of another
                self._counters = driver.Counters(self._shared.memory, device)
            except BaseException:
                self._memory.close()
                raise
        except BaseException:
            self._shared.close()
            raise
        self._host = memoryview(self._shared.memory)
        self._max_call_bytes = max_call_bytes
        self._device = device
        self._next = 1
        self._decoded: dict[bytes, tuple[Message, Tensor]] = {}
        self._reply_memory = self._memory.bytes  # for the reply to the call in flight
        self.busy = False
        """A call was taken and has no reply yet."""

    def reference(self) -> dict[str, Any]:
        """How the tenant opens the channel."""
        handle, size, _ = driver.export(self._memory.bytes)
        return {"host": self._shared.reference(), "handle": handle.hex(), "size": size}

    def has_call(self) -> bool:
        """Whether a call has arrived that was not taken."""
        return not self.busy and self._counters.host[_ARRIVED] == self._next & 0xFFFFFFFF

    def take(self) -> Message:
        """The arrived call. Raises `SymbiosisError` if it cannot be decoded."""
        self.busy = True
        at = _slot_offset(self._next)
        (length,) = _LENGTH.unpack_from(self._host, at)
        # a copy: the tenant can write to the ring at any time
        frame = bytes(self._host[at + _LENGTH.size : at + _LENGTH.size + min(length, _SLOT_BYTES - _LENGTH.size)])
        known = self._decoded.get(frame)  # a tenant repeats a small set of frames
        if known is None:
            message = decode(memoryview(frame), max_bytes=self._max_call_bytes, max_body=0, arena=self._memory.bytes)
            if message.kind is not Kind.CALL or message.request != REQUEST:
                raise BadMessage(f"a {message.kind.name} among the calls of a channel")
            reply_memory = self._memory_after(message.tensors)
            evict_oldest(self._decoded, _MAX_CACHED_CALLS)
            known = self._decoded[frame] = message, reply_memory
        message, self._reply_memory = known
        return message

    def _memory_after(self, rows: tuple[Tensor, ...]) -> Tensor:
        """The memory after the rows of a call: the reply never overlaps them."""
        offsets, end = lay_out_tensors(rows)
        start = self._memory.bytes.data_ptr()
        if any(t.numel() and t.data_ptr() != start + offset for t, offset in zip(rows, offsets, strict=True)):
            raise BadMessage("the rows of a call must follow one another from the start of its channel, and these do not")
        return self._memory.bytes[end:]

    def reply_buffers(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Where a reply of these shapes belongs."""
        return tuple(_views(self._reply_memory, [(torch.Size(shape), dtype) for shape in shapes]))

    def reply(self, message: Message) -> None:
        """Reply to the call in flight; the GPU delivers the reply once it is computed."""
        try:
            self._write_reply(message)
            self._counters.write(driver.current_stream(self._device), _DONE, self._next)
        except (RuntimeError, SymbiosisError):  # the GPU's context is broken: its streams deliver nothing more
            self._unblock_tenant()
            raise
        self._next += 1
        self.busy = False

    def _write_reply(self, message: Message) -> None:
        if message.kind is not Kind.REPLY:
            self._memory.bytes.fill_(0xFF)  # NaN: shows in all that the tenant computes before it sees the error
            self._counters.host[_FAILED] = self._next & 0xFFFFFFFF
            return
        offsets, _ = lay_out_tensors(message.tensors)
        start = self._reply_memory.data_ptr()
        if [t.data_ptr() for t in message.tensors] != [start + offset for offset in offsets]:  # not computed in place
            _copy(_views(self._reply_memory, [(t.shape, t.dtype) for t in message.tensors]), message.tensors)

    def _unblock_tenant(self) -> None:
        """Unblock the tenant's stream. Its next call raises `ExecutorLost`."""
        self._counters.host[_FAILED] = _LOST
        self._counters.host[_DONE] = self._next + _FAR_AHEAD & 0xFFFFFFFF

    def close(self) -> None:
        """Unblocks a waiting tenant, whose next call raises `ExecutorLost`."""
        self._counters.host[_FAILED] = _LOST
        with suppress(RuntimeError), driver.synchronized(self._device):
            pass  # no stream of this process writes the counter after this; with a broken context the tenant proceeds too
        self._unblock_tenant()
        self._counters.close()
        self._memory.close()
        self._host.release()
        self._shared.close()


def _executor_gone() -> ExecutorLost:
    return ExecutorLost("the executor ended in the middle of a call on its GPU: start it, and connect again")


@dataclass(frozen=True, slots=True)
class _PreparedCall:
    """A call made before: its frame, and views for its rows and its reply."""

    frame: bytes
    rows: list[Tensor]
    replies: list[Tensor]


class GpuCaller:
    """The tenant's end: the calls of one stream, from any thread. The error of a failed call is raised by the stream's next.

    The tenant may use another GPU of the host than the executor: then its copies are between GPUs. `executor_device` is the
    executor's GPU by this process's numbering.
    """

    def __init__(self, connection: Connection, device: torch.device, executor_device: torch.device) -> None:
        """For the current stream on `device`."""
        self._connection, self._device, self._executor_device = connection, device, executor_device
        self._stream = driver.current_stream(device)
        self._call_lock = threading.Lock()
        self._counter_lock = threading.Lock()  # `unblock` runs in another thread
        self._lost = False
        self._interrupted = False
        """A call was interrupted while it was enqueued."""
        self._open(1)

    def _open(self, size: int) -> None:
        request = Message(Kind.CHANNEL, self._connection.next_request(), body={"bytes": size})
        try:
            self._connection.send(request)
            reply = self._connection.wait_for(request)
        except ConnectionCut:
            raise _executor_gone() from None
        if reply.kind is Kind.ERROR:
            raise reply.to_error()
        try:
            handle = bytes.fromhex(reply.body["handle"])
            self._memory = driver.OpenedMemory(handle, int(reply.body["size"]), self._executor_device)
            shared, _ = open_shared(reply.body["host"])
        except ConnectionCut:
            raise _executor_gone() from None
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"the executor's reference to a channel is malformed: {error!r}") from error
        if len(shared) != _HOST_BYTES:
            raise BadMessage(f"the executor's ring has {len(shared)} bytes: another version of symbiosis?")
        self._host: mmap.mmap = shared
        with self._counter_lock:
            self._counters = driver.Counters(shared, self._device)
            self._next = 1
        self._prepared: dict[Any, _PreparedCall] = {}

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        """The reply tensors (`Link.call`), valid in stream order."""
        with self._call_lock:  # so calls are in the stream in the order of their numbers
            return self._call(message, widths)

    def _call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        if self._interrupted:
            self._recover()
        tensors = message.tensors
        key = (message.layers, message.direction, message.training, *widths, *[(t.shape, t.dtype) for t in tensors])
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(message, widths)
            evict_oldest(self._prepared, _MAX_CACHED_CALLS)
            self._prepared[key] = prepared
        self._check()
        _copy(prepared.rows, tensors)
        self._interrupted = True
        at = _slot_offset(self._next)
        self._host[at : at + len(prepared.frame)] = prepared.frame
        self._counters.write(self._stream, _ARRIVED, self._next)
        self._counters.wait(self._stream, _DONE, self._next)
        self._next += 1
        self._interrupted = False
        if len(prepared.replies) == 1 and self._device == self._executor_device:
            return (prepared.replies[0].clone(),)
        results = [torch.empty_like(reply, device=self._device) for reply in prepared.replies]
        _copy(results, prepared.replies)
        return tuple(results)

    def _prepare(self, message: Message, widths: list[int]) -> _PreparedCall:
        tensors, leading = message.tensors, message.tensors[0].shape[:-1]
        message.request, message.tensors = REQUEST, flatten_rows(tensors)
        sent = [(t.shape, t.dtype) for t in message.tensors]
        returned = [(torch.Size((sent[0][0][0], width)), tensors[0].dtype) for width in widths]
        _, end = lay_out_tensors(message.tensors)
        self._grow(lay_out(((shape[0], shape[1], dtype) for shape, dtype in returned), end)[1])
        memory = self._memory.bytes
        frame = encode(message, memory)
        rows = [view.view(t.shape) for view, t in zip(_views(memory, sent), tensors, strict=True)]
        replies = [view.view(*leading, width) for view, width in zip(_views(memory[end:], returned), widths, strict=True)]
        return _PreparedCall(_LENGTH.pack(len(frame)) + frame, rows, replies)

    def _recover(self) -> None:
        """Proceed after an interrupted call. If it was sent, its number is consumed once the executor has replied."""
        self._synchronize()
        number, host = self._next & 0xFFFFFFFF, self._counters.host
        if host[_ARRIVED] == number:
            while host[_DONE] != number:
                if self._lost:
                    raise self._failure()
                time.sleep(1e-4)
            self._next += 1
        self._interrupted = False

    def _check(self) -> None:
        """Raise the executor's error reply to an earlier call. Waits while the ring is full."""
        while True:
            if self._lost or self._counters.host[_FAILED]:
                raise self._failure()
            if (self._next - self._counters.host[_DONE]) & 0xFFFFFFFF < _RING_SLOTS:
                return
            time.sleep(1e-4)

    def _failure(self) -> SymbiosisError:
        if self._lost or self._counters.host[_FAILED] == _LOST:
            self._lost = True
            return _executor_gone()
        try:
            reply = self._connection.next_error()
        except ConnectionCut:
            return _executor_gone()
        self._counters.host[_FAILED] = 0
        return reply.to_error()

    def _grow(self, size: int) -> None:
        if size <= len(self._memory.bytes):
            return
        self._synchronize()  # no kernel reads the old memory any more
        self._check()
        old = self._counters, self._memory
        self._open(size)
        for part in old:
            part.close()

    def close(self) -> None:
        """Raises the executor's error reply to the last call, if that failed."""
        with self._call_lock:
            try:
                if not self._lost:
                    self._synchronize()
                    self._check()
                    with self._counter_lock:
                        self._lost = True
                        self._counters.close()
                        self._memory.close()
            finally:
                self._connection.leave()

    def _synchronize(self) -> None:
        for device in {self._device, self._executor_device}:
            torch.cuda.synchronize(device)

    def unblock(self) -> None:
        """Unblock the waiting streams after the executor's death. Called from another thread."""
        with self._counter_lock:
            if not self._lost:
                self._lost = True
                self._counters.host[_DONE] = self._next + _FAR_AHEAD & 0xFFFFFFFF


class ProcessWatcher(threading.Thread):
    """Waits for the end of the executor's process, without polling; then unblocks one caller."""

    def __init__(self, pid: int, caller: GpuCaller) -> None:
        super().__init__(name="symbiosis-watch", daemon=True)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _executor_gone() from None
        self._caller = weakref.ref(caller)
        self._stop = Wakeup()
        self.start()

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._pidfd, self._stop.fileno()):
            poll.register(fd, select.POLLIN)
        ended = poll.poll()
        caller = self._caller()
        if caller is not None and any(fd == self._pidfd for fd, _ in ended):
            caller.unblock()
        os.close(self._pidfd)

    def stop(self) -> None:
        self._stop.notify()
