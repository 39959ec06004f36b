"""The guard cuts off endless messages, peers that do not read, and crowds; complete messages keep a connection open."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from symbiosis.transport import connection_guard
from symbiosis.transport.connection_guard import ConnectionGuard
from symbiosis.transport.tcp import TcpPort
from tests.transport.raw_peers import RawPeer, send_without_end

MAX_AHEAD_BYTES = 1 << 20


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
def guard(router) -> Iterator[ConnectionGuard]:
    made = ConnectionGuard(router, MAX_AHEAD_BYTES)
    yield made
    made.close()


@pytest.fixture
def connect(guard, endpoint) -> Iterator[Callable[[], RawPeer]]:
    """Connects peers; each is returned once the guard knows it."""
    peers: list[RawPeer] = []

    def connect() -> RawPeer:
        peers.append(RawPeer(endpoint))
        wait_until(lambda: guard.open_connections() >= sum(not peer.raw._closed for peer in peers))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.raw.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def receive(router: zmq.Socket[bytes], guard: ConnectionGuard) -> int:
    """Receive one message. Returns its connection's descriptor."""
    assert router.poll(30_000)
    *_, last = router.recv_multipart(copy=False)
    descriptor = int(last.get(zmq.SRCFD))
    guard.record_message(descriptor)
    return descriptor


def test_an_endless_message_is_cut_off_and_complete_messages_are_not(router, guard, connect):
    good, bad = connect(), connect()
    for _ in range(40):
        good.send(bytes(1 << 17))
        receive(router, guard)
    assert send_without_end(bad) > MAX_AHEAD_BYTES
    good.send(b"still here")
    receive(router, guard)
    wait_until(lambda: guard.open_connections() == 1)
    assert not good.is_cut(0.5)


def test_framing_overhead_does_not_accumulate(router, guard, connect, monkeypatch):
    monkeypatch.setattr(guard, "_max_bytes_ahead", 1000)
    peer = connect()
    for number in range(1000):
        peer.send(b"x")
        receive(router, guard)
        if number % 250 == 249:
            time.sleep(3 * connection_guard._CHECK_INTERVAL_S)
    assert not peer.is_cut(0.3)


def test_a_cut_connection_is_freed_and_its_descriptor_can_be_reused(router, guard, connect):
    silent = connect()
    silent.send(b"hello")
    descriptor = receive(router, guard)
    guard.assign(descriptor, "silent")
    guard.cut_off(descriptor, "another")
    assert not silent.is_cut(0.3)
    guard.cut_off(descriptor, "silent")
    assert silent.is_cut(30)
    wait_until(lambda: not guard.open_connections())
    guard.cut_off(descriptor, "silent")  # no connection left
    silent.raw.close()
    guard.assign(descriptor, "another")
    guard.unassign(descriptor, "silent")  # late: the descriptor has another owner
    assert guard._owners == {descriptor: "another"}
    guard.unassign(descriptor, "another")
    another = connect()
    for _ in range(4):  # earlier traffic of the descriptor does not count
        another.send(bytes(MAX_AHEAD_BYTES // 2))
        receive(router, guard)
    assert not another.is_cut(0.5)
    assert send_without_end(another) > MAX_AHEAD_BYTES


def test_the_oldest_connections_without_a_channel_are_cut_off(router, guard, connect, monkeypatch):
    monkeypatch.setattr(connection_guard, "_MAX_UNOWNED", 3)
    first = connect()
    first.send(b"hello")
    guard.assign(receive(router, guard), "first")
    unowned = [connect() for _ in range(3)]
    newest = [RawPeer(router.getsockopt_string(zmq.LAST_ENDPOINT)) for _ in range(2)]
    assert all(each.is_cut(30) for each in unowned[:2])
    assert not any(each.is_cut(0.3) for each in (unowned[2], *newest, first))
    for each in newest:
        each.raw.close()


def test_a_descriptor_without_a_connection_is_ignored(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert connection_guard._inspect(file.fileno()) is None
    assert connection_guard._inspect(1 << 20) is None


def test_routing_ids_that_libzmq_assigns_are_random():
    """libzmq aborts at a number that a peer has taken as its routing id."""
    numbers = set()
    for _ in range(3):
        ctypes.CDLL(None).srand(1)  # the state of every new process
        port = TcpPort("tcp://127.0.0.1:0", tokens={}, max_bytes=1 << 20)
        client = RawPeer(port.endpoint)
        client.send(b"?")
        assert port.waitable().poll(30_000)
        ((peer, _),) = port.drain(1)
        numbers.add(peer.routing_id)
        client.raw.close()
        port.close()
    assert len(numbers) == 3
