"""The service: validation before queueing, one reply to every message, quotas, statistics."""

from __future__ import annotations

import itertools

import pytest
import torch

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.split.executor.policies import Decision, Opportunistic
from symbiosis.transport.messages import Kind, Message
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, OTHER, WIDE, WIDTH, ServiceBench

X, INDEX, WEIGHT = torch.zeros(3, WIDTH), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)

BAD = {
    "wrong width": ("bad_call", {"tensors": (torch.zeros(3, 7),)}),
    "width zero": ("bad_call", {"tensors": (torch.zeros(3, 0),)}),
    "integers for rows": ("bad_call", {"tensors": (torch.zeros(3, WIDTH, dtype=torch.int64),)}),
    "bytes for rows": ("bad_call", {"tensors": (torch.zeros(3, WIDTH, dtype=torch.uint8),)}),
    "no rows": ("too_large", {"tensors": (torch.zeros(0, WIDTH),)}),
    "too many rows": ("too_large", {"tensors": (torch.zeros(101, WIDTH),)}),
    "a reply beyond a message": ("too_large", {"layers": (WIDE,), "tensors": (torch.zeros(9, WIDTH),)}),
    "the same layer many times": ("too_large", {"layers": (OTHER,) * 16, "tensors": (torch.zeros(100, WIDTH),)}),
    "no tensor": ("bad_call", {"tensors": ()}),
    "two tensors": ("bad_call", {"tensors": (X, X)}),
    "no layer": ("bad_call", {"layers": (), "tensors": (X,)}),
    "unknown layer": ("unknown_layer", {"layers": (99,), "tensors": (X,)}),
    "largest layer number": ("unknown_layer", {"layers": (2**31 - 1,), "tensors": (X,)}),
    "a group with a block": ("bad_call", {"layers": (LINEAR, BLOCK), "tensors": (X,)}),
    "a group with one tensor too many": ("bad_call", {"layers": (LINEAR, OTHER), "tensors": (X, X)}),
    "backward group with too few": ("bad_call", {"layers": (LINEAR, OTHER), "back": True, "tensors": (X,)}),
    "backward group of other rows": (
        "bad_call",
        {"layers": (LINEAR, OTHER), "back": True, "tensors": (X, torch.zeros(2, 48))},
    ),
    "backward group, widths swapped": ("bad_call", {"layers": (OTHER, LINEAR), "back": True, "tensors": (X, X)}),
    "block backward without rows": ("bad_call", {"layers": (BLOCK,), "back": True, "tensors": (X,)}),
    "experts without indices": ("bad_call", {"layers": (EXPERTS,), "tensors": (X,)}),
    "expert too high": ("bad_call", {"layers": (EXPERTS,), "tensors": (X, INDEX + 4, WEIGHT)}),
    "expert below zero": ("bad_call", {"layers": (EXPERTS,), "tensors": (X, INDEX - 1, WEIGHT)}),
    "expert near overflow": ("bad_call", {"layers": (EXPERTS,), "tensors": (X, INDEX + 2**62, WEIGHT)}),
    "expert index as float": ("bad_call", {"layers": (EXPERTS,), "tensors": (X, WEIGHT, WEIGHT)}),
    "more experts a row than there are": (
        "bad_call",
        {"layers": (EXPERTS,), "tensors": (X, torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5))},
    ),
    "expert weights of another width": ("bad_call", {"layers": (EXPERTS,), "tensors": (X, INDEX, torch.zeros(3, 1))}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_rejected_before_it_shares_a_batch(what: str):
    code, call = BAD[what]
    bench = ServiceBench(max_rows=100, max_bytes=1 << 17)
    ann, eve = bench.connect("ann"), bench.connect("eve")
    bench.call(ann, torch.ones(2, WIDTH))
    request = bench.call(eve, *call["tensors"], layers=call.get("layers", (LINEAR,)), back=call.get("back", False))
    reply = bench.reply_to(eve)
    assert (reply.kind, reply.request, reply.body["code"]) == (Kind.ERROR, request, code)
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY
    figures = bench.service.stats()["tenants"]
    assert (figures["eve"]["errors"], figures["ann"]["errors"]) == (1, 0)
    bench.call(eve, torch.ones(2, WIDTH))  # a valid call succeeds
    bench.run()
    assert bench.reply_to(eve).kind is Kind.REPLY


@pytest.mark.parametrize("kind", [Kind.WELCOME, Kind.REPLY, Kind.ERROR])
def test_kinds_that_only_an_executor_sends_are_rejected(kind: Kind):
    bench = ServiceBench()
    eve = bench.connect()
    bench.send(eve, kind)
    assert bench.reply_to(eve).body["code"] == "bad_call"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "weight"},
        {"name": "weight", "start": "x"},
        {"name": "weight", "start": -1},
        {"name": "weight", "start": 10**30},
        {"name": "weight", "start": float("inf")},
        {"name": "weight", "start": [1]},
        {"name": "../weight", "start": 0},
        {"name": {"a": 1}, "start": 0},
        {"name": "x" * 5000, "start": 0},
    ],
)
def test_a_malformed_fetch_is_rejected_with_a_short_message(body: dict):
    bench = ServiceBench()
    eve = bench.connect()
    bench.send(eve, Kind.FETCH, layers=(LINEAR,), body=body)
    reply = bench.reply_to(eve)
    assert reply.body["code"] == "bad_call"
    assert len(reply.body["message"]) <= 1000


@pytest.mark.parametrize("body", [{}, {"sha256": "0" * 64, "offset": 0}, {"sha256": "../../etc/passwd", "offset": 0}])
def test_only_blobs_of_the_model_can_be_read(body: dict):
    bench = ServiceBench()
    eve = bench.connect()
    bench.send(eve, Kind.BLOB, body=body)
    assert bench.reply_to(eve).body["code"] == "bad_call"


def test_weights_are_withheld_if_the_limits_say_so():
    bench = ServiceBench(weights=False)
    ann = bench.connect()
    bench.send(ann, Kind.FETCH, layers=(LINEAR,), body={"name": "weight", "start": 0})
    assert bench.reply_to(ann).body["code"] == "weights_withheld"
    bench.send(ann, Kind.FETCH, layers=(LINEAR,), body={"what": "row_squares"})
    (squares,) = bench.reply_to(ann).tensors
    expected = bench.layers[LINEAR].weights["weight"].double().square().sum(1)
    torch.testing.assert_close(squares[0], expected)


def test_a_weight_is_fetched_in_chunks_that_fit_a_message():
    bench = ServiceBench(max_bytes=1 << 16)
    ann = bench.connect()
    chunks = []
    while sum(p.shape[0] for p in chunks) < WIDTH:
        bench.send(ann, Kind.FETCH, layers=(WIDE,), body={"name": "weight", "start": sum(p.shape[0] for p in chunks)})
        chunks.append(bench.reply_to(ann).tensors[0])
        assert chunks[-1].numel() * 4 <= 1 << 16
    assert torch.equal(torch.cat(chunks), bench.layers[WIDE].weights["weight"])


def test_a_fetched_weight_is_a_copy():
    bench = ServiceBench()
    ann = bench.connect()
    bench.send(ann, Kind.FETCH, layers=(LINEAR,), body={"name": "weight", "start": 0})
    before = bench.layers[LINEAR].weights["weight"].clone()
    bench.reply_to(ann).tensors[0].zero_()
    assert torch.equal(bench.layers[LINEAR].weights["weight"], before)


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.HELLO])
def test_a_peer_without_a_session_must_send_hello_first(kind: Kind):
    bench = ServiceBench()
    stranger = bench.new_peer()
    bench.send(stranger, kind, layers=(LINEAR,), tensors=(torch.zeros(1, WIDTH),))
    assert bench.reply_to(stranger).body["code"] == "hello_first"
    assert bench.service.stats()["sessions"] == 0


def test_a_second_call_before_the_first_reply_is_rejected():
    bench = ServiceBench()
    ann = bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    second = bench.call(ann, torch.ones(1, WIDTH))
    refused = bench.reply_to(ann)
    assert (refused.request, refused.body["code"]) == (second, "too_many_calls")
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_a_call_sent_twice_runs_once_and_gets_one_reply():
    bench = ServiceBench()
    ann = bench.connect()
    request = bench.call(ann, torch.ones(1, WIDTH))
    bench.call(ann, torch.ones(1, WIDTH), request=request)
    bench.run()
    assert bench.reply_to(ann).request == request
    assert bench.service.stats()["calls"] == 1


def test_a_ping_reports_whether_the_call_is_known():
    bench = ServiceBench()
    ann = bench.connect()
    request = bench.call(ann, torch.ones(1, WIDTH))
    for asked, known in ((request, True), (request + 1, False)):
        bench.send(ann, Kind.PING, request=asked)
        assert bench.reply_to(ann).body["known"] is known
    bench.run()
    bench.reply_to(ann)
    bench.send(ann, Kind.PING, request=request)
    assert bench.reply_to(ann).body["known"] is False


def test_a_second_hello_keeps_the_session_and_its_call():
    bench = ServiceBench()
    ann = bench.connect("ann")
    bench.call(ann, torch.ones(1, WIDTH))
    bench.send(ann, Kind.HELLO, body={"name": "another name"})
    assert bench.reply_to(ann).body["tenant"] == "ann"
    assert bench.service.stats()["sessions"] == 1
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_the_name_of_an_auth_token_overrides_the_name_in_hello():
    bench = ServiceBench()
    peer = bench.new_peer(tenant="bob")
    bench.send(peer, Kind.HELLO, body={"name": "ann"})
    assert bench.reply_to(peer).body["tenant"] == "bob"


@pytest.mark.parametrize("name", ["x" * 65, "a b", "<script>", "", None, 7.5, ["a"], {"a": 1}, "\ud800"])
def test_invalid_names_become_a_default_name(name):
    bench = ServiceBench()
    peer = bench.new_peer()
    bench.send(peer, Kind.HELLO, body={"name": name})
    assert bench.reply_to(peer).body["tenant"] in ("tenant", "7.5")


def test_bye_drops_the_queued_call():
    bench = ServiceBench()
    ann, bob = bench.connect(), bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    bench.call(bob, torch.ones(1, WIDTH))
    bench.send(ann, Kind.BYE)
    assert bench.reply_to(ann).kind is Kind.BYE
    bench.run()
    assert bench.replies_to(ann) == []
    assert bench.reply_to(bob).kind is Kind.REPLY
    assert bench.service.batcher.queued_bytes == 0
    assert ann in bench.port.forgotten


def test_a_tenant_that_cannot_be_reached_is_closed_without_effect_on_others():
    bench = ServiceBench()
    ann, bob = bench.connect(), bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    bench.call(bob, torch.ones(1, WIDTH))
    bench.port.unreachable.add(ann)
    bench.run()
    assert bench.reply_to(bob).kind is Kind.REPLY
    assert bench.service.stats()["sessions"] == 1


def test_a_failed_reply_does_not_prevent_the_next_reply(monkeypatch):
    bench = ServiceBench()
    ann, bob = bench.connect(), bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    bench.call(bob, torch.ones(1, WIDTH))
    real = bench.port.reply

    def reply(peer, message):
        if peer is ann:
            raise OSError("broken")
        return real(peer, message)

    monkeypatch.setattr(bench.port, "reply", reply)
    bench.run()
    assert bench.reply_to(bob).kind is Kind.REPLY


def test_a_layer_that_fails_for_one_call_runs_for_the_others(monkeypatch):
    bench = ServiceBench()
    ann, eve = bench.connect("ann"), bench.connect("eve")
    real = bench.layers[LINEAR].forward

    def forward(rows, out=None):
        if (rows[0] == 666).any():
            raise RuntimeError("sticky")
        return real(rows)

    monkeypatch.setattr(bench.layers[LINEAR], "forward", forward)
    bench.call(ann, torch.ones(2, WIDTH))
    bench.call(eve, torch.full((2, WIDTH), 666.0))
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY
    assert bench.reply_to(eve).body["code"] == "layer_failed"


def test_all_queued_calls_get_an_error_if_the_policy_fails():
    class Broken:
        name = "broken"

        def decide(self, pending, sessions, costs, now):
            return 1 / 0 if pending else Decision()

    bench = ServiceBench(Broken())
    ann = bench.connect()
    bench.call(ann, torch.ones(1, WIDTH))
    bench.run()
    assert "policy failed" in bench.reply_to(ann).body["message"]


def test_expert_indices_of_a_call_are_bounded():
    bench = ServiceBench(max_rows=4)
    ann, most = bench.connect(), 8 * 4
    for columns, code in ((4, None), (most + 1, "too_large")):
        index = torch.zeros(1, columns, dtype=torch.int64)
        bench.call(ann, torch.ones(1, WIDTH), index, torch.ones(1, columns), layers=(EXPERTS,))
        bench.run()
        assert bench.reply_to(ann).body.get("code") == code


def test_row_squares_are_computed_once(monkeypatch):
    bench = ServiceBench()
    ann = bench.connect()
    fetched = []
    for _ in range(2):
        bench.send(ann, Kind.FETCH, layers=(LINEAR,), body={"what": "row_squares"})
        (squares,) = bench.reply_to(ann).tensors
        fetched.append(squares.clone())
        squares.zero_()  # a tenant in this process may overwrite its copy
        monkeypatch.setattr(torch.Tensor, "double", None)
    assert torch.equal(*fetched)


@pytest.mark.parametrize("renames", [False, True], ids=["of one tenant", "under ever new names"])
def test_overdue_calls_of_many_sessions_do_not_starve_others(renames):
    bench = ServiceBench(Opportunistic(max_wait_s=0.1))
    names = (f"eve-{number}" if renames else "eve" for number in itertools.count())
    flood = [bench.connect(next(names)) for _ in range(20)]
    bob = bench.connect("bob")

    def ask(peer) -> None:
        bench.call(peer, torch.ones(900, WIDTH))

    for peer in (*flood, bob):
        ask(peer)
    replies = 0
    for _ in range(44):
        bench.clock.now += 1
        assert bench.service.batcher.step() == 0.0
        for place, peer in enumerate(flood):
            if not peer.session.is_busy:
                if renames:
                    bench.send(peer, Kind.BYE)
                    flood[place] = bench.connect(next(names))
                ask(flood[place])
        if not bob.session.is_busy:
            replies += 1
            ask(bob)
    assert replies >= (2 if renames else 20)


def test_a_call_without_gradient_of_a_training_session_counts_as_training():
    bench = ServiceBench()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    bench.call(ann, torch.ones(1, WIDTH), back=True, training=True)
    bench.run()
    for peer, trains in ((ann, True), (bob, False)):
        bench.call(peer, torch.ones(1, WIDTH))
        (call,) = bench.service.batcher.queue.values()
        assert call.is_training is trains
        bench.run()


def test_totals_of_tenant_names_are_bounded():
    bench = ServiceBench(max_sessions=4)
    for i in range(200):
        bench.connect(f"invented-{i}")
    assert len(bench.service.stats()["tenants"]) <= 16


def test_the_bytes_of_the_queue_are_bounded():
    bench = ServiceBench(max_bytes=1 << 16)
    assert not bench.service.batcher.is_full()
    while not bench.service.batcher.is_full():
        bench.call(bench.connect(), torch.ones(100, WIDTH))
    assert bench.service.stats()["queued"] <= 8 * (1 << 16) // (100 * WIDTH * 4) + 1
    bench.run()
    assert not bench.service.batcher.is_full()


def test_the_reply_to_a_broken_frame_is_its_error():
    bench = ServiceBench()
    peer = bench.new_peer()
    bench.service.handle(peer, BadMessage("garbage"))
    reply = bench.reply_to(peer)
    assert (reply.kind, reply.request, reply.body["code"]) == (Kind.ERROR, 0, "bad_message")


def test_an_unexpected_exception_fails_one_message_only(monkeypatch):
    bench = ServiceBench()
    ann = bench.connect()
    monkeypatch.setattr(bench.service, "_manifest", lambda: (_ for _ in ()).throw(OSError("disk")))
    bench.send(ann, Kind.MANIFEST)
    assert bench.reply_to(ann).body["code"] == SymbiosisError.code
    bench.service.handle(ann, Message(Kind.STATS))
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_policies_see_the_hosted_engine_on_the_same_gpu_as_a_session_while_it_serves():
    bench = ServiceBench()
    assert 0 not in bench.service.batcher._visible_sessions()
    bench.run_engine_step(seconds=0.2)
    assert 0 not in bench.service.batcher._visible_sessions(), "on a CPU the two share time slices"
    bench.service.batcher.streams = object()
    with bench.device_share:
        engine = bench.service.batcher._visible_sessions()[0]
        assert engine.replied == pytest.approx(bench.clock.now + 0.2)
        assert not engine.is_training
        assert engine.last_seen < 0, "no call waits for it"
    bench.clock.now += 5.0
    assert 0 not in bench.service.batcher._visible_sessions()


def test_calls_are_served_while_statistics_are_collected():
    bench, delivers = ServiceBench(), []
    bench.service.collect = delivers.append
    ann = bench.connect("ann")
    asked = bench.send(ann, Kind.STATS)
    called = bench.call(ann, torch.ones(2, WIDTH))
    bench.run()
    bench.service.send_collected()
    assert bench.reply_to(ann).request == called
    delivers.pop()({**bench.service.stats(), "serving": {}})
    bench.service.send_collected()
    reply = bench.reply_to(ann)
    assert (reply.request, reply.body["calls"]) == (asked, 1)


def test_pending_statistics_are_bounded_and_failures_are_sent():
    bench, delivers = ServiceBench(), []
    bench.service.collect = delivers.append
    ann = bench.connect("ann")
    requests = [bench.send(ann, Kind.STATS) for _ in range(1025)]
    reply = bench.reply_to(ann)
    assert (reply.body["code"], reply.request) == ("too_many_calls", requests[-1])
    for deliver in delivers:
        deliver(SymbiosisError("not now"))
    bench.service.send_collected()
    replies = bench.replies_to(ann)
    assert [reply.request for reply in replies] == requests[:-1]
    assert {reply.body["message"] for reply in replies} == {"not now"}
    bench.send(ann, Kind.STATS)
    assert len(delivers) == 1025
