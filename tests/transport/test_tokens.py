"""Auth tokens: one proves a tenant to the executor and the executor to the tenant."""

from __future__ import annotations

import threading
import time

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

import symbiosis
from symbiosis.errors import Unauthorized
from symbiosis.transport import curve_keys
from symbiosis.transport.messages import Kind, Message, decode, encode
from symbiosis.transport.statistics_client import fetch_statistics
from symbiosis.transport.tcp import TcpLink
from symbiosis.transport.zmq_client import Connection
from tests.conftest import TOKENS, Serve
from tests.transport.raw_peers import exchange, receive_message


@pytest.mark.parametrize("token", [None, "wrong", "", TOKENS["ann"] + " "])
def test_a_wrong_token_is_rejected(serve: Serve, token: str | None):
    served = serve("tcp-token")
    with pytest.raises(Unauthorized, match="token"):
        symbiosis.connect(served.address, token=token)
    assert served.executor.stats()["sessions"] == 0


def test_shared_memory_requires_tokens_too(serve: Serve, tiny, ids):
    address = serve("tcp-token").executor.listen("shm://")
    with pytest.raises(Unauthorized):
        symbiosis.connect(address, token="wrong")
    model = symbiosis.connect(address, token=TOKENS["bob"])
    assert (model(ids).logits - tiny(ids).logits).abs().max() < 1e-6
    model.symbiosis.close()


def test_a_token_for_an_executor_without_tokens_is_an_error(serve: Serve):
    """A token demands a proof of the executor's identity, which an executor without tokens cannot give."""
    with pytest.raises(Unauthorized, match="takes none"):
        symbiosis.connect(serve("tcp").address, token="mine")


@pytest.mark.parametrize("kind", ["tcp", "tcp-token"])
def test_a_peer_rejected_before_hello_gets_the_same_error(serve: Serve, kind, monkeypatch):
    shake_hands = Connection._shake_hands

    def late(self: Connection, deadline: float) -> None:
        time.sleep(0.1)
        shake_hands(self, deadline)

    monkeypatch.setattr(Connection, "_shake_hands", late)
    address = serve(kind).address
    for _ in range(3):
        with pytest.raises(Unauthorized, match="takes none"):
            symbiosis.connect(address, token="mine")


def test_the_token_decides_the_tenants_name(serve: Serve):
    served = serve("tcp-token")
    link = TcpLink(served.address, token=TOKENS["bob"], hello={"name": "ann", "tenant": "ann"}, grace_s=5)
    assert link.welcome["tenant"] == "bob"
    assert set(link.request(Message(Kind.STATS)).body["tenants"]) == {"bob"}
    link.close()


def raw_socket(context: zmq.Context, address: str, token: str, routing_id: bytes) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    pair = curve_keys.tenant_keys(token)
    dealer.curve_serverkey = curve_keys.executor_keys().public
    dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
    dealer.connect(address)
    return dealer


def test_a_routing_id_of_another_tenant_is_no_identity(serve: Serve):
    served = serve("tcp-token")
    context = zmq.Context()
    try:
        ann = raw_socket(context, served.address, TOKENS["ann"], b"ann's own, of no use to bob")
        assert exchange(ann, Message(Kind.HELLO, 1)).body["tenant"] == "ann"
        ann.close()
        while True:  # the id is rejected until the executor sees the end of ann's connection
            bob = raw_socket(context, served.address, TOKENS["bob"], b"ann's own, of no use to bob")
            bob.send(encode(Message(Kind.STATS, 2)))
            if bob.poll(300):
                break
            bob.close()
        assert receive_message(bob).body["code"] == "hello_first"
        assert exchange(bob, Message(Kind.HELLO, 3)).body["tenant"] == "bob"
        bob.close()
    finally:
        context.destroy(linger=0)


class Impostor:
    """Replies with the executors' public keys and accepts every tenant, but has no token."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", *, proof: str | None = None) -> None:
        self.seen: list[Message] = []
        self._proof = proof
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        self._socket = self._context.socket(zmq.ROUTER)
        pair = curve_keys.executor_keys()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            key, frame = self._socket.recv_multipart()
            message = decode(memoryview(frame), max_bytes=1 << 24)
            self.seen.append(message)
            kind = {Kind.HELLO: Kind.WELCOME, Kind.PING: Kind.PING}.get(message.kind, Kind.REPLY)
            body = {"model": "x", "known": False} | ({"proof": self._proof} if self._proof is not None else {})
            self._socket.send_multipart([key, encode(Message(kind, message.request, tensors=message.tensors, body=body))])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()


@pytest.mark.parametrize("proof", [None, "", "0" * 64, "é"])
def test_an_executor_without_the_token_is_not_trusted(proof: str | None):
    impostor = Impostor(proof=proof)
    try:
        with pytest.raises(Unauthorized, match="does not know your token"):
            symbiosis.connect(impostor.address, token="my secret")
    finally:
        impostor.close()
    assert {message.kind for message in impostor.seen} == {Kind.HELLO}


def test_an_impostor_that_replaces_the_executor_receives_no_rows(serve: Serve, ids):
    served = serve("tcp-token")
    model = served.connect()
    model(ids)
    served.executor.close()
    impostor = Impostor(served.address)
    try:
        with pytest.raises(Unauthorized, match="does not know your token"):
            model(ids)
    finally:
        impostor.close()
    assert {message.kind for message in impostor.seen} == {Kind.HELLO}


def test_a_tenant_sees_only_its_own_stats_and_the_provider_all(tiny):
    secrets = {"ann": "a secret of ann's", "bob": "a secret of bob's", "provider": "a secret of ours"}
    with symbiosis.Executor(tiny, tokens=secrets) as executor:
        address = executor.listen()
        models = [symbiosis.connect(address, token=secrets[name]) for name in ("ann", "bob")]
        assert set(models[0].symbiosis.stats()["tenants"]) == {"ann"}
        assert {"ann", "bob"} <= set(fetch_statistics(address, token=secrets["provider"])["tenants"])
        for model in models:
            model.symbiosis.close()
