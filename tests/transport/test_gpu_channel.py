"""Both ends of a channel, over a fake GPU: plain memory, and one stream that runs everything at once.

Tests with a real GPU are in tests/gpu.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from symbiosis.errors import BadMessage, Closed, ExecutorLost, SymbiosisError
from symbiosis.gpu import driver
from symbiosis.transport import gpu_channel
from symbiosis.transport.gpu_channel import REQUEST, GpuCaller, GpuChannel
from symbiosis.transport.messages import Kind, Message, encode
from symbiosis.transport.shm import ShmLink
from tests.conftest import Serve

CPU = torch.device("cpu")
MAX_CALL_BYTES = 8 << 20


class Memory:
    made: ClassVar[dict[bytes, torch.Tensor]] = {}

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.made[self.handle(self.bytes)] = self.bytes

    @staticmethod
    def handle(tensor: torch.Tensor) -> bytes:
        return tensor.data_ptr().to_bytes(8, "little")

    def close(self) -> None:
        self.made.pop(self.handle(self.bytes), None)


class Opened:
    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        self.bytes = Memory.made[handle]
        assert len(self.bytes) == size

    def close(self) -> None: ...


class Counters:
    def __init__(self, memory: Any, device: torch.device) -> None:
        self.host = memoryview(memory).cast("I")

    def write(self, stream: int, place: int, value: int) -> None:
        self.host[place] = value & 0xFFFFFFFF

    def wait(self, stream: int, place: int, value: int) -> None:
        while (self.host[place] - value) & 0xFFFFFFFF >= 1 << 31:
            time.sleep(1e-5)

    def close(self) -> None:
        self.host.release()


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(driver, "DeviceMemory", Memory)
    monkeypatch.setattr(driver, "OpenedMemory", Opened)
    monkeypatch.setattr(driver, "Counters", Counters)
    monkeypatch.setattr(driver, "current_stream", lambda device: 0)
    monkeypatch.setattr(driver, "synchronized", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver, "export", lambda tensor: (Memory.handle(tensor), len(tensor), 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


class Multiplier:
    """An executor whose layer n multiplies by n and fails for 0, and the connection to it."""

    def __init__(self) -> None:
        self.channel: GpuChannel | None = None
        self.errors: list[Message] = []
        self.pause_s = 0.0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, message: Message) -> None: ...

    def wait_for(self, message: Message) -> Message:
        with self._lock:
            old, self.channel = self.channel, GpuChannel(message.body["bytes"], MAX_CALL_BYTES, CPU)
            if old is not None:
                old.close()
            return Message(Kind.REPLY, message.request, body=self.channel.reference())

    def next_request(self) -> int:
        return 1

    def next_error(self) -> Message:
        return self.errors.pop(0)

    def leave(self) -> None: ...

    def _run(self) -> None:
        while not self._stop.wait(1e-4):
            with self._lock:
                if self.channel is not None and self.channel.has_call():
                    self._reply(self.channel)

    def _reply(self, channel: GpuChannel) -> None:
        message = channel.take()
        time.sleep(self.pause_s)
        rows, factor = message.tensors[0], message.layers[0]
        if factor == 0:
            self.errors.append(Message(Kind.ERROR, body={"code": BadMessage.code, "message": "factor 0"}))
            channel.reply(Message(Kind.ERROR, message.request))
            return
        (buffer,) = channel.reply_buffers([(rows.shape[0], 3 * rows.shape[1])], rows.dtype)
        buffer.copy_(torch.cat([factor * each for each in message.tensors] + [rows] * (3 - len(message.tensors)), dim=1))
        channel.reply(Message(Kind.REPLY, message.request, tensors=(buffer,)))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def multiplier():
    made = Multiplier()
    yield made
    made.stop()


def multiply(caller: GpuCaller, factor: int, *rows: torch.Tensor) -> torch.Tensor:
    width = rows[0].shape[-1]
    (found,) = caller.call(Message(Kind.CALL, layers=(factor,), tensors=rows), [3 * width])
    return found[..., : len(rows) * width]


def test_replies_follow_their_rows_and_channels_grow(multiplier):
    caller = GpuCaller(multiplier, CPU, CPU)
    for count in (1, 5, 1500, 2, 4000, 1):
        one, other = torch.randn(2, count, 64), torch.randn(2, count, 64)
        assert torch.equal(multiply(caller, 3, one), 3 * one)
        assert torch.equal(multiply(caller, 2, one, other), 2 * torch.cat([one, other], dim=-1))
    caller.close()


def test_threads_share_a_channel(multiplier):
    caller = GpuCaller(multiplier, CPU, CPU)

    def work(number: int) -> bool:
        given = [torch.full((size, 32), float(number)) for size in (1, 7, 4000, 3)]
        return all(torch.equal(multiply(caller, number, rows), number * rows) for rows in given * 10)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(1, 7)))
    caller.close()


def test_the_next_call_raises_the_error_of_a_failed_one_and_then_calls_work(multiplier):
    caller, rows = GpuCaller(multiplier, CPU, CPU), torch.ones(2, 8)
    assert multiply(caller, 0, rows).isnan().all()
    with pytest.raises(BadMessage, match="factor 0"):
        multiply(caller, 2, rows)
    assert torch.equal(multiply(caller, 2, rows), 2 * rows)
    caller.close()


@pytest.mark.parametrize("at", ["write", "wait", "waited"])
def test_calls_after_an_interrupt_get_the_right_replies(multiplier, monkeypatch, at):
    caller, rows = GpuCaller(multiplier, CPU, CPU), torch.ones(2, 8)
    multiply(caller, 2, rows)
    multiplier.pause_s = 0.01
    wait = Counters.wait

    def interrupted(self: Counters, stream: int, place: int, value: int) -> None:
        if at == "waited":
            wait(self, stream, place, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Counters, "write" if at == "write" else "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            multiply(caller, 3, rows)
    assert torch.equal(multiply(caller, 5, 10 * rows), 50 * rows)
    assert torch.equal(multiply(caller, 7, 10 * rows), 70 * rows)
    caller.close()


def test_after_an_interrupt_a_dead_executor_raises_and_does_not_hang(multiplier, monkeypatch):
    caller, rows = GpuCaller(multiplier, CPU, CPU), torch.ones(2, 8)
    multiply(caller, 2, rows)
    multiplier.stop()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Counters, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            multiply(caller, 3, rows)
    caller.unblock()
    with pytest.raises(ExecutorLost):
        multiply(caller, 5, rows)


def take_frame(channel: GpuChannel, frame: bytes) -> Message:
    at = gpu_channel._slot_offset(channel._next)
    channel._host[at : at + 4 + len(frame)] = len(frame).to_bytes(4, "little") + frame
    return channel.take()


def test_rows_at_other_offsets_are_rejected():
    channel = GpuChannel(1, MAX_CALL_BYTES, CPU)
    rows = torch.ones(4, 64), torch.ones(4, 64)
    frame = bytes(encode(Message(Kind.CALL, REQUEST, layers=(1,), tensors=rows), channel._memory.bytes))
    assert all(torch.equal(*both) for both in zip(take_frame(channel, frame).tensors, rows, strict=True))
    second = frame.rindex((1024).to_bytes(8, "little"))
    for offset in (0, 64, 960, 1088, 2048):
        moved = frame[:second] + offset.to_bytes(8, "little") + frame[second + 8 :]
        with pytest.raises(BadMessage, match="must follow one another"):
            take_frame(channel, moved)
    inside = bytes(encode(Message(Kind.CALL, REQUEST, layers=(1,), tensors=rows)))
    with pytest.raises(BadMessage):
        take_frame(channel, inside)


class FakeCaller:
    """A caller and its watcher, as a closing link uses them."""

    def __init__(self, link: ShmLink, error: SymbiosisError | None = None, pause_s: float = 0.0) -> None:
        self._connection, self._error, self._pause_s = link.connect(), error, pause_s
        self.is_watched = True

    def close(self) -> None:
        assert self.is_watched
        time.sleep(self._pause_s)
        self._connection.leave()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self.is_watched = False


def test_closing_closes_every_stream_even_if_one_raises(serve: Serve):
    link: Any = serve("shm").raw("ann")
    callers = [FakeCaller(link, ExecutorLost("gone")), FakeCaller(link), FakeCaller(link, BadMessage("no"))]
    link._callers = {number: (caller, caller) for number, caller in enumerate(callers)}
    with pytest.raises(SymbiosisError):
        link.close()
    assert not any(caller.is_watched for caller in callers)
    assert not link.sockets


def test_closing_while_a_stream_opens_its_channel(serve: Serve, monkeypatch):
    link: Any = serve("shm").raw("ann")
    slow = FakeCaller(link, pause_s=0.1)
    link._callers[7] = slow, slow
    begun, made = threading.Event(), list[FakeCaller]()

    def new(gpu: torch.device) -> tuple[FakeCaller, FakeCaller]:
        begun.set()
        time.sleep(0.1)
        made.append(FakeCaller(link))
        return made[0], made[0]

    monkeypatch.setattr(link, "_new_caller", new)
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(link._open_caller, CPU)
        begun.wait()
        link.close()
        assert opened.result() == (made[0], made[0])
    assert not made[0].is_watched
    assert not link.sockets
    with pytest.raises(Closed):
        link._open_caller(CPU)
