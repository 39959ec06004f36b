"""Training in pieces, while the hosted engine serves: the same results, and the engine's turn in between."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor import batch
from symbiosis.split.executor.policies import Decision, Lockstep, Opportunistic
from symbiosis.transport.messages import Kind
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, OTHER, WIDTH, Desk

ROWS, FEW = 100, 8  # where nothing is known of a layer's cost a piece has a few rows
PIECES = -(-ROWS // FEW)
INDEX = torch.randint(0, 4, (ROWS, 2))

CALLS = {
    "linear": ((LINEAR,), False, (WIDTH,)),
    "linear backward": ((LINEAR,), True, (WIDTH,)),
    "several": ((LINEAR, OTHER), False, (WIDTH,)),
    "several backward": ((LINEAR, OTHER), True, (WIDTH, 48)),
    "block": ((BLOCK,), False, (WIDTH,)),
    "block backward": ((BLOCK,), True, (WIDTH, WIDTH)),
    "experts": ((EXPERTS,), False, (WIDTH, None, 2)),
    "experts backward": ((EXPERTS,), True, (WIDTH, None, 2, WIDTH)),
}


def rows_for(widths, seed=0):
    torch.manual_seed(seed)
    return tuple(INDEX if width is None else torch.randn(ROWS, width) for width in widths)


def serving(**options) -> Desk:
    """The hosted engine has just ended a pass."""
    desk = Desk(**options)
    desk.host()
    return desk


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", CALLS)
def test_calls_in_pieces_give_what_whole_ones_give(what, dtype):
    layers, back, widths = CALLS[what]
    mine, yours = (tuple(t.to(dtype) if t.is_floating_point() else t for t in rows_for(widths, seed)) for seed in (1, 2))
    found = []
    for desk in (Desk(), serving()):
        ann, bob = desk.tenant("ann"), desk.tenant("bob")
        desk.call(ann, *mine, layers=layers, back=back, training=True)
        desk.call(bob, *yours, layers=layers, back=back, training=True)
        ran = desk.run()
        found.append((ran, [desk.answer(peer).tensors for peer in (ann, bob)]))
    (whole_ran, whole), (cut_ran, cut) = found
    assert (whole_ran, cut_ran) == (1, 2 * ROWS // FEW)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)  # computed in the layers' float32


def test_a_call_in_pieces_counts_as_one():
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.run()
    figures = desk.service.stats()
    assert (figures["calls"], figures["batches"], figures["rows"], figures["queued"]) == (1, 1, ROWS, 0)


@pytest.mark.parametrize(("row_s", "pieces"), [(1e-6, 1), (1e-3, 2)])
def test_after_the_engine_the_rest_goes_on_in_pieces_that_it_could_wait_for(row_s, pieces):
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    assert desk.service.step() == 0.0
    for rows in (1, 100) * 20:
        desk.service._costs.observe(desk.service._cut.calls[0].work.key.shape, rows, rows * row_s)
    desk.clock.now += 5
    assert desk.run() == pieces
    assert desk.answer(ann).kind is Kind.REPLY


def test_those_who_decode_without_a_pause_do_not_starve_training():
    desk = serving(policy=Opportunistic())
    ann, decoders = desk.tenant("ann"), [desk.tenant(f"decodes {n}") for n in range(2)]
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.clock.now += 0.001
    desk.call(decoders[0], torch.ones(1, WIDTH))
    for turn in range(1, 200):
        desk.clock.now += 0.005
        if not turn % 20:
            desk.host()
        for decoder in decoders:  # one of them has always called
            if desk.answers(decoder) or not decoder.state.busy:
                desk.call(decoder, torch.ones(1, WIDTH))
        desk.service.step()
        if desk.port.replies.get(ann):
            return
    pytest.fail("training was never answered")


def test_nobody_waits_for_who_is_computed_in_pieces():
    desk = serving(policy=Lockstep())
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.call(bob, torch.ones(1, WIDTH))
    desk.service.step()
    desk.answer(bob)
    with desk.turns:
        desk.call(bob, torch.ones(1, WIDTH))
        assert desk.service.step() == 0.0
    assert desk.answer(bob).kind is Kind.REPLY


def test_pieces_that_cannot_be_joined_run_as_they_always_did(monkeypatch):
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(batch, "_split", full)
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY


def test_the_engine_has_its_turn_between_two_pieces():
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    pieces = 0
    while not desk.port.replies.get(ann):
        with desk.turns:
            desk.clock.now += 0.1
            assert desk.service.step() is None, "not while a pass runs"
        assert desk.service.step() == 0.0
        pieces += 1
    assert pieces == PIECES


def test_the_loop_is_woken_when_a_pass_ends():
    desk = serving()
    woken = []
    desk.turns.on_slice_available = lambda: woken.append(True)
    desk.call(desk.tenant(), *rows_for((WIDTH,)), training=True)
    with desk.turns:
        desk.service.step()
    assert woken


def test_who_decodes_waits_for_no_more_than_a_piece():
    desk = serving()
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.service.step()
    with desk.turns:
        desk.call(bob, torch.ones(1, WIDTH))
        assert desk.service.step() == 0.0, "it does not wait for the engine"
    assert desk.answer(bob).kind is Kind.REPLY
    assert not desk.answers(ann)


def test_who_decodes_does_not_travel_with_a_trainer():
    desk = serving()
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.call(bob, torch.ones(1, WIDTH))
    desk.service.step()
    assert desk.answer(bob).kind is Kind.REPLY
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY


def test_a_trainers_calls_without_a_gradient_are_cut_too():
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), back=True, training=True)
    desk.run()
    desk.call(ann, *rows_for((WIDTH,)))
    assert desk.run() == PIECES


def test_a_tenant_that_leaves_in_mid_call_takes_only_its_own_call_along():
    desk = serving()
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    rows = rows_for((WIDTH,))
    for peer in (ann, bob):
        desk.call(peer, *rows, training=True)
    desk.service.step()
    desk.say(bob, Kind.BYE)
    desk.run()
    assert [answer.kind for answer in desk.answers(bob)] == [Kind.BYE]
    torch.testing.assert_close(desk.answer(ann).tensors[0], rows[0] @ desk.layers[LINEAR].weight_OI.T)
    assert bob in desk.port.forgotten


def test_the_engine_does_not_wait_for_who_has_left():
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    with desk.turns:
        desk.service.step()
        desk.say(ann, Kind.BYE)
        assert desk.service.step() is None
    assert not desk.turns._slice_waiting


def test_a_tenant_that_died_in_mid_call_is_forgotten_at_its_end():
    desk = serving()
    ann = desk.tenant("ann")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.service.step()
    desk.port.deaf.add(ann)
    desk.run()
    assert desk.port.forgotten == [ann]
    assert desk.service.stats()["queued"] == 0


def test_a_piece_that_fails_is_its_own_calls_failure(monkeypatch):
    desk = serving()
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    layer = desk.layers[LINEAR]
    forward = layer.forward

    def fails(rows, out=None):
        if bool(rows[0].isnan().any()):
            raise RuntimeError("not these")
        return forward(rows, out)

    monkeypatch.setattr(layer, "forward", fails)
    (good,) = rows_for((WIDTH,))
    bad = good.clone()
    bad[-1] = float("nan")
    desk.call(ann, good, training=True)
    desk.call(bob, bad, training=True)
    desk.run()
    assert desk.answer(ann).kind is Kind.REPLY
    assert desk.answer(bob).body["code"] == "layer_failed"
    desk.host()
    desk.call(bob, good, training=True)
    desk.run()
    assert desk.answer(bob).kind is Kind.REPLY


def test_a_policy_that_fails_in_mid_call_leaves_nobody_waiting():
    class Fails:
        name = "fails"
        asked = 0

        def decide(self, pending, heard, costs, now) -> Decision:
            self.asked += 1
            if self.asked > 1:
                raise RuntimeError("no idea")
            return Decision(batch=tuple(pending))

    desk = serving(policy=Fails())
    ann, bob = desk.tenant("ann"), desk.tenant("bob")
    desk.call(ann, *rows_for((WIDTH,)), training=True)
    desk.service.step()
    desk.call(bob, torch.ones(1, WIDTH))
    desk.run()
    assert [desk.answer(peer).kind for peer in (ann, bob)] == [Kind.ERROR, Kind.ERROR]
