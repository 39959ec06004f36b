"""The desk: checks before queueing, one answer to every message, quotas, figures."""

from __future__ import annotations

import itertools

import pytest
import torch

from symbiosis.errors import BadMessage, SymbiosisError
from symbiosis.split.executor.policies import Decision, Opportunistic
from symbiosis.transport.messages import Kind, Message
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, OTHER, WIDE, WIDTH, Desk

X, INDEX, WEIGHT = torch.zeros(3, WIDTH), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)

BAD = {
    "wrong width": ("bad_call", {"tensors": (torch.zeros(3, 7),)}),
    "width zero": ("bad_call", {"tensors": (torch.zeros(3, 0),)}),
    "integers for rows": ("bad_call", {"tensors": (torch.zeros(3, WIDTH, dtype=torch.int64),)}),
    "bytes for rows": ("bad_call", {"tensors": (torch.zeros(3, WIDTH, dtype=torch.uint8),)}),
    "no rows": ("too_large", {"tensors": (torch.zeros(0, WIDTH),)}),
    "too many rows": ("too_large", {"tensors": (torch.zeros(101, WIDTH),)}),
    "an answer beyond a message": ("too_large", {"layers": (WIDE,), "tensors": (torch.zeros(9, WIDTH),)}),
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
def test_a_bad_call_is_refused_before_it_meets_anybody(what: str):
    code, call = BAD[what]
    desk = Desk(max_rows=100, max_bytes=1 << 17)
    ann, eve = desk.tenant("ann"), desk.tenant("eve")
    desk.call(ann, torch.ones(2, WIDTH))
    request = desk.call(eve, *call["tensors"], layers=call.get("layers", (LINEAR,)), back=call.get("back", False))
    answer = desk.answer(eve)
    assert (answer.kind, answer.request, answer.body["code"]) == (Kind.ERROR, request, code)
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY
    figures = desk.service.stats()["tenants"]
    assert (figures["eve"]["errors"], figures["ann"]["errors"]) == (1, 0)
    desk.call(eve, torch.ones(2, WIDTH))  # and eve may try again
    desk.run()
    assert desk.answer(eve).kind is Kind.REPLY


@pytest.mark.parametrize("kind", [Kind.WELCOME, Kind.REPLY, Kind.ERROR])
def test_what_only_an_executor_says_is_refused_from_a_tenant(kind: Kind):
    desk = Desk()
    eve = desk.tenant()
    desk.say(eve, kind)
    assert desk.answer(eve).body["code"] == "bad_call"


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
def test_a_senseless_fetch_is_refused_in_few_words(body: dict):
    desk = Desk()
    eve = desk.tenant()
    desk.say(eve, Kind.FETCH, layers=(LINEAR,), body=body)
    answer = desk.answer(eve)
    assert answer.body["code"] == "bad_call"
    assert len(answer.body["message"]) <= 1000


@pytest.mark.parametrize("body", [{}, {"sha256": "0" * 64, "offset": 0}, {"sha256": "../../etc/passwd", "offset": 0}])
def test_only_the_models_own_blobs_are_handed_out(body: dict):
    desk = Desk()
    eve = desk.tenant()
    desk.say(eve, Kind.BLOB, body=body)
    assert desk.answer(eve).body["code"] == "bad_call"


def test_weights_are_withheld_where_the_provider_says_so():
    desk = Desk(weights=False)
    ann = desk.tenant()
    desk.say(ann, Kind.FETCH, layers=(LINEAR,), body={"name": "weight", "start": 0})
    assert desk.answer(ann).body["code"] == "weights_withheld"
    desk.say(ann, Kind.FETCH, layers=(LINEAR,), body={"what": "row_squares"})
    (squares,) = desk.answer(ann).tensors
    expected = desk.layers[LINEAR].weights["weight"].double().square().sum(1)
    torch.testing.assert_close(squares[0], expected)


def test_a_fetched_weight_comes_in_pieces_that_fit_a_message():
    desk = Desk(max_bytes=1 << 16)
    ann = desk.tenant()
    pieces = []
    while sum(p.shape[0] for p in pieces) < WIDTH:
        desk.say(ann, Kind.FETCH, layers=(WIDE,), body={"name": "weight", "start": sum(p.shape[0] for p in pieces)})
        pieces.append(desk.answer(ann).tensors[0])
        assert pieces[-1].numel() * 4 <= 1 << 16
    assert torch.equal(torch.cat(pieces), desk.layers[WIDE].weights["weight"])


def test_a_fetched_weight_is_a_copy():
    desk = Desk()
    ann = desk.tenant()
    desk.say(ann, Kind.FETCH, layers=(LINEAR,), body={"name": "weight", "start": 0})
    before = desk.layers[LINEAR].weights["weight"].clone()
    desk.answer(ann).tensors[0].zero_()
    assert torch.equal(desk.layers[LINEAR].weights["weight"], before)


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.HELLO])
def test_a_peer_that_never_said_hello_is_told_to(kind: Kind):
    desk = Desk()
    stranger = desk.stranger()
    desk.say(stranger, kind, layers=(LINEAR,), tensors=(torch.zeros(1, WIDTH),))
    assert desk.answer(stranger).body["code"] == "hello_first"
    assert desk.service.stats()["sessions"] == 0


def test_a_second_call_before_the_first_is_answered_is_refused():
    desk = Desk()
    ann = desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    second = desk.call(ann, torch.ones(1, WIDTH))
    refused = desk.answer(ann)
    assert (refused.request, refused.body["code"]) == (second, "too_many_calls")
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY


def test_a_call_sent_twice_runs_once_and_is_answered_once():
    desk = Desk()
    ann = desk.tenant()
    request = desk.call(ann, torch.ones(1, WIDTH))
    desk.call(ann, torch.ones(1, WIDTH), request=request)
    desk.run()
    assert desk.answer(ann).request == request
    assert desk.service.stats()["calls"] == 1


def test_a_ping_tells_whether_the_call_is_known():
    desk = Desk()
    ann = desk.tenant()
    request = desk.call(ann, torch.ones(1, WIDTH))
    for asked, known in ((request, True), (request + 1, False)):
        desk.say(ann, Kind.PING, request=asked)
        assert desk.answer(ann).body["known"] is known
    desk.run()
    desk.answer(ann)
    desk.say(ann, Kind.PING, request=request)
    assert desk.answer(ann).body["known"] is False


def test_a_second_hello_keeps_the_session_and_its_call():
    desk = Desk()
    ann = desk.tenant("ann")
    desk.call(ann, torch.ones(1, WIDTH))
    desk.say(ann, Kind.HELLO, body={"name": "somebody else"})
    assert desk.answer(ann).body["tenant"] == "ann"
    assert desk.service.stats()["sessions"] == 1
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY


def test_a_tenant_with_a_token_goes_by_its_name_whatever_it_says():
    desk = Desk()
    peer = desk.stranger(tenant="bob")
    desk.say(peer, Kind.HELLO, body={"name": "ann"})
    assert desk.answer(peer).body["tenant"] == "bob"


@pytest.mark.parametrize("name", ["x" * 65, "a b", "<script>", "", None, 7.5, ["a"], {"a": 1}, "\ud800"])
def test_names_that_are_none_become_a_plain_one(name):
    desk = Desk()
    peer = desk.stranger()
    desk.say(peer, Kind.HELLO, body={"name": name})
    assert desk.answer(peer).body["tenant"] in ("tenant", "7.5")


def test_bye_while_a_call_waits_drops_the_call():
    desk = Desk()
    ann, bob = desk.tenant(), desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    desk.call(bob, torch.ones(1, WIDTH))
    desk.say(ann, Kind.BYE)
    assert desk.answer(ann).kind is Kind.BYE
    desk.run()
    assert desk.answers(ann) == []
    assert desk.answer(bob).kind is Kind.REPLY
    assert desk.service._queued_bytes == 0
    assert ann in desk.port.forgotten


def test_a_tenant_that_does_not_read_is_forgotten_and_nobody_else_notices():
    desk = Desk()
    ann, bob = desk.tenant(), desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    desk.call(bob, torch.ones(1, WIDTH))
    desk.port.deaf.add(ann)
    desk.run()
    assert desk.answer(bob).kind is Kind.REPLY
    assert desk.service.stats()["sessions"] == 1


def test_a_port_that_fails_for_one_peer_does_not_keep_the_answer_from_the_next(monkeypatch):
    desk = Desk()
    ann, bob = desk.tenant(), desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    desk.call(bob, torch.ones(1, WIDTH))
    real = desk.port.reply

    def reply(peer, message):
        if peer is ann:
            raise OSError("broken")
        return real(peer, message)

    monkeypatch.setattr(desk.port, "reply", reply)
    desk.run()
    assert desk.answer(bob).kind is Kind.REPLY


def test_a_layer_that_fails_for_one_call_runs_for_the_others(monkeypatch):
    desk = Desk()
    ann, eve = desk.tenant("ann"), desk.tenant("eve")
    real = desk.layers[LINEAR].forward

    def forward(rows, out=None):
        if (rows[0] == 666).any():
            raise RuntimeError("sticky")
        return real(rows)

    monkeypatch.setattr(desk.layers[LINEAR], "forward", forward)
    desk.call(ann, torch.ones(2, WIDTH))
    desk.call(eve, torch.full((2, WIDTH), 666.0))
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY
    assert desk.answer(eve).body["code"] == "layer_failed"


def test_a_policy_that_fails_leaves_nobody_waiting():
    class Broken:
        name = "broken"

        def decide(self, pending, heard, costs, now):
            return 1 / 0 if pending else Decision()

    desk = Desk(Broken())
    ann = desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    desk.run()
    assert "policy failed" in desk.answer(ann).body["message"]


def test_silent_channels_are_forgotten_and_gone_ones_sooner():
    desk = Desk()
    ann, bob, eve = desk.tenant("ann"), desk.tenant("bob"), desk.tenant("eve")
    desk.port.deaf.add(eve)
    desk.clock.now += 30
    desk.say(bob, Kind.STATS)
    desk.service.tidy()
    assert desk.service.stats()["sessions"] == 2
    assert eve in desk.port.forgotten
    desk.clock.now += 100
    desk.service.tidy()
    assert desk.port.forgotten == [eve, ann]
    desk.call(ann, torch.ones(1, WIDTH))
    assert desk.answers(ann)[-1].body["code"] == "hello_first"


def test_a_channel_is_not_forgotten_while_its_call_waits():
    desk = Desk(Opportunistic())
    ann = desk.tenant()
    desk.call(ann, torch.ones(1, WIDTH))
    desk.clock.now += 1000
    desk.service.tidy()
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY


def test_a_flood_of_channels_pushes_out_the_floods_own():
    desk = Desk(max_sessions=8)
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    for _ in range(100):
        desk.clock.now += 0.001
        desk.tenant("eve")
    assert desk.service.stats()["sessions"] == 8
    desk.call(ann, torch.ones(1, WIDTH))
    desk.call(bob, torch.ones(1, WIDTH))
    desk.run()
    assert desk.answer(ann).kind is desk.answer(bob).kind is Kind.REPLY
    assert desk.tenant("carol").session is not None


def test_where_every_channel_is_busy_one_more_is_refused():
    desk = Desk(max_sessions=2)
    for peer in (desk.tenant(), desk.tenant()):
        desk.call(peer, torch.ones(1, WIDTH))
    third = desk.stranger()
    desk.say(third, Kind.HELLO)
    assert desk.answer(third).body["code"] == "too_many_calls"


def test_who_has_most_channels_all_busy_pushes_out_nobody_elses():
    desk = Desk(max_sessions=4)
    bob = desk.tenant("bob")
    for peer in (desk.tenant("eve"), desk.tenant("eve"), desk.tenant("eve")):
        desk.call(peer, torch.ones(1, WIDTH))
    more = desk.stranger()
    desk.say(more, Kind.HELLO, body={"name": "eve"})
    assert desk.answer(more).body["code"] == "too_many_calls"
    assert bob.session is not None
    assert desk.tenant("carol").session is not None  # she takes bob's place: eve's are busy
    assert bob.session is None


def test_a_tenant_with_a_token_has_so_many_channels_and_one_more_pushes_out_its_own():
    desk = Desk(max_tenant_sessions=3)
    bob = desk.tenant("bob")
    mine = [desk.stranger("eve") for _ in range(4)]
    for peer in mine[:3]:
        desk.say(peer, Kind.HELLO)
        desk.clock.now += 1
    desk.call(mine[0], torch.ones(1, WIDTH))
    desk.say(mine[3], Kind.HELLO)
    assert [peer.session is not None for peer in mine] == [True, False, True, True]
    for peer in mine[2:]:
        desk.call(peer, torch.ones(1, WIDTH))
    desk.say(mine[1], Kind.HELLO)
    refused = desk.answers(mine[1])[-1].body
    assert refused["code"] == "too_many_calls"
    assert "of yours" in refused["message"]
    assert bob.session is not None


def test_rows_choose_so_many_experts_together():
    desk = Desk(max_rows=4)
    ann, most = desk.tenant(), 8 * 4
    for columns, code in ((4, None), (most + 1, "too_large")):
        index = torch.zeros(1, columns, dtype=torch.int64)
        desk.call(ann, torch.ones(1, WIDTH), index, torch.ones(1, columns), layers=(EXPERTS,))
        desk.run()
        assert desk.answer(ann).body.get("code") == code


def test_squares_are_computed_once(monkeypatch):
    desk = Desk()
    ann = desk.tenant()
    said = []
    for _ in range(2):
        desk.say(ann, Kind.FETCH, layers=(LINEAR,), body={"what": "row_squares"})
        (squares,) = desk.answer(ann).tensors
        said.append(squares.clone())
        squares.zero_()  # a tenant in this process may do as it likes with its own
        monkeypatch.setattr(torch.Tensor, "double", None)
    assert torch.equal(*said)


@pytest.mark.parametrize("renames", [False, True], ids=["of one tenant", "under ever new names"])
def test_overdue_calls_of_many_channels_leave_turns_to_others(renames):
    desk = Desk(Opportunistic(max_wait_s=0.1))
    names = (f"eve-{number}" if renames else "eve" for number in itertools.count())
    flood = [desk.tenant(next(names)) for _ in range(20)]
    bob = desk.tenant("bob")

    def ask(peer) -> None:
        desk.call(peer, torch.ones(900, WIDTH))

    for peer in (*flood, bob):
        ask(peer)
    answered = 0
    for _ in range(44):
        desk.clock.now += 1
        assert desk.service.step() == 0.0
        for place, peer in enumerate(flood):
            if not peer.session.busy:
                if renames:
                    desk.say(peer, Kind.BYE)
                    flood[place] = desk.tenant(next(names))
                ask(flood[place])
        if not bob.session.busy:
            answered += 1
            ask(bob)
    assert answered >= (2 if renames else 20)


def test_a_trainers_first_call_of_a_step_is_a_trainers_though_it_has_no_gradient():
    desk = Desk()
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    desk.call(ann, torch.ones(1, WIDTH), back=True, training=True)
    desk.run()
    for peer, trains in ((ann, True), (bob, False)):
        desk.call(peer, torch.ones(1, WIDTH))
        (call,) = desk.service._queue.values()
        assert call.trains is trains
        desk.run()


def test_invented_names_do_not_fill_the_memory():
    desk = Desk(max_sessions=4)
    for i in range(200):
        desk.tenant(f"invented-{i}")
    assert len(desk.service.stats()["tenants"]) <= 16


def test_a_queue_full_of_bytes_takes_no_more():
    desk = Desk(max_bytes=1 << 16)
    assert not desk.service.is_full()
    while not desk.service.is_full():
        desk.call(desk.tenant(), torch.ones(100, WIDTH))
    assert desk.service.stats()["queued"] <= 8 * (1 << 16) // (100 * WIDTH * 4) + 1
    desk.run()
    assert not desk.service.is_full()


def test_a_broken_frame_is_answered_with_its_error():
    desk = Desk()
    peer = desk.stranger()
    desk.service.handle(peer, BadMessage("garbage"))
    answer = desk.answer(peer)
    assert (answer.kind, answer.request, answer.body["code"]) == (Kind.ERROR, 0, "bad_message")


def test_an_unexpected_failure_is_one_messages_failure(monkeypatch):
    desk = Desk()
    ann = desk.tenant()
    monkeypatch.setattr(desk.service, "_manifest", lambda: (_ for _ in ()).throw(OSError("disk")))
    desk.say(ann, Kind.MANIFEST)
    assert desk.answer(ann).body["code"] == SymbiosisError.code
    desk.service.handle(ann, Message(Kind.STATS))
    assert desk.answer(ann).kind is Kind.REPLY


def test_a_policy_hears_of_the_hosted_engine_on_the_same_gpu_while_that_computes():
    desk = Desk()
    assert 0 not in desk.service._heard(desk.clock.now)
    desk.host(seconds=0.2)
    assert 0 not in desk.service._heard(desk.clock.now), "on cores, training takes turns with it"
    desk.service._lanes = object()
    with desk.turns:
        guest = desk.service._heard(desk.clock.now)[0]
        assert guest.answered == pytest.approx(desk.clock.now + 0.2)
        assert not guest.training
        assert guest.last_seen < 0, "nobody waits for it"
    desk.clock.now += 5.0
    assert 0 not in desk.service._heard(desk.clock.now)
