"""Peers that leave in the middle of an operation."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from symbiosis.serving.rpc_server import RpcServer
from symbiosis.transport.addresses import runtime_folder
from symbiosis.transport.engine_ipc import EngineListener


class Greeter:
    """Notes the keys of its peers."""

    operations = ("hello",)

    def __init__(self, rpc: RpcServer) -> None:
        self._rpc = rpc
        self.keys: SimpleQueue[bytes] = SimpleQueue()

    def handle(self, id: str, body: dict[str, Any]) -> None:
        self.keys.put(self._rpc.key_of(id))

    def drop_peer(self, peer: str) -> None:
        pass

    def close(self) -> None:
        pass


class Peer:
    def __init__(self, address: str, name: bytes) -> None:
        self.name, self._context = name, zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.connect(address)

    def greet(self) -> None:
        self._socket.send(json.dumps({"op": "hello", "id": "1"}).encode())

    def receive(self) -> dict[str, Any]:
        assert self._socket.poll(10_000)
        body: dict[str, Any] = json.loads(self._socket.recv())
        return body

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def healthy() -> dict[str, Any]:
    return {"check": lambda: True}


@pytest.fixture
def server(healthy) -> Iterator[tuple[RpcServer, Greeter, str]]:
    listener = EngineListener(runtime_folder())
    rpc = RpcServer(listener, lambda: bool(healthy["check"]()))
    greeter = Greeter(rpc)
    rpc.add_handler(greeter)
    yield rpc, greeter, listener.address.messages
    rpc.close()


def test_a_peer_that_leaves_before_the_reply_to_its_hello_harms_no_other(server, healthy):
    rpc, greeter, address = server
    first, second = Peer(address, b"first"), Peer(address, b"second")
    left = threading.Event()

    def leave() -> bool:  # on the IPC thread, between the message and the reply
        if not left.is_set():
            left.set()
            first.close()
            time.sleep(0.3)  # the server's socket notices
        return True

    time.sleep(1.5)  # after the first heartbeat
    healthy["check"] = leave
    first.greet()
    assert left.wait(10)
    second.greet()
    assert second.receive()["beat"] is True
    assert rpc.is_alive()
    assert greeter.keys.get(timeout=10) == b"second"
    assert greeter.keys.empty()
    second.close()
