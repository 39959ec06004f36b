"""Training batches in slices while the hosted engine serves: equal results, and steps of the engine in between."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor import batch
from symbiosis.split.executor.policies import Decision, Lockstep, Opportunistic
from symbiosis.transport.messages import Kind
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, OTHER, WIDTH, ServiceBench

ROWS, FEW = 100, 8  # without a cost estimate a slice has a few rows
SLICES = -(-ROWS // FEW)
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


def serving(**options) -> ServiceBench:
    """The hosted engine has just ended a step."""
    bench = ServiceBench(**options)
    bench.run_engine_step()
    return bench


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", CALLS)
def test_a_sliced_batch_returns_what_a_whole_one_returns(what, dtype):
    layers, back, widths = CALLS[what]
    mine, yours = (tuple(t.to(dtype) if t.is_floating_point() else t for t in rows_for(widths, seed)) for seed in (1, 2))
    found = []
    for bench in (ServiceBench(), serving()):
        ann, bob = bench.connect("ann"), bench.connect("bob")
        bench.call(ann, *mine, layers=layers, back=back, training=True)
        bench.call(bob, *yours, layers=layers, back=back, training=True)
        ran = bench.run()
        found.append((ran, [bench.reply_to(peer).tensors for peer in (ann, bob)]))
    (whole_ran, whole), (cut_ran, cut) = found
    assert (whole_ran, cut_ran) == (1, 2 * ROWS // FEW)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)  # computed in the layers' float32


def test_a_sliced_batch_counts_as_one_batch():
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.run()
    figures = bench.service.stats()
    assert (figures["calls"], figures["batches"], figures["rows"], figures["queued"]) == (1, 1, ROWS, 0)


@pytest.mark.parametrize(("row_s", "slices"), [(1e-6, 1), (1e-3, 2)])
def test_slices_fit_the_time_budget_of_an_idle_engine(row_s, slices):
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    assert bench.service.batcher.step() == 0.0
    for rows in (1, 100) * 20:
        bench.service.batcher.costs.observe(bench.service.batcher._sliced.calls[0].work.key.shape, rows, rows * row_s)
    bench.clock.now += 5
    assert bench.run() == slices
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_decoding_without_a_pause_does_not_starve_training():
    bench = serving(policy=Opportunistic())
    ann, decoders = bench.connect("ann"), [bench.connect(f"decodes {n}") for n in range(2)]
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.clock.now += 0.001
    bench.call(decoders[0], torch.ones(1, WIDTH))
    for number in range(1, 200):
        bench.clock.now += 0.005
        if not number % 20:
            bench.run_engine_step()
        for decoder in decoders:  # one of them always has a call
            if bench.replies_to(decoder) or not decoder.session.is_busy:
                bench.call(decoder, torch.ones(1, WIDTH))
        bench.service.batcher.step()
        if bench.port.replies.get(ann):
            return
    pytest.fail("training got no reply")


def test_no_call_waits_for_a_session_whose_batch_is_sliced():
    bench = serving(policy=Lockstep())
    ann, bob = bench.connect("ann"), bench.connect("bob")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.call(bob, torch.ones(1, WIDTH))
    bench.service.batcher.step()
    bench.reply_to(bob)
    with bench.device_share:
        bench.call(bob, torch.ones(1, WIDTH))
        assert bench.service.batcher.step() == 0.0
    assert bench.reply_to(bob).kind is Kind.REPLY


def test_calls_run_alone_if_slices_cannot_be_joined(monkeypatch):
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(batch, "_split", full)
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_a_step_of_the_engine_runs_between_two_slices():
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    slices = 0
    while not bench.port.replies.get(ann):
        with bench.device_share:
            bench.clock.now += 0.1
            assert bench.service.batcher.step() is None, "not during a step"
        assert bench.service.batcher.step() == 0.0
        slices += 1
    assert slices == SLICES


def test_the_loop_is_woken_when_a_step_ends():
    bench = serving()
    woken = []
    bench.device_share.on_slice_available = lambda: woken.append(True)
    bench.call(bench.connect(), *rows_for((WIDTH,)), training=True)
    with bench.device_share:
        bench.service.batcher.step()
    assert woken


def test_decoding_waits_for_at_most_one_slice():
    bench = serving()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.service.batcher.step()
    with bench.device_share:
        bench.call(bob, torch.ones(1, WIDTH))
        assert bench.service.batcher.step() == 0.0, "it does not wait for the engine"
    assert bench.reply_to(bob).kind is Kind.REPLY
    assert not bench.replies_to(ann)


def test_decoding_does_not_share_a_batch_with_training():
    bench = serving()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.call(bob, torch.ones(1, WIDTH))
    bench.service.batcher.step()
    assert bench.reply_to(bob).kind is Kind.REPLY
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY


def test_calls_without_gradient_of_a_training_session_are_sliced_too():
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), back=True, training=True)
    bench.run()
    bench.call(ann, *rows_for((WIDTH,)))
    assert bench.run() == SLICES


def test_a_session_closed_between_slices_drops_only_its_own_call():
    bench = serving()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    rows = rows_for((WIDTH,))
    for peer in (ann, bob):
        bench.call(peer, *rows, training=True)
    bench.service.batcher.step()
    bench.send(bob, Kind.BYE)
    bench.run()
    assert [reply.kind for reply in bench.replies_to(bob)] == [Kind.BYE]
    torch.testing.assert_close(bench.reply_to(ann).tensors[0], rows[0] @ bench.layers[LINEAR].weight_OI.T)
    assert bob in bench.port.forgotten


def test_the_engine_does_not_wait_for_a_closed_session():
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    with bench.device_share:
        bench.service.batcher.step()
        bench.send(ann, Kind.BYE)
        assert bench.service.batcher.step() is None
    assert not bench.device_share._slice_waiting


def test_a_tenant_lost_between_slices_is_closed_at_the_end_of_its_batch():
    bench = serving()
    ann = bench.connect("ann")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.service.batcher.step()
    bench.port.unreachable.add(ann)
    bench.run()
    assert bench.port.forgotten == [ann]
    assert bench.service.stats()["queued"] == 0


def test_a_slice_that_fails_fails_only_the_faulty_call(monkeypatch):
    bench = serving()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    layer = bench.layers[LINEAR]
    forward = layer.forward

    def fails(rows, out=None):
        if bool(rows[0].isnan().any()):
            raise RuntimeError("not these")
        return forward(rows, out)

    monkeypatch.setattr(layer, "forward", fails)
    (good,) = rows_for((WIDTH,))
    bad = good.clone()
    bad[-1] = float("nan")
    bench.call(ann, good, training=True)
    bench.call(bob, bad, training=True)
    bench.run()
    assert bench.reply_to(ann).kind is Kind.REPLY
    assert bench.reply_to(bob).body["code"] == "layer_failed"
    bench.run_engine_step()
    bench.call(bob, good, training=True)
    bench.run()
    assert bench.reply_to(bob).kind is Kind.REPLY


def test_all_calls_get_an_error_if_the_policy_fails_between_slices():
    class Fails:
        name = "fails"
        decisions = 0

        def decide(self, pending, sessions, costs, now) -> Decision:
            self.decisions += 1
            if self.decisions > 1:
                raise RuntimeError("cannot decide")
            return Decision(batch=tuple(pending))

    bench = serving(policy=Fails())
    ann, bob = bench.connect("ann"), bench.connect("bob")
    bench.call(ann, *rows_for((WIDTH,)), training=True)
    bench.service.batcher.step()
    bench.call(bob, torch.ones(1, WIDTH))
    bench.run()
    assert [bench.reply_to(peer).kind for peer in (ann, bob)] == [Kind.ERROR, Kind.ERROR]
