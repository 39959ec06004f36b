"""Who sends without an end, does not read, or comes in crowds is cut off; who is heard is not."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from symbiosis.transport import connection_guard
from symbiosis.transport.connection_guard import ConnectionGuard
from symbiosis.transport.tcp import TcpPort

MOST = 1 << 20


class Caller:
    """Speaks ZeroMQ's protocol by hand, as nobody's library would."""

    def __init__(self, endpoint: str, identity: bytes = b"") -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self.raw = socket.create_connection((host, int(port)), timeout=60)
        self.raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + self._property(b"Socket-Type", b"DEALER") + self._property(b"Identity", identity)
        self.raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        greeting = self._receive(64)
        assert greeting[0] == 0xFF
        kind, size = self._receive(2)
        assert kind == 4
        assert self._receive(size).startswith(b"\x05READY")

    def _receive(self, count: int) -> bytes:
        made = b""
        while len(made) < count:
            made += self.raw.recv(count - len(made))
        return made

    def _property(self, name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    def send(self, content: bytes, *, more: bool = False) -> None:
        self.raw.sendall(struct.pack(">BQ", 2 | more, len(content)) + content)

    def is_cut(self, seconds: float) -> bool:
        """Whether the other end closes within this time."""
        self.raw.settimeout(seconds)
        try:
            while self.raw.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    made = context.socket(zmq.ROUTER)
    yield made
    context.destroy(linger=0)


@pytest.fixture
def endpoint(router) -> str:
    router.bind("tcp://127.0.0.1:*")
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.fixture
def watch(router) -> Iterator[ConnectionGuard]:
    made = ConnectionGuard(router, MOST)
    yield made
    made.close()


@pytest.fixture
def call(watch, endpoint) -> Iterator[Callable[[], Caller]]:
    """A caller, once it is watched."""
    callers: list[Caller] = []

    def come() -> Caller:
        callers.append(Caller(endpoint))
        until(lambda: len(watch._open) >= sum(not caller.raw._closed for caller in callers))
        return callers[-1]

    yield come
    for caller in callers:
        caller.raw.close()


def until(over: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not over():
        assert time.monotonic() < end
        time.sleep(0.01)


def hear(router: zmq.Socket[bytes], watch: ConnectionGuard) -> int:
    """One message; its connection's descriptor."""
    assert router.poll(30_000)
    *_, last = router.recv_multipart(copy=False)
    descriptor = int(last.get(zmq.SRCFD))
    watch.heard(descriptor)
    return descriptor


def send_without_end(caller: Caller, part: bytes = bytes(1 << 16)) -> int:
    """Until it is cut off: how much was sent."""
    sent = 0
    try:
        while sent < 4 << 30:
            caller.send(part, more=True)
            sent += len(part)
    except ConnectionError:
        return sent
    raise AssertionError("it was not cut off")


def test_a_message_without_an_end_is_cut_off_and_one_that_is_heard_is_not(router, watch, call):
    good, bad = call(), call()
    for _ in range(40):
        good.send(bytes(1 << 17))
        hear(router, watch)
    assert send_without_end(bad) > MOST
    good.send(b"still here")
    hear(router, watch)
    until(lambda: len(watch._open) == 1)
    assert not good.is_cut(0.5)


def test_what_the_wire_adds_to_messages_does_not_add_up(router, watch, call, monkeypatch):
    monkeypatch.setattr(watch, "_most_ahead", 1000)
    caller = call()
    for number in range(1000):
        caller.send(b"x")
        hear(router, watch)
        if number % 250 == 249:
            time.sleep(3 * connection_guard._LOOK_EVERY_S)
    assert not caller.is_cut(0.3)


def test_who_is_cut_is_let_go_and_its_descriptor_may_be_anothers(router, watch, call):
    deaf = call()
    deaf.send(b"hello")
    descriptor = hear(router, watch)
    watch.belongs(descriptor, "deaf")
    watch.cut(descriptor, "another")
    assert not deaf.is_cut(0.3)
    watch.cut(descriptor, "deaf")
    assert deaf.is_cut(30)
    until(lambda: not watch._open)
    watch.cut(descriptor, "deaf")  # there is none
    deaf.raw.close()
    watch.belongs(descriptor, "another")
    watch.left(descriptor, "deaf")  # late: it is another's
    assert watch._owners == {descriptor: "another"}
    watch.left(descriptor, "another")
    another = call()
    for _ in range(4):  # what came by the descriptor before counts for nobody else
        another.send(bytes(MOST // 2))
        hear(router, watch)
    assert not another.is_cut(0.5)
    assert send_without_end(another) > MOST


def test_of_many_without_a_channel_the_oldest_go(router, watch, call, monkeypatch):
    monkeypatch.setattr(connection_guard, "_STRANGERS", 3)
    first = call()
    first.send(b"hello")
    watch.belongs(hear(router, watch), "first")
    strangers = [call() for _ in range(3)]
    newest = [Caller(router.getsockopt_string(zmq.LAST_ENDPOINT)) for _ in range(2)]
    assert all(each.is_cut(30) for each in strangers[:2])
    assert not any(each.is_cut(0.3) for each in (strangers[2], *newest, first))
    for each in newest:
        each.raw.close()


def test_a_descriptor_that_is_no_connection_is_no_fault(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert connection_guard._state(file.fileno()) is None
    assert connection_guard._state(1 << 20) is None


def test_nobody_knows_the_number_of_who_brings_no_id():
    """libzmq aborts when it comes to a number that somebody has taken for an id."""
    numbers = set()
    for _ in range(3):
        ctypes.CDLL(None).srand(1)  # as every process begins
        port = TcpPort("tcp://127.0.0.1:0", tokens={}, max_bytes=1 << 20)
        caller = Caller(port.endpoint)
        caller.send(b"?")
        assert port.waitable().poll(30_000)
        ((peer, _),) = port.drain(1)
        numbers.add(peer.key)
        caller.raw.close()
        port.close()
    assert len(numbers) == 3
