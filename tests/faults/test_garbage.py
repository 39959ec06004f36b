"""Bytes that no client of ours sends, over a real socket, while another tenant works."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch
import zmq

from symbiosis.errors import VersionMismatch
from symbiosis.transport.messages import PROTOCOL, Kind, Message, encode
from symbiosis.transport.tcp import TcpLink
from symbiosis.transport.zmq_client import ZmqLink
from tests.conftest import Serve, Served
from tests.policies import NeverPolicy
from tests.transport.raw_peers import VALID_FRAMES, RawPeer, exchange, mutate_frame, receive_message, send_without_end


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("tcp")


@pytest.fixture
def bystander(served: Served, tiny, ids) -> Iterator[None]:
    """A tenant that works through the whole test and must always get the right result."""
    model, expected = served.connect("bystander"), tiny(ids).logits
    stop, wrong = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
            except BaseException as error:
                wrong.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert wrong == []
    assert served.executor.stats()["tenants"]["bystander"]["errors"] == 0


@pytest.fixture
def dealer(served: Served) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.ROUTING_ID, b"d" * 16)
    made.connect(served.address)
    yield made
    context.destroy(linger=0)


def reconnect(dealer: zmq.Socket, address: str) -> None:
    """By another routing id: libzmq ignores a connection by one whose last connection still has unread messages."""
    dealer.disconnect(address)
    dealer.setsockopt(zmq.ROUTING_ID, os.urandom(16))
    dealer.connect(address)


def find_reply(dealer: zmq.Socket, message: Message) -> Message | None:
    """The reply. None if the connection was cut off."""
    dealer.send(encode(message))
    while dealer.poll(2000):
        found = receive_message(dealer)
        if found.request == message.request:
            return found
    return None


def test_thousands_of_mutated_frames_disturb_no_other_tenant(served: Served, bystander, dealer):
    rng = random.Random(4)
    assert exchange(dealer, Message(Kind.HELLO, 1, body={"name": "eve"})).kind is Kind.WELCOME
    for _ in range(3000):
        dealer.send(mutate_frame(rng, rng.choice(VALID_FRAMES)))
        while dealer.poll(0):
            dealer.recv()
    # BYE may have been among them, or replies were not read in time; after HELLO everything works again
    hello = Message(Kind.HELLO, 1 << 50, body={"name": "eve"})
    while (welcome := find_reply(dealer, hello)) is None:
        reconnect(dealer, served.address)
    assert welcome.kind is Kind.WELCOME
    assert find_reply(dealer, Message(Kind.CALL, 1 << 51, (0,), tensors=(torch.ones(2, 64),))).kind is Kind.REPLY


def test_messages_of_many_parts_are_rejected(served: Served, bystander, dealer):
    dealer.send_multipart([b"x"] * 20_000)
    assert "20000 frames; expected one" in receive_message(dealer).body["message"]
    dealer.send_multipart([encode(Message(Kind.HELLO, 1)), b""])
    assert receive_message(dealer).body["code"] == "bad_message"
    dealer.send_multipart([b"", encode(Message(Kind.HELLO, 1))])
    assert receive_message(dealer).body["code"] == "bad_message"
    assert exchange(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME


@pytest.mark.parametrize("frame", [b"", b"\0", b"SYMB", os.urandom(500), b"GET / HTTP/1.1\r\n\r\n", VALID_FRAMES[1][:40]])
def test_garbage_gets_an_error_reply(served: Served, bystander, dealer, frame: bytes):
    dealer.send(frame)
    reply = receive_message(dealer)
    assert (reply.kind, reply.body["code"]) == (Kind.ERROR, "bad_message")


def test_the_transport_cuts_off_a_frame_beyond_the_limit(served: Served, bystander, dealer):
    before = psutil.Process().memory_info().rss
    size = served.executor.limits.max_bytes + (1 << 20)
    dealer.send(bytes(size))
    assert not dealer.poll(500)  # the connection ends; zmq connects anew, and the frame is gone
    assert psutil.Process().memory_info().rss - before < 3 * size
    assert exchange(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME


def test_a_body_beyond_the_limit_is_rejected_unread(served: Served, bystander, dealer):
    reply = exchange(dealer, Message(Kind.HELLO, 1, body={"name": "x" * 100_000}))
    assert "beyond the bounds" in reply.body["message"]


def test_bytes_that_are_not_zeromq_are_ignored(served: Served, bystander):
    port = int(served.address.rpartition(":")[2])
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f", b""):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(junk)


def test_a_tenant_of_another_version_gets_an_error(served: Served, bystander, dealer):
    frame = encode(Message(Kind.HELLO, 1))
    frame[4] = PROTOCOL + 1
    dealer.send(frame)
    reply = receive_message(dealer)
    assert reply.body["code"] == VersionMismatch.code
    assert "install the same version" in reply.body["message"]


def test_the_tenant_reports_an_executor_of_another_version():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def reply() -> None:
        key, _ = router.recv_multipart()
        frame = encode(Message(Kind.WELCOME, 1))
        frame[4] = PROTOCOL + 1
        router.send_multipart([key, frame])

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(VersionMismatch, match=f"speaks protocol {PROTOCOL + 1}"):
        TcpLink(address, token=None, hello={}, grace_s=5)
    thread.join()
    context.destroy(linger=0)


def test_a_peer_without_hello_gets_only_errors(served: Served, bystander, dealer):
    for kind in Kind:
        if kind is not Kind.HELLO:
            reply = exchange(dealer, Message(kind, 5, (0,), tensors=(torch.ones(1, 64),)))
            assert (reply.request, reply.body["code"]) == (5, "hello_first")


def test_a_peer_without_a_routing_id_gets_no_channel(served: Served, bystander):
    """libzmq would number it, and another peer could take its number and its replies."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(served.address)
    reply = exchange(dealer, Message(Kind.HELLO, 1, body={"name": "eve"}))
    assert reply.kind is Kind.ERROR
    assert "routing id of 5 bytes" in reply.body["message"]
    context.destroy(linger=0)


def test_a_tenant_that_never_reads_is_cut_off_without_effect_on_others(served: Served, bystander):
    """Two thousand calls with replies of 1 MB, none read: the queue limits bound memory."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        # Eve shares a process with the executor: her own queue must not count as the executor's
        dealer.setsockopt(zmq.SNDHWM, 4)
        dealer.setsockopt(zmq.RCVHWM, 4)
        dealer.setsockopt(zmq.ROUTING_ID, b"e" * 16)
        dealer.connect(served.address)
        assert exchange(dealer, Message(Kind.HELLO, 1, body={"name": "eve"})).kind is Kind.WELCOME
        before = psutil.Process().memory_info().rss
        frame = bytes(encode(Message(Kind.CALL, 1, (0,), tensors=(torch.ones(4000, 64),))))
        sent = 0
        while sent < 2000 and dealer.poll(200 if sent > 20 else 30_000, zmq.POLLOUT):
            dealer.send(frame)
            sent += 1
        assert 20 < sent < 2000  # how many depends on the kernel's buffers
        grown = psutil.Process().memory_info().rss - before
        assert grown < 300 << 20, f"{grown >> 20} MB"
    finally:
        context.destroy(linger=0)  # collected as garbage, it would wait for its messages


def test_a_second_call_before_the_reply_is_rejected(served: Served, dealer):
    served.executor.use_policy(NeverPolicy())
    assert exchange(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME
    call = Message(Kind.CALL, 2, (0,), tensors=(torch.ones(1, 64),))
    dealer.send(encode(call))
    dealer.send(encode(call))  # the same again: no second reply
    call.request = 3
    assert exchange(dealer, call).body["code"] == "too_many_calls"
    assert exchange(dealer, Message(Kind.PING, 2)).body["known"] is True
    served.executor.use_policy("opportunistic")
    replies = [exchange(dealer, Message(Kind.PING, 2)), receive_message(dealer)]
    assert sorted(reply.kind for reply in replies) == [Kind.PING, Kind.REPLY]
    assert not dealer.poll(100)


def test_an_endless_message_is_cut_off_without_effect_on_others(served: Served, bystander):
    """Parts of 30 MB each, without a last one."""
    peer, before = RawPeer(served.address), psutil.Process().memory_info().rss
    assert send_without_end(peer, bytes(30 << 20)) > 100 << 20
    grown = psutil.Process().memory_info().rss - before
    assert grown < 1 << 30, f"{grown >> 20} MB"
    peer.raw.close()


def test_a_raw_peer_that_reads_no_reply_is_cut_off(served: Served, bystander):
    peer = RawPeer(served.address, b"c" * 16)
    peer.send(bytes(encode(Message(Kind.HELLO, 1, body={"name": "eve"}))))
    call = bytes(encode(Message(Kind.CALL, 1, (0,), tensors=(torch.ones(8000, 64),))))
    for _ in range(1000):
        try:
            peer.send(call)
        except ConnectionError:
            break
    else:
        raise AssertionError("it was not cut off")
    peer.raw.close()


def test_a_flood_of_channels_by_one_tenant_keeps_no_other_out(serve: Serve):
    served = serve("tcp", limits={"max_sessions": 8})
    ann = served.connect("ann")
    context = zmq.Context()
    for i in range(30):
        flood = context.socket(zmq.DEALER)
        flood.setsockopt(zmq.ROUTING_ID, b"flood of channels %d" % i)
        flood.connect(served.address)
        assert exchange(flood, Message(Kind.HELLO, i, body={"name": "eve"})).kind is Kind.WELCOME
    assert ann(torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 128)
    assert isinstance(served.connect("bob").symbiosis._link, ZmqLink)
    assert served.executor.stats()["sessions"] <= 8
    context.destroy(linger=0)
