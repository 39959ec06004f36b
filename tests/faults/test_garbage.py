"""Bytes that no client of ours would send, over a real socket, while another tenant goes on."""

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
from symbiosis.transport.messages import PROTOCOL, Kind, Message, decode, encode
from symbiosis.transport.tcp import TcpLink
from symbiosis.transport.zmq_client import ZmqLink
from tests.conftest import Serve, Served
from tests.transport.test_connection_guard import Caller, send_without_end
from tests.transport.test_messages import VALID


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("tcp")


@pytest.fixture
def bystander(served: Served, tiny, ids) -> Iterator[None]:
    """A tenant that works through the whole test and must always get the right answer."""
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


def hear(dealer: zmq.Socket) -> Message:
    assert dealer.poll(20_000), "no answer"
    return decode(memoryview(dealer.recv()), max_bytes=1 << 26)


def say(dealer: zmq.Socket, message: Message) -> Message:
    dealer.send(encode(message))
    return hear(dealer)


def ask(dealer: zmq.Socket, message: Message) -> Message:
    """Its answer; said again where a connection that was cut off took it along."""
    while True:
        dealer.send(encode(message))
        while dealer.poll(2000):
            found = hear(dealer)
            if found.request == message.request:
                return found


def mutate(rng: random.Random, frame: bytes) -> bytes:
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


def test_thousands_of_mutated_frames_disturb_nobody(served: Served, bystander, dealer):
    rng = random.Random(4)
    assert say(dealer, Message(Kind.HELLO, 1, body={"name": "eve"})).kind is Kind.WELCOME
    for _ in range(3000):
        dealer.send(mutate(rng, rng.choice(VALID)))
        while dealer.poll(0):
            dealer.recv()
    # BYE may have been among them, or answers came faster than they were read; after HELLO everything works again
    assert ask(dealer, Message(Kind.HELLO, 1 << 50, body={"name": "eve"})).kind is Kind.WELCOME
    rows = torch.ones(2, 64)
    assert ask(dealer, Message(Kind.CALL, 1 << 51, (0,), tensors=(rows,))).kind is Kind.REPLY


def test_frames_of_many_parts_are_refused(served: Served, bystander, dealer):
    dealer.send_multipart([b"x"] * 20_000)
    assert "20000 frames; expected one" in hear(dealer).body["message"]
    dealer.send_multipart([encode(Message(Kind.HELLO, 1)), b""])
    assert hear(dealer).body["code"] == "bad_message"
    dealer.send_multipart([b"", encode(Message(Kind.HELLO, 1))])
    assert hear(dealer).body["code"] == "bad_message"
    assert say(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME


@pytest.mark.parametrize("frame", [b"", b"\0", b"SYMB", os.urandom(500), b"GET / HTTP/1.1\r\n\r\n", VALID[1][:40]])
def test_garbage_gets_an_answer_that_says_so(served: Served, bystander, dealer, frame: bytes):
    dealer.send(frame)
    answer = hear(dealer)
    assert (answer.kind, answer.body["code"]) == (Kind.ERROR, "bad_message")


def test_a_frame_beyond_the_bound_is_cut_off_by_the_transport(served: Served, bystander, dealer):
    before = psutil.Process().memory_info().rss
    size = served.executor.limits.max_bytes + (1 << 20)
    dealer.send(bytes(size))
    assert not dealer.poll(500)  # the connection ends; zmq connects anew, and the frame is gone
    assert psutil.Process().memory_info().rss - before < 3 * size
    assert say(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME


def test_a_body_beyond_the_bound_is_refused_unread(served: Served, bystander, dealer):
    answer = say(dealer, Message(Kind.HELLO, 1, body={"name": "x" * 100_000}))
    assert "beyond the bounds" in answer.body["message"]


def test_bytes_that_are_not_even_zeromq_are_ignored(served: Served, bystander):
    port = int(served.address.rpartition(":")[2])
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f", b""):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(junk)


def test_a_tenant_of_another_version_is_told_so(served: Served, bystander, dealer):
    frame = encode(Message(Kind.HELLO, 1))
    frame[4] = PROTOCOL + 1
    dealer.send(frame)
    answer = hear(dealer)
    assert answer.body["code"] == VersionMismatch.code
    assert "install the same version" in answer.body["message"]


def test_an_executor_of_another_version_is_named_by_the_tenant():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer() -> None:
        key, _ = router.recv_multipart()
        frame = encode(Message(Kind.WELCOME, 1))
        frame[4] = PROTOCOL + 1
        router.send_multipart([key, frame])

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(VersionMismatch, match=f"speaks protocol {PROTOCOL + 1}"):
        TcpLink(address, token=None, hello={}, grace_s=5)
    thread.join()
    context.destroy(linger=0)


def test_a_peer_that_never_says_hello_gets_nothing_else(served: Served, bystander, dealer):
    for kind in Kind:
        if kind is not Kind.HELLO:
            answer = say(dealer, Message(kind, 5, (0,), tensors=(torch.ones(1, 64),)))
            assert (answer.request, answer.body["code"]) == (5, "hello_first")


def test_whoever_brings_no_id_of_its_own_gets_no_channel(served: Served, bystander):
    """libzmq would number it, and the next to come could take its number, and its answers."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(served.address)
    answer = say(dealer, Message(Kind.HELLO, 1, body={"name": "eve"}))
    assert answer.kind is Kind.ERROR
    assert "routing id of 5 bytes" in answer.body["message"]
    context.destroy(linger=0)


def test_a_tenant_that_never_reads_is_cut_off_and_nobody_notices(served: Served, bystander):
    """Two thousand calls of 1 MB answers, none read: memory stays bounded by what may wait."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    # Eve shares a process with the executor: what waits on her own side must not be taken for the executor's
    dealer.setsockopt(zmq.SNDHWM, 4)
    dealer.setsockopt(zmq.RCVHWM, 4)
    dealer.setsockopt(zmq.ROUTING_ID, b"e" * 16)
    dealer.connect(served.address)
    assert say(dealer, Message(Kind.HELLO, 1, body={"name": "eve"})).kind is Kind.WELCOME
    before = psutil.Process().memory_info().rss
    frame = bytes(encode(Message(Kind.CALL, 1, (0,), tensors=(torch.ones(4000, 64),))))
    sent = 0
    for _ in range(2000):
        if not dealer.poll(200 if sent > 50 else 30_000, zmq.POLLOUT):
            break
        dealer.send(frame)
        sent += 1
    assert sent > 50
    grown = psutil.Process().memory_info().rss - before
    assert grown < 300 << 20, f"{grown >> 20} MB"
    context.destroy(linger=0)


def test_a_second_call_before_the_answer_is_refused_over_the_wire(served: Served, dealer):
    class Never:
        name = "never"

        def decide(self, pending, heard, costs, now):
            from symbiosis.split.executor.policies import Decision

            return Decision()

    served.executor._service.batcher.policy, real = Never(), served.executor._service.batcher.policy
    assert say(dealer, Message(Kind.HELLO, 1)).kind is Kind.WELCOME
    call = Message(Kind.CALL, 2, (0,), tensors=(torch.ones(1, 64),))
    dealer.send(encode(call))
    dealer.send(encode(call))  # the same once more: no second answer
    call.request = 3
    assert say(dealer, call).body["code"] == "too_many_calls"
    assert say(dealer, Message(Kind.PING, 2)).body["known"] is True
    served.executor._service.batcher.policy = real
    answer = say(dealer, Message(Kind.PING, 2))
    answers = [answer, hear(dealer)]
    assert sorted(a.kind for a in answers) == [Kind.PING, Kind.REPLY]
    assert not dealer.poll(100)


def test_a_message_that_never_ends_is_cut_off_and_nobody_notices(served: Served, bystander):
    """Parts of 30 MB each, and always one more."""
    caller, before = Caller(served.address), psutil.Process().memory_info().rss
    assert send_without_end(caller, bytes(30 << 20)) > 100 << 20
    grown = psutil.Process().memory_info().rss - before
    assert grown < 1 << 30, f"{grown >> 20} MB"
    caller.raw.close()


def test_who_reads_no_answer_is_cut_off(served: Served, bystander):
    caller = Caller(served.address, b"c" * 16)
    caller.send(bytes(encode(Message(Kind.HELLO, 1, body={"name": "eve"}))))
    call = bytes(encode(Message(Kind.CALL, 1, (0,), tensors=(torch.ones(8000, 64),))))
    for _ in range(1000):
        try:
            caller.send(call)
        except ConnectionError:
            break
    else:
        raise AssertionError("it was not cut off")
    caller.raw.close()


def test_a_flood_of_channels_by_one_tenant_keeps_nobody_out(serve: Serve):
    served = serve("tcp", limits={"max_sessions": 8})
    ann = served.connect("ann")
    context = zmq.Context()
    for i in range(30):
        flood = context.socket(zmq.DEALER)
        flood.setsockopt(zmq.ROUTING_ID, b"flood of channels %d" % i)
        flood.connect(served.address)
        assert say(flood, Message(Kind.HELLO, i, body={"name": "eve"})).kind is Kind.WELCOME
    assert ann(torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 128)
    assert isinstance(served.connect("bob").symbiosis._link, ZmqLink)
    assert served.executor.stats()["sessions"] <= 8
    context.destroy(linger=0)
