"""Frames that no engine sends: the fetch ends, and everything else goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from symbiosis.errors import BadMessage
from symbiosis.serving import engine_messages
from symbiosis.serving.block_exchange import messages
from symbiosis.serving.engine_messages import GenerateRequest
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.block_ipc import BlockLinks, BlockPort
from symbiosis.transport.engine_ipc import EngineAddress, EngineListener
from symbiosis.transport.shm import runtime_folder
from tests.serving.block_exchange.nodes import BLOCK_BYTES, BLOCK_SIZE, DEADLINE_S, KEY, Node, complete, exchange_until

GREEDY = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [number * 37 % 128 for number in range(60)]
HASH = bytes(messages.HASH_BYTES)


@pytest.fixture(autouse=True)
def large_pieces(monkeypatch):
    monkeypatch.setattr(messages, "MIN_PIECES", 1)


@pytest.fixture
def node(tiny):
    made = Node(tiny)
    yield made
    made.close()


# Frames of a target


def layout(node):
    return node.exchange._server._layout


def fetch(node, **changes):
    return {"op": "fetch", "layout": layout(node), "credit": 4} | changes


BAD_FETCHES = {
    "no hashes": ({}, b""),
    "a part of a hash": ({}, HASH + b"x"),
    "too many hashes": ({}, HASH * (messages.MAX_BLOCKS + 1)),
    "no credit": ({"credit": 0}, HASH),
    "credit below zero": ({"credit": -1}, HASH),
    "credit as text": ({"credit": "4"}, HASH),
    "credit as a truth": ({"credit": True}, HASH),
    "endless credit": ({"credit": 1 << 60}, HASH),
    "another layout": ({"layout": "2x2x4x2x16 float32 of another model"}, HASH),
    "no layout": ({"layout": None}, HASH),
    "a long layout": ({"layout": "x" * 10_000}, HASH),
    "another operation": ({"op": "load"}, HASH),
    "no operation": ({"op": None}, HASH),
    "an operation that is a list": ({"op": ["fetch"]}, HASH),
}


def ask(node, links, number, body, content=b"", *, answers=1):
    """What the source sends."""
    assert links.send(number, body, content)
    received, deadline = [], time.monotonic() + DEADLINE_S
    while len(received) < answers:
        assert time.monotonic() < deadline, "the source does not answer"
        received += [(found, bytes(content)) for _, found, content in links.receive(0.01)]
        node.run_calls()
    return received


def fetch_well(node, links, number):
    """A good target gets its block."""
    assert links.open(number, node.address)
    sequence = node.core.add(PROMPT, GREEDY)
    hashes = node.blocks.hashes(sequence, range(2))
    node.core.cancel(sequence)
    (piece, content), (end, _) = ask(node, links, number, fetch(node), b"".join(hashes[::-1]), answers=2)
    assert (piece["position"], piece["blocks"], len(content), end) == (0, 2, 2 * BLOCK_BYTES, {"op": "end"})


@pytest.mark.parametrize("name", BAD_FETCHES)
def test_a_source_ends_a_bad_fetch(node, name):
    complete(node, PROMPT, GREEDY)
    changes, content = BAD_FETCHES[name]
    links = BlockLinks(node.listener, 1 << 20)
    assert links.open(0, node.address)
    assert ask(node, links, 0, fetch(node, **changes), content) == [({"op": "end"}, b"")]
    assert not node.exchange._server._sendings
    fetch_well(node, links, 1)
    links.close()


@pytest.mark.parametrize(
    "frames", [[b"{}"], [b"[]", HASH], [b"\xff", HASH], [b'{"op":"fetch"}', HASH, HASH], [b"[" * 9999, b""]]
)
def test_a_source_ends_what_is_no_message(node, frames):
    complete(node, PROMPT, GREEDY)
    links = BlockLinks(node.listener, 1 << 20)
    assert links.open(0, node.address)
    links._sockets[0].send_multipart(frames)
    deadline = time.monotonic() + DEADLINE_S
    while not (received := links.receive(0.01)):
        assert time.monotonic() < deadline
    assert received[0][1] == {"op": "end"}
    fetch_well(node, links, 1)
    links.close()


def test_a_second_fetch_over_a_link_and_a_credit_without_one(node):
    complete(node, PROMPT, GREEDY)
    links = BlockLinks(node.listener, 1 << 20)
    assert links.open(0, node.address)
    assert links.send(0, messages.encode_credit(3))
    assert links.send(0, fetch(node, credit=1), HASH)
    assert ask(node, links, 0, fetch(node), HASH)[0] == ({"op": "end"}, b"")
    fetch_well(node, links, 1)
    links.close()


def test_a_source_serves_a_bounded_number_of_targets(node):
    links = BlockLinks(node.listener, 1 << 20)
    for number in range(9):
        assert links.open(number, node.address)
        assert links.send(number, fetch(node), HASH)
    refused = []
    deadline = time.monotonic() + DEADLINE_S
    while not refused:
        assert time.monotonic() < deadline
        refused = links.receive(0.01)
    assert len(node.exchange._server._sendings) == 8
    links.close()


def test_a_target_that_takes_nothing_is_forgotten(node, monkeypatch):
    monkeypatch.setattr("symbiosis.serving.block_exchange.block_server._IDLE_S", 0.05)
    monkeypatch.setattr("symbiosis.serving.block_exchange.block_server._POLL_S", 0.02)
    complete(node, PROMPT, GREEDY)
    node.exchange._server._port.wake()
    links = BlockLinks(node.listener, 1 << 20)
    assert links.open(0, node.address)
    sequence = node.core.add(PROMPT, GREEDY)
    hashes = node.blocks.hashes(sequence, range(6))
    ask(node, links, 0, fetch(node, credit=1), b"".join(hashes))
    exchange_until(lambda: not node.exchange._server._sendings, node)
    links.close()


def test_only_holders_of_the_key_of_the_cluster_are_served(tiny):
    node = Node(tiny, on_host=True)
    complete(node, PROMPT, GREEDY)
    other = EngineListener(host="127.0.0.1", clients=type(KEY).of("the secret of another cluster"))
    links = BlockLinks(other, 1 << 20)
    assert links.open(0, node.address)
    assert links.send(0, fetch(node), HASH)
    assert not links.receive(0.5)
    assert not node.exchange._server._sendings
    links.close()
    node.close()


# Frames of a source

BAD_PIECES = {
    "too few bytes": ({}, BLOCK_BYTES - 1),
    "too many bytes": ({}, BLOCK_BYTES + 1),
    "no blocks": ({"blocks": 0}, 0),
    "blocks below zero": ({"blocks": -1}, 0),
    "blocks as text": ({"blocks": "1"}, BLOCK_BYTES),
    "a position below zero": ({"position": -1}, BLOCK_BYTES),
    "a position after the last": ({"position": 10_000}, BLOCK_BYTES),
    "no position": ({"position": None}, BLOCK_BYTES),
    "more than was asked for": ({"blocks": 40}, 40 * BLOCK_BYTES),
    "no message": ({"op": "end", "position": 1}, 0),
}


class HostileSource:
    """Sends to a target what a test says."""

    def __init__(self):
        self.listener = EngineListener(Path(runtime_folder()))
        self.port = BlockPort(self.listener)
        self.address = EngineAddress("", "", "", self.listener._found["blocks"])

    def wait_for_target(self):
        deadline = time.monotonic() + DEADLINE_S
        while not (received := self.port.receive(0.01)):
            assert time.monotonic() < deadline
        peer, body, content = received[0]
        assert body["op"] == "fetch"
        return peer, len(content) // messages.HASH_BYTES


@pytest.fixture
def hostile():
    made = HostileSource()
    yield made
    made.port.close()


@pytest.mark.parametrize("name", BAD_PIECES)
def test_a_target_computes_what_a_bad_source_sends(node, hostile, tiny, name):
    node.limit(BLOCK_SIZE)
    (asked,) = node.add(PROMPT, GREEDY, source=hostile.address)
    node.step()
    peer, _ = hostile.wait_for_target()
    changes, size = BAD_PIECES[name]
    hostile.port.send(peer, {"op": "blocks", "position": 0, "blocks": 1} | changes, bytes(size))
    exchange_until(lambda: not node.core.block_fetches._fetches, node)
    assert node.blocks.num_received == 0
    node.finish()
    plain = Node(tiny)
    assert [asked.outputs] == complete(plain, PROMPT, GREEDY)
    plain.close()


@pytest.mark.parametrize("position", [0, 2, 5])
def test_blocks_out_of_order_end_a_fetch(node, hostile, position):
    node.limit(BLOCK_SIZE)
    node.add(PROMPT, GREEDY, source=hostile.address)
    node.step()
    peer, _ = hostile.wait_for_target()
    for at in (0, position):
        hostile.port.send(peer, {"op": "blocks", "position": at, "blocks": 1}, bytes(BLOCK_BYTES))
    exchange_until(lambda: not node.core.block_fetches._fetches, node)
    assert node.blocks.num_received == 1
    node.finish()


def test_more_than_its_credit_ends_a_fetch(node, hostile, monkeypatch):
    monkeypatch.setattr(node.exchange._client, "_window", 3)
    node.limit(BLOCK_SIZE)
    node.add(PROMPT, GREEDY, source=hostile.address)
    node.step()
    peer, _ = hostile.wait_for_target()
    for position in range(4):
        hostile.port.send(peer, {"op": "blocks", "position": position, "blocks": 1}, bytes(BLOCK_BYTES))
    deadline = time.monotonic() + DEADLINE_S
    while node.exchange._client._links:  # its credit would come with the blocks that were written, which happens below
        assert time.monotonic() < deadline
    exchange_until(lambda: not node.core.block_fetches._fetches, node)
    assert node.blocks.num_received <= 3
    node.finish()


# Sources that a request names


def test_a_source_survives_the_message():
    request = GenerateRequest(id="1", prompt=[1, 2], source=EngineAddress("", "", "k" * 40, "tcp://10.0.0.1:5"))
    assert engine_messages.decode_request("1", engine_messages.encode_request(request)) == request


@pytest.mark.parametrize(
    "source", [1, [], "tcp://a:1", {}, {"messages": 1}, {"blocks": "x"}, {"a": "b"}, {"messages": "x" * 600, "tokens": ""}]
)
def test_a_message_with_a_wrong_source_is_rejected(source):
    with pytest.raises(BadMessage, match="address"):
        engine_messages.decode_request("1", {"prompt": [1], "sampling": {}, "source": source})


@pytest.mark.parametrize(
    "blocks", ["", "tcp://127.0.0.1:1", "ipc://", "ipc:///etc/x", "ipc://{folder}/../x", "ipc://{folder}/more/x", "{folder}/x"]
)
def test_an_engine_in_a_folder_fetches_from_its_folder(blocks):
    listener = EngineListener(Path(runtime_folder()))
    listener.check_source(EngineAddress("", "", "", f"ipc://{runtime_folder()}/another"))
    with pytest.raises(BadMessage, match="source"):
        listener.check_source(EngineAddress("", "", "", blocks.format(folder=runtime_folder())))


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ("", None), ("ipc:///a", None), ("tcp://127.0.0.1:0", None), ("tcp://127.0.0.1:1;tcp://127.0.0.1:2", None),
        ("tcp://127.0.0.1:99999", None), ("inproc://a", None), ("tcp://127.0.0.1:1", ""), ("tcp://127.0.0.1:1", "short"),
        ("tcp://127.0.0.1:1", "\u00e9" * 40), ("tcp://127.0.0.1:1", "~" * 40), ("tcp://127.0.0.1:1", "0" * 45),
    ],
)  # fmt: skip
def test_an_engine_of_a_cluster_fetches_from_hosts_with_a_key(blocks, key):
    listener = EngineListener(host="127.0.0.1", clients=KEY)
    good = KEY.public.decode()
    listener.check_source(EngineAddress("", "", good, "tcp://10.0.0.1:5000"))
    with pytest.raises(BadMessage, match="source"):
        listener.check_source(EngineAddress("", "", good if key is None else key, blocks))
