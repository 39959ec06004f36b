"""The emulated link does to packets what its conditions say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.network.emulated_link import Conditions, EmulatedLink


@pytest.fixture
def echo(network: EmulatedLink) -> Iterator[socket.socket]:
    """A connection over the link to a server that returns what it gets."""
    here, there = network.hosts
    with there.entered():
        listener = socket.create_server((there.ip, 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=run)
    thread.start()
    with here.entered():
        client = socket.create_connection(listener.getsockname())
    client.settimeout(60)
    yield client
    client.close()
    thread.join()
    listener.close()


def exchange(echo: socket.socket, data: bytes) -> float:
    """Seconds until all of it is back."""
    started = time.monotonic()
    sender = threading.Thread(target=echo.sendall, args=(data,))
    sender.start()
    received = b""
    while len(received) < len(data):
        received += echo.recv(1 << 16)
    sender.join()
    assert received == data
    return time.monotonic() - started


def test_no_round_trip_is_shorter_than_the_delay(network: EmulatedLink, echo: socket.socket):
    network.set(Conditions(round_trip_ms=30))
    assert exchange(echo, b"x") >= 0.03


def test_no_transfer_is_faster_than_the_rate(network: EmulatedLink, echo: socket.socket):
    network.set(Conditions(gbit_per_s=0.1))
    assert exchange(echo, bytes(1 << 20)) >= 8 * (1 << 20) / 0.1e9


def test_lost_packets_are_sent_again(network: EmulatedLink, echo: socket.socket):
    network.set(Conditions(round_trip_ms=1, loss=0.05))
    before = network.counts()
    exchange(echo, bytes(range(256)) * 2000)
    after = network.counts()
    assert after.lost > before.lost
    assert after.bytes - before.bytes > 2 * 256 * 2000
