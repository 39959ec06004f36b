"""Time slices on shared cores. The clock is injected; threads are joined, never timed."""

from __future__ import annotations

import threading

import pytest

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, PassBudget
from tests.split.executor.service_bench import Clock

STEP_S, SHARE = 0.1, 0.2
CREDIT_S = STEP_S / 4
SHORT = PassBudget("short", STEP_S, is_serving=True)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def share(clock):
    """The engine has just ended a step."""
    share = CpuTimeShare(SHARE, clock)
    run_step(share, clock)
    return share


def run_step(share, clock, seconds=STEP_S):
    """Run one step of the engine."""
    with share:
        clock.now += seconds


def run_slice(share, clock, seconds):
    """Run one slice of the executor."""
    assert share.begin_slice() is not None
    clock.now += seconds
    share.end_slice()


class EngineStep(threading.Thread):
    """Runs one step; `inside` is set while it runs."""

    def __init__(self, share):
        super().__init__(daemon=True)
        self.share, self.inside, self.leave = share, threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.share:
            self.inside.set()
            assert self.leave.wait(30)

    def end(self):
        assert self.inside.wait(30)
        self.leave.set()
        self.join(30)


def wait_for_engine(share):
    """Return when the engine waits for its step."""
    with share._changed:
        assert share._changed.wait_for(lambda: share._engine_waiting, 30)


def test_a_failed_step_does_not_change_the_slice_budget(share, clock):
    def fails():
        with share:
            clock.now += STEP_S / 1000
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert share.begin_slice() == pytest.approx(CREDIT_S)


def test_a_step_of_zero_duration_does_not_stop_training(share, clock):
    run_step(share, clock, 0.0)
    for _ in range(200):
        run_step(share, clock)
    assert share.begin_slice() == pytest.approx(CREDIT_S)


def test_a_long_step_is_busy_until_it_ends(share, clock):
    with share:
        clock.now += 50 * STEP_S
        assert share.busy_until() == clock.now


def test_an_idle_engine_causes_no_contention(clock):
    share = CpuTimeShare(SHARE, clock)
    assert not share.is_contended()
    assert share.begin_slice() == 0.05
    share.end_slice()
    run_step(share, clock)
    assert share.is_contended()
    clock.now += 5
    assert not share.is_contended()


def test_a_share_of_one_turns_time_slicing_off(clock):
    share = CpuTimeShare(1.0, clock)
    with share:
        assert not share.is_contended()
        assert share.begin_slice() == 0.05
    with share:
        share.end_slice()


def test_no_slice_begins_during_a_step_and_the_callback_follows(share):
    called = []
    share.on_slice_available = lambda: called.append(True)
    with share:
        assert share.begin_slice() is None
        assert not called
    assert called
    assert share.begin_slice() is not None


def test_a_failed_step_ends(share):
    with pytest.raises(ZeroDivisionError), share:
        1 / 0  # noqa: B018
    assert share.begin_slice() is not None


def test_a_slice_may_take_the_credit_of_one_step(share, clock):
    assert share.begin_slice() == pytest.approx(CREDIT_S)
    share.end_slice()
    run_step(share, clock, 50 * STEP_S)  # one long prefill hardly changes the budget
    assert share.begin_slice() == pytest.approx(CREDIT_S * 1.1)
    share.end_slice()
    run_step(share, clock, STEP_S / 2)
    assert share.begin_slice() == pytest.approx(CREDIT_S / 2)


def test_the_engine_waits_for_the_running_slice(share):
    assert share.begin_slice() is not None
    engine = EngineStep(share)
    wait_for_engine(share)
    assert not engine.inside.is_set()
    share.end_slice()
    engine.end()


def test_a_slice_that_was_denied_runs_once_before_the_next_step(share, clock):
    with share:
        clock.now += 1e3  # the engine waits for the credit in real time: too long to time out here
        share._step_s = 1e3
        assert share.begin_slice() is None
    engine = EngineStep(share)
    wait_for_engine(share)
    assert not engine.inside.is_set()
    run_slice(share, clock, 1e3)
    assert share.begin_slice() is None, "the credit is spent"
    engine.end()
    assert share.begin_slice() is not None


def test_the_engine_waits_for_a_denied_slice_no_longer_than_its_credit(share, clock):
    with share:
        clock.now += STEP_S
        assert share.begin_slice() is None
    EngineStep(share).end()


def test_the_engine_does_not_wait_for_a_cancelled_slice(share):
    with share:
        assert share.begin_slice() is None
        share._step_s = 1e6
    share._credit_s = 1e6
    share.cancel_slice()
    EngineStep(share).end()


def test_slices_follow_each_other_while_no_step_waits(share, clock):
    for _ in range(5):
        run_slice(share, clock, CREDIT_S)


def test_busy_until_is_the_expected_end_of_the_step(share, clock):
    with share:
        assert share.busy_until() == pytest.approx(clock.now + STEP_S)
    assert share.busy_until() == clock.now
    clock.now += 5
    assert share.busy_until() is None


class TrainingPass(threading.Thread):
    """Begins one pass of hosted fine-tuning."""

    def __init__(self, share, short_s=STEP_S):
        super().__init__(daemon=True)
        self.share, self.short_s, self.over = share, short_s, False
        self.begun: list[PassBudget | None] = []
        self.start()

    def run(self):
        self.begun.append(self.share.begin_pass(self.short_s, lambda: self.over))

    def end(self):
        self.join(30)
        assert self.begun[0] is not None
        self.share.end_pass()
        return self.begun[0]


def wait_for_training(share):
    """Return when fine-tuning waits for its pass."""
    with share._changed:
        assert share._changed.wait_for(lambda: share._pass_waiting, 30)


def test_passes_are_full_while_the_engine_is_idle(clock):
    share = CpuTimeShare(SHARE, clock)
    for _ in range(3):
        assert share.begin_pass(STEP_S, lambda: False) == PassBudget("full")
        clock.now += 100
        share.end_pass()


def test_a_pass_waits_for_the_step_and_the_next_step_for_the_pass(share, clock):
    engine = EngineStep(share)
    assert engine.inside.wait(30)
    training = TrainingPass(share, 1e3)  # the engine waits for it in real time: too long to time out here
    wait_for_training(share)
    engine.end()
    training.join(30)
    assert training.begun == [PassBudget("short", 1e3, is_serving=True)]
    second = EngineStep(share)
    wait_for_engine(share)
    assert not second.inside.wait(0.05)
    clock.now += STEP_S / 2
    share.end_pass()
    second.end()


def test_passes_pause_until_their_share_is_not_exceeded(share, clock):
    assert share.begin_pass(STEP_S, lambda: False) == SHORT
    clock.now += STEP_S
    share.end_pass()
    for _ in range(3):  # a share of one fifth: the pause is four times as long as the pass
        run_step(share, clock)
        training = TrainingPass(share)
        wait_for_training(share)
        training.over = True
        training.join(30)
        assert training.begun == [None]
    run_step(share, clock, STEP_S * 1.01)
    assert TrainingPass(share).end() == SHORT


def test_an_engine_without_a_gap_between_steps_lets_a_pass_begin(share, clock):
    engine = EngineStep(share)
    assert engine.inside.wait(30)
    training = TrainingPass(share)
    wait_for_training(share)
    after = EngineStep(share)  # waits before the first has ended
    engine.end()
    training.join(30)
    assert training.begun == [SHORT] or after.inside.wait(30)
    if training.begun == [SHORT]:
        share.end_pass()
    after.end()


def test_the_engine_does_not_wait_for_a_long_pass_that_began_while_it_was_idle(clock):
    share = CpuTimeShare(SHARE, clock)
    assert share.begin_pass(STEP_S, lambda: False) == PassBudget("full")
    clock.now += 3 * STEP_S
    EngineStep(share).end()
    share.end_pass()


def test_no_slice_begins_during_a_pass(share):
    called = []
    share.on_slice_available = lambda: called.append(True)
    assert share.begin_pass(STEP_S, lambda: False) == SHORT
    assert share.begin_slice() is None
    share.end_pass()
    assert called == [True]
    assert share.begin_slice() is not None
