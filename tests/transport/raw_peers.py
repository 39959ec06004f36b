"""Peers that send what no client of ours sends: raw ZeroMQ, endless messages, mutated frames."""

from __future__ import annotations

import random
import socket
import struct

import torch
import zmq

from symbiosis.transport.messages import Kind, Message, decode, encode

VALID_FRAMES = [
    bytes(encode(Message(Kind.HELLO, 1, body={"name": "ann", "nonce": "ab" * 16}))),
    bytes(encode(Message(Kind.CALL, 2, (0, 1), tensors=(torch.randn(3, 8), torch.ones(3, 2, dtype=torch.int64))))),
    bytes(encode(Message(Kind.FETCH, 3, (1,), body={"name": "weight", "start": 0}))),
    bytes(encode(Message(Kind.BLOB, 4, body={"sha256": "0" * 64, "offset": 7}))),
]


class RawPeer:
    """Speaks ZeroMQ's protocol by hand, as no library does."""

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


def send_without_end(peer: RawPeer, part: bytes = bytes(1 << 16)) -> int:
    """Send until the peer is cut off. Returns the number of bytes sent."""
    sent = 0
    try:
        while sent < 4 << 30:
            peer.send(part, more=True)
            sent += len(part)
    except ConnectionError:
        return sent
    raise AssertionError("it was not cut off")


def mutate_frame(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) + 1)
        choice = rng.randrange(4)
        if choice == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif choice == 1:
            del changed[at:]
        elif choice == 2:
            changed[at:at] = rng.randbytes(rng.randint(1, 12))
        else:
            changed[at : at + 8] = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return bytes(changed)


def receive_message(dealer: zmq.Socket) -> Message:
    assert dealer.poll(20_000), "no reply"
    return decode(memoryview(dealer.recv()), max_bytes=1 << 26)


def exchange(dealer: zmq.Socket, message: Message) -> Message:
    """Send a message and receive the next one."""
    dealer.send(encode(message))
    return receive_message(dealer)
