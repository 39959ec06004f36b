"""Calls between processes on one GPU without a host that waits.

Rows lie in GPU memory that the executor made for this channel alone; words
about them (`messages` frames) in a ring of host memory. The tenant's host
writes the frame, and its *stream* does the rest: copy the rows in, count the
call as arrived, wait until it is counted as done, read the answer. So the
tenant's Python runs ahead of the GPU. The executor looks at the counters,
batches what has arrived, launches, and its stream counts the calls as done.

A stream does one thing after the other: a channel never holds two calls at
once, however far the host has run ahead. So a tenant has a channel for each of
its streams, whichever threads use it: forward and backward share one.

    GPU memory:  the call's rows | its answer, behind them
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

from symbiosis import errors
from symbiosis.errors import BadMessage, ExecutorLost, SymbiosisError, TooLarge
from symbiosis.gpu import driver
from symbiosis.transport.base import as_rows
from symbiosis.transport.messages import Kind, Message, decode, encode, lay_out
from symbiosis.transport.poller import Wakeup
from symbiosis.transport.shared_memory import SharedMemory, open_shared
from symbiosis.transport.zmq_client import Connection, ConnectionCut

_PAGE = 4096
_RING = 256
_SLOT = 1024
_LENGTH = struct.Struct("<I")
_ARRIVED, _DONE, _FAILED = 0, 16, 32  # which number of the page: apart, since two processors write them
_ROOM = 4 << 20  # bytes: a channel has a multiple of it
_REMEMBER = 4096  # calls of one channel that are known by heart
REQUEST = (1 << 64) - 1
"""The number of every call of a channel: there is only one at a time."""
_FAR = 1 << 30  # so far ahead that every stream that waits goes on


def _slot(number: int) -> int:
    return _PAGE + number % _RING * _SLOT


def _views(memory: Tensor, shapes: Iterable[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Where tensors of these shapes lie in a channel's memory."""
    shapes = list(shapes)
    offsets, end = lay_out((shape[0], shape[1], dtype) for shape, dtype in shapes)
    if end > len(memory):
        raise TooLarge(f"{end} bytes do not fit a channel of {len(memory)} bytes")
    return [
        memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for offset, (shape, dtype) in zip(offsets, shapes, strict=True)
    ]


def _copy(targets: list[Tensor], sources: tuple[Tensor, ...] | list[Tensor]) -> None:
    """In one launch; of a single tensor it is sooner launched by itself."""
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources)


def _laid_out(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Where the rows of a call lie in a channel's memory, and where they end and its answer begins."""
    return lay_out((t.shape[0], t.shape[1], t.dtype) for t in tensors)


class GpuChannel:
    """The executor's end."""

    def __init__(self, size: int, most: int, device: torch.device) -> None:
        """Room for a call and its answer of at least `size` bytes together; `most` are all that a call's rows may have."""
        self._shared = SharedMemory(_PAGE + _RING * _SLOT)
        try:
            self._memory = driver.DeviceMemory(-(-size // _ROOM) * _ROOM, device)
            try:
                self._memory.bytes.zero_()  # nobody reads what another tenant left
                self._counters = driver.Counters(self._shared.memory, device)
            except BaseException:
                self._memory.close()
                raise
        except BaseException:
            self._shared.close()
            raise
        self._host = memoryview(self._shared.memory)
        self._most = most
        self._device = device
        self._next = 1
        self._known: dict[bytes, tuple[Message, Tensor]] = {}
        self._room = self._memory.bytes  # where the answer to the call that was taken goes
        self.busy = False
        """A call was taken and not answered yet."""

    def reference(self) -> dict[str, Any]:
        """How the tenant finds it."""
        handle, size, _ = driver.export(self._memory.bytes)
        return {"host": self._shared.reference(), "handle": handle.hex(), "size": size}

    def has_call(self) -> bool:
        """Whether a call has arrived that was not taken yet."""
        return not self.busy and self._counters.host[_ARRIVED] == self._next & 0xFFFFFFFF

    def take(self) -> Message:
        """The call that has arrived. Raises `SymbiosisError` if it cannot be read."""
        self.busy = True
        at = _slot(self._next)
        (length,) = _LENGTH.unpack_from(self._host, at)
        # a copy: the tenant can write to the ring at any time
        frame = bytes(self._host[at + _LENGTH.size : at + _LENGTH.size + min(length, _SLOT - _LENGTH.size)])
        known = self._known.get(frame)  # a tenant says the same few things again and again
        if known is None:
            message = decode(memoryview(frame), max_bytes=self._most, max_body=0, arena=self._memory.bytes)
            if message.kind is not Kind.CALL or message.request != REQUEST:
                raise BadMessage(f"a {message.kind.name} among the calls of a channel")
            room = self._behind(message.tensors)
            if len(self._known) >= _REMEMBER:
                del self._known[next(iter(self._known))]
            known = self._known[frame] = message, room
        message, self._room = known
        return message

    def _behind(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Where the answer to these rows goes: never over them."""
        offsets, end = _laid_out(tensors)
        start = self._memory.bytes.data_ptr()
        if any(t.numel() and t.data_ptr() != start + offset for t, offset in zip(tensors, offsets, strict=True)):
            raise BadMessage("the rows of a call lie one after the other from the start of its channel, and these do not")
        return self._memory.bytes[end:]

    def places(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Where an answer of these shapes lies."""
        return tuple(_views(self._room, [(torch.Size(shape), dtype) for shape in shapes]))

    def answer(self, message: Message) -> None:
        """Give the answer to the call that was taken; the GPU delivers it when it is computed."""
        try:
            self._put(message)
            self._counters.write(driver.current_stream(self._device), _DONE, self._next)
        except (RuntimeError, SymbiosisError):  # the GPU's context is broken: its streams deliver nothing any more
            self._let_go()
            raise
        self._next += 1
        self.busy = False

    def _put(self, message: Message) -> None:
        if message.kind is not Kind.REPLY:
            self._memory.bytes.fill_(0xFF)  # no number: whatever the tenant computes before it hears of this shows
            self._counters.host[_FAILED] = self._next & 0xFFFFFFFF
            return
        offsets, _ = lay_out((t.shape[0], t.shape[1], t.dtype) for t in message.tensors)
        start = self._room.data_ptr()
        here = [start + offset for offset in offsets]
        if [t.data_ptr() for t in message.tensors] != here:  # not computed in place
            shapes = [(t.shape, t.dtype) for t in message.tensors]
            _copy(_views(self._room, shapes), message.tensors)

    def _let_go(self) -> None:
        """The tenant's stream goes on, and its next call finds that the executor is gone."""
        self._counters.host[_FAILED] = 0xFFFFFFFF
        self._counters.host[_DONE] = self._next + _FAR & 0xFFFFFFFF

    def close(self) -> None:
        """Whoever waits here goes on, and finds that the executor is gone."""
        self._counters.host[_FAILED] = 0xFFFFFFFF
        with suppress(RuntimeError), driver.synchronized(self._device):
            pass  # no stream of ours writes the counter after this; a broken context: the tenant goes on all the same
        self._let_go()
        self._counters.close()
        self._memory.close()
        self._host.release()
        self._shared.close()


def _gone() -> ExecutorLost:
    return ExecutorLost("the executor went away in the middle of a call on its GPU: start it, and connect again")


@dataclass(frozen=True, slots=True)
class _Plan:
    """A call that was made before: its frame, and where its rows and its answer lie."""

    frame: bytes
    calls: list[Tensor]
    answers: list[Tensor]


class GpuCaller:
    """The tenant's end: the calls of one stream, by whichever threads. A call that fails is an error of the stream's next.

    The tenant may be on another GPU of the host (`theirs` is the executor's,
    as this process numbers it): then its copies go from GPU to GPU.
    """

    def __init__(self, connection: Connection, device: torch.device, theirs: torch.device) -> None:
        """For the stream on `device` that is current now."""
        self._connection, self._device, self._theirs = connection, device, theirs
        self._stream = driver.current_stream(device)
        self._calling = threading.Lock()
        self._lock = threading.Lock()  # for the counters, which another thread lets go on
        self._lost = False
        self._is_cut = False
        """Somebody interrupted a call while it was put into the stream."""
        self._open(1)

    def _open(self, size: int) -> None:
        try:
            reply = self._connection.ask(Message(Kind.CHANNEL, self._connection.next_request(), body={"bytes": size}))
        except ConnectionCut:
            raise _gone() from None
        if reply.kind is Kind.ERROR:
            raise errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))
        try:
            handle = bytes.fromhex(reply.body["handle"])
            self._memory = driver.OpenedMemory(handle, int(reply.body["size"]), self._theirs)
            shared = open_shared(reply.body["host"])
        except ConnectionCut:
            raise _gone() from None
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"the executor's channel makes no sense: {error!r}") from error
        if len(shared) != _PAGE + _RING * _SLOT:
            raise BadMessage(f"the executor's ring has {len(shared)} bytes: another version of symbiosis?")
        self._host: mmap.mmap = shared
        with self._lock:
            self._counters = driver.Counters(shared, self._device)
            self._next = 1
        self._plans: dict[Any, _Plan] = {}

    def call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        """The answer's tensors (`Link.call`): there by the time the stream comes to use them."""
        with self._calling:  # so calls are in the stream in the order of their numbers
            return self._call(message, widths)

    def _call(self, message: Message, widths: list[int]) -> tuple[Tensor, ...]:
        if self._is_cut:
            self._settle()
        tensors = message.tensors
        key = (message.layers, message.direction, message.training, *widths, *[(t.shape, t.dtype) for t in tensors])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(message, widths)
            if len(self._plans) >= _REMEMBER:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        self._check()
        _copy(plan.calls, tensors)
        self._is_cut = True
        at = _slot(self._next)
        self._host[at : at + len(plan.frame)] = plan.frame
        self._counters.write(self._stream, _ARRIVED, self._next)
        self._counters.wait(self._stream, _DONE, self._next)
        self._next += 1
        self._is_cut = False
        if len(plan.answers) == 1 and self._device == self._theirs:
            return (plan.answers[0].clone(),)
        results = [torch.empty_like(place, device=self._device) for place in plan.answers]
        _copy(results, plan.answers)
        return tuple(results)

    def _plan(self, message: Message, widths: list[int]) -> _Plan:
        tensors, ahead = message.tensors, message.tensors[0].shape[:-1]
        message.request, message.tensors = REQUEST, as_rows(tensors)
        sent = [(t.shape, t.dtype) for t in message.tensors]
        back = [(torch.Size((sent[0][0][0], width)), tensors[0].dtype) for width in widths]
        _, end = _laid_out(message.tensors)
        self._grow(lay_out(((shape[0], shape[1], dtype) for shape, dtype in back), end)[1])
        memory = self._memory.bytes
        frame = encode(message, memory)
        places = [place.view(t.shape) for place, t in zip(_views(memory, sent), tensors, strict=True)]
        answered = [place.view(*ahead, width) for place, width in zip(_views(memory[end:], back), widths, strict=True)]
        return _Plan(_LENGTH.pack(len(frame)) + frame, places, answered)

    def _settle(self) -> None:
        """Go on after a call that was cut: if it was sent, its number is used up once it is answered."""
        self._wait()
        number, host = self._next & 0xFFFFFFFF, self._counters.host
        if host[_ARRIVED] == number:
            while host[_DONE] != number:
                if self._lost:
                    raise self._failure()
                time.sleep(1e-4)
            self._next += 1
        self._is_cut = False

    def _check(self) -> None:
        """Raise what the executor answered to a call before; wait while the ring is full."""
        while True:
            if self._lost or self._counters.host[_FAILED]:
                raise self._failure()
            if (self._next - self._counters.host[_DONE]) & 0xFFFFFFFF < _RING:
                return
            time.sleep(1e-4)

    def _failure(self) -> SymbiosisError:
        if self._lost or self._counters.host[_FAILED] == 0xFFFFFFFF:
            self._lost = True
            return _gone()
        try:
            reply = self._connection.next_error()
        except ConnectionCut:
            return _gone()
        self._counters.host[_FAILED] = 0
        return errors.from_code(str(reply.body.get("code")), str(reply.body.get("message")))

    def _grow(self, size: int) -> None:
        if size <= len(self._memory.bytes):
            return
        self._wait()  # nobody reads the old memory any more
        self._check()
        old = self._counters, self._memory
        self._open(size)
        for part in old:
            part.close()

    def close(self) -> None:
        """Raises what the executor answered to the last call, if that failed."""
        with self._calling:
            try:
                if not self._lost:
                    self._wait()
                    self._check()
                    with self._lock:
                        self._lost = True
                        self._counters.close()
                        self._memory.close()
            finally:
                self._connection.leave()

    def _wait(self) -> None:
        for device in {self._device, self._theirs}:
            torch.cuda.synchronize(device)

    def give_up(self) -> None:
        """The executor is dead: let the streams that wait for it go on. Called by another thread."""
        with self._lock:
            if not self._lost:
                self._lost = True
                self._counters.host[_DONE] = self._next + _FAR & 0xFFFFFFFF


class ProcessWatcher(threading.Thread):
    """Waits for the executor's process to end, at no cost; then lets one caller go on."""

    def __init__(self, pid: int, caller: GpuCaller) -> None:
        super().__init__(name="symbiosis-watch", daemon=True)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise _gone() from None
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
            caller.give_up()
        os.close(self._pidfd)

    def stop(self) -> None:
        self._stop.ring()
