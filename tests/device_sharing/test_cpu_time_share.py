"""Turns between passes and pieces. Time stands still unless a test moves it; threads are waited for, never timed."""

from __future__ import annotations

import threading

import pytest

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, Permit
from tests.split.executor.service_bench import Clock

PASS_S, SHARE = 0.1, 0.2
EARNED_S = PASS_S / 4
SHORT = Permit("short", PASS_S, beside=True)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def turns(clock):
    """The engine has just ended a pass."""
    turns = CpuTimeShare(SHARE, clock)
    compute(turns, clock)
    return turns


def compute(turns, clock, seconds=PASS_S):
    """A pass."""
    with turns:
        clock.now += seconds


def train(turns, clock, seconds):
    """A piece."""
    assert turns.begin() is not None
    clock.now += seconds
    turns.end()


class Engine(threading.Thread):
    """Wants to compute a pass."""

    def __init__(self, turns):
        super().__init__(daemon=True)
        self.turns, self.inside, self.leave = turns, threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.turns:
            self.inside.set()
            assert self.leave.wait(30)

    def end(self):
        assert self.inside.wait(30)
        self.leave.set()
        self.join(30)


def wanted(turns):
    """Returns when the engine waits to begin."""
    with turns._changed:
        assert turns._changed.wait_for(lambda: turns._wanted, 30)


def test_nothing_is_learnt_from_a_pass_that_failed(turns, clock):
    def fails():
        with turns:
            clock.now += PASS_S / 1000
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert turns.begin() == pytest.approx(EARNED_S)


def test_a_pass_of_no_time_does_not_end_training(turns, clock):
    compute(turns, clock, 0.0)
    for _ in range(200):
        compute(turns, clock)
    assert turns.begin() == pytest.approx(EARNED_S)


def test_a_long_pass_is_busy_until_it_ends(turns, clock):
    with turns:
        clock.now += 50 * PASS_S
        assert turns.busy_until() == clock.now


def test_who_serves_nobody_is_not_heeded(clock):
    turns = CpuTimeShare(SHARE, clock)
    assert not turns.are_taken()
    assert turns.begin() == 0.05
    turns.end()
    compute(turns, clock)
    assert turns.are_taken()
    clock.now += 5
    assert not turns.are_taken()


def test_with_the_whole_share_neither_heeds_the_other(clock):
    turns = CpuTimeShare(1.0, clock)
    with turns:
        assert not turns.are_taken()
        assert turns.begin() == 0.05
    with turns:
        turns.end()


def test_no_piece_begins_within_a_pass_and_who_was_refused_is_called(turns):
    called = []
    turns.on_free = lambda: called.append(True)
    with turns:
        assert turns.begin() is None
        assert not called
    assert called
    assert turns.begin() is not None


def test_a_pass_that_fails_is_over_all_the_same(turns):
    with pytest.raises(ZeroDivisionError), turns:
        1 / 0  # noqa: B018
    assert turns.begin() is not None


def test_a_piece_may_take_what_a_pass_has_earned(turns, clock):
    assert turns.begin() == pytest.approx(EARNED_S)
    turns.end()
    compute(turns, clock, 50 * PASS_S)  # a long prompt: chats that follow are not to wait longer for it
    assert turns.begin() == pytest.approx(EARNED_S * 1.1)
    turns.end()
    compute(turns, clock, PASS_S / 2)
    assert turns.begin() == pytest.approx(EARNED_S / 2)


def test_the_engine_waits_for_the_piece_that_runs(turns):
    assert turns.begin() is not None
    engine = Engine(turns)
    wanted(turns)
    assert not engine.inside.is_set()
    turns.end()
    engine.end()


def test_training_that_was_refused_goes_first_once(turns, clock):
    with turns:
        clock.now += 1e3  # what is earned is waited for in real time: long enough not to see the end of
        turns._pace_s = 1e3
        assert turns.begin() is None
    engine = Engine(turns)
    wanted(turns)
    assert not engine.inside.is_set()
    train(turns, clock, 1e3)
    assert turns.begin() is None, "it has had its share"
    engine.end()
    assert turns.begin() is not None


def test_the_engine_does_not_wait_for_training_that_never_comes(turns, clock):
    with turns:
        clock.now += PASS_S
        assert turns.begin() is None
    Engine(turns).end()


def test_who_gives_up_is_not_waited_for(turns):
    with turns:
        assert turns.begin() is None
        turns._pace_s = 1e6
    turns._credit_s = 1e6
    turns.give_up()
    Engine(turns).end()


def test_pieces_follow_each_other_while_the_engine_wants_nothing(turns, clock):
    for _ in range(5):
        train(turns, clock, EARNED_S)


def test_a_policy_of_the_gpu_hears_until_when_a_pass_goes_on(turns, clock):
    with turns:
        assert turns.busy_until() == pytest.approx(clock.now + PASS_S)
    assert turns.busy_until() == clock.now
    clock.now += 5
    assert turns.busy_until() is None


class Training(threading.Thread):
    """Wants to compute a pass of hosted training."""

    def __init__(self, turns, short_s=PASS_S):
        super().__init__(daemon=True)
        self.turns, self.short_s, self.over = turns, short_s, False
        self.begun: list[Permit | None] = []
        self.start()

    def run(self):
        self.begun.append(self.turns.begin_pass(self.short_s, lambda: self.over))

    def end(self):
        self.join(30)
        assert self.begun[0] is not None
        self.turns.end_pass()
        return self.begun[0]


def asking(turns):
    with turns._changed:
        assert turns._changed.wait_for(lambda: turns._asking, 30)


def test_hosted_training_takes_full_passes_while_nobody_is_served(clock):
    turns = CpuTimeShare(SHARE, clock)
    for _ in range(3):
        assert turns.begin_pass(PASS_S, lambda: False) == Permit("full")
        clock.now += 100
        turns.end_pass()


def test_hosted_training_waits_for_the_pass_and_then_the_engine_for_it(turns, clock):
    engine = Engine(turns)
    assert engine.inside.wait(30)
    training = Training(turns, 1e3)  # the engine waits for it in real time: long enough not to see the end of
    asking(turns)
    engine.end()
    training.join(30)
    assert training.begun == [Permit("short", 1e3, beside=True)]
    second = Engine(turns)
    wanted(turns)
    assert not second.inside.wait(0.05)
    clock.now += PASS_S / 2
    turns.end_pass()
    second.end()


def test_hosted_training_rests_until_it_has_had_its_share(turns, clock):
    assert turns.begin_pass(PASS_S, lambda: False) == SHORT
    clock.now += PASS_S
    turns.end_pass()
    for _ in range(3):  # a fifth of the time is training's: it rests four times as long as it has computed
        compute(turns, clock)
        training = Training(turns)
        asking(turns)
        training.over = True
        training.join(30)
        assert training.begun == [None]
    compute(turns, clock, PASS_S * 1.01)
    assert Training(turns).end() == SHORT


def test_the_engine_lets_hosted_training_begin_though_it_has_no_pause(turns, clock):
    engine = Engine(turns)
    assert engine.inside.wait(30)
    training = Training(turns)
    asking(turns)
    after = Engine(turns)  # wants to begin before the first has ended
    engine.end()
    training.join(30)
    assert training.begun == [SHORT] or after.inside.wait(30)
    if training.begun == [SHORT]:
        turns.end_pass()
    after.end()


def test_a_long_pass_that_began_when_nobody_was_served_is_not_waited_for(clock):
    turns = CpuTimeShare(SHARE, clock)
    assert turns.begin_pass(PASS_S, lambda: False) == Permit("full")
    clock.now += 3 * PASS_S
    Engine(turns).end()
    turns.end_pass()


def test_no_piece_begins_within_a_pass_of_hosted_training(turns):
    called = []
    turns.on_free = lambda: called.append(True)
    assert turns.begin_pass(PASS_S, lambda: False) == SHORT
    assert turns.begin() is None
    turns.end_pass()
    assert called == [True]
    assert turns.begin() is not None
