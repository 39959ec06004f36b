"""On a GPU nobody takes turns: training has a part of it while answers are served, and all of it when nobody is."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, Permit
from symbiosis.device_sharing.gpu_partition import GpuPartition, turns_on
from symbiosis.errors import SymbiosisError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beside(clock: Clock) -> GpuPartition:
    return GpuPartition(torch.device("cpu"), clock=clock)


def begun(turns: GpuPartition) -> Permit | None:
    return turns.begin_pass(60.0, lambda: False)


def test_training_has_a_part_while_answers_are_served_and_short_passes_for_a_minute_after():
    clock = Clock()
    turns = beside(clock)
    assert begun(turns) == Permit("full")
    turns.end_pass()
    with turns:
        assert begun(turns) == Permit("beside 0.5", 60.0, beside=True)
        turns.end_pass()
    clock.now += 0.05
    assert begun(turns).beside
    turns.end_pass()
    clock.now += 0.2
    assert begun(turns) == Permit("lately", 0.1)
    turns.end_pass()
    clock.now += 60.0
    assert begun(turns) == Permit("full")
    assert turns.begin_pass(60.0, lambda: True) is None


def test_who_comes_waits_for_the_pass_that_has_the_whole_gpu(monkeypatch):
    clock = Clock()
    turns = beside(clock)
    told, waits = [], []
    monkeypatch.setattr(turns._changed, "notify_all", lambda: told.append(1))

    def wait_for(is_over, timeout):
        waits.append(timeout)
        assert not is_over()
        before = len(told)
        turns.end_pass()
        assert len(told) > before
        assert is_over()
        assert begun(turns).beside, "somebody waits: the next pass has a part"
        assert is_over(), "which is not waited for"
        turns.end_pass()
        return True

    monkeypatch.setattr(turns._changed, "wait_for", wait_for)
    assert not begun(turns).beside
    with turns:
        pass
    assert waits == [0.15]


def test_a_pass_that_has_a_part_is_not_waited_for(monkeypatch):
    clock = Clock()
    turns = beside(clock)
    with turns:
        assert begun(turns).beside
    clock.now += 5.0  # it takes long
    monkeypatch.setattr(turns._changed, "wait_for", None)
    with turns:
        pass


def test_a_pass_that_is_long_after_all_is_waited_for_once(monkeypatch):
    clock = Clock()
    turns = beside(clock)
    waits = []
    monkeypatch.setattr(turns._changed, "wait_for", lambda is_over, timeout: waits.append(timeout))
    assert begun(turns) == Permit("full")
    for _ in range(3):
        with turns:
            clock.now += 0.01
        clock.now += 0.01
    assert waits == [0.15]
    turns.end_pass()


def test_a_pass_that_cannot_begin_has_not_begun(monkeypatch):
    turns = beside(Clock())

    def use(lane):
        raise RuntimeError("no such stream")

    with monkeypatch.context() as patch:
        patch.setattr(turns, "_use", use)
        with pytest.raises(RuntimeError, match="no such stream"):
            begun(turns)
    monkeypatch.setattr(turns._changed, "wait_for", None)
    with turns:
        assert not turns._training


class Engine(threading.Thread):
    """Passes without pause; `slower` times as long while training computes. Time is the clock's."""

    def __init__(self, turns: GpuPartition, clock: Clock, slower: float, pass_s: float = 0.004) -> None:
        super().__init__(daemon=True)
        self.turns, self.clock, self.slower, self.pass_s = turns, clock, slower, pass_s
        self.over, self.passes = False, 0

    def run(self) -> None:
        while not self.over:
            with self.turns:
                self.clock.now += self.pass_s * (self.slower if self.turns._training else 1.0)
            self.passes += 1

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.join(30)

    def wait(self, passes: int) -> None:
        end = self.passes + passes
        while self.passes < end:
            assert self.is_alive()
            time.sleep(1e-4)


@pytest.mark.parametrize(("slower", "share"), [(1.0, 0.75), (1.4, 0.375), (2.0, 0.25)])
@pytest.mark.parametrize("pass_s", [0.004, 0.05])
def test_now_and_then_training_pauses_and_the_part_is_made_to_fit(slower, share, pass_s):
    clock = Clock()
    turns = GpuPartition(torch.device("cpu"), slowdown=1.3, clock=clock)
    with Engine(turns, clock, slower, pass_s) as engine:
        for _ in range(300):
            begun(turns)
            engine.wait(3)
            turns.end_pass()
            if turns.share != 0.5:
                break
    assert turns.share == share
    found = turns.figures()
    assert found["beside_s"] / found["alone_s"] == pytest.approx(slower, rel=0.01)


def test_training_does_not_pause_before_there_is_something_to_compare(monkeypatch):
    """Its passes are so short that few of the engine's fall into each."""
    clock = Clock()
    turns = GpuPartition(torch.device("cpu"), clock=clock)
    pauses = []
    monkeypatch.setattr(turns._changed, "wait_for", lambda *named, **more: pauses.append(1))
    for _ in range(100):
        with turns:
            begun(turns)
            clock.now += 0.001
        turns.end_pass()
        if len(turns._recent[True]) < 64:
            assert not pauses
    assert pauses


def test_what_was_slow_beside_passes_that_were_made_ready_does_not_count_until_that_is_how_it_is():
    clock = Clock()
    turns = beside(clock)
    for number in range(10):
        with turns:
            clock.now += 0.001
        begun(turns)
        with turns:
            clock.now += 0.003 if number % 2 else 0.001
        turns.end_pass(is_new=number % 2 == 1)
    assert set(map(round_ms, turns._recent[True])) == {1}
    for _ in range(20):
        begun(turns)
        with turns:
            clock.now += 0.003
        turns.end_pass(is_new=True)
    assert list(map(round_ms, turns._recent[True])).count(3) == 13, "not the first seven, nor the one before them"


def round_ms(seconds: float) -> int:
    return round(1e3 * seconds)


def test_a_part_that_is_given_is_kept():
    turns = GpuPartition(torch.device("cpu"), 0.25)
    assert turns.figures() == {"training_share": 0.25}
    assert turns_on(torch.device("cuda"), 0.25).share == 0.25


def test_what_cannot_be_asked_for_is_refused():
    with pytest.raises(SymbiosisError, match="one of them"):
        turns_on(torch.device("cuda"), 0.5, 1.2)
    with pytest.raises(SymbiosisError, match="for a GPU"):
        turns_on(torch.device("cpu"), None, 1.2)
    with pytest.raises(SymbiosisError, match=r"1\.2 to 10"):
        turns_on(torch.device("cuda"), None, 1.0)
    for device in ("cuda", "cpu"):
        with pytest.raises(SymbiosisError, match="at most 1"):
            turns_on(torch.device(device), 1.5)


def test_cores_are_shared_by_turns():
    assert type(turns_on(torch.device("cpu"), 0.3)) is CpuTimeShare
    assert CpuTimeShare().figures() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_parts_of_a_gpu_give_the_products_of_all_of_it():
    device = torch.device("cuda", 0)
    turns = GpuPartition(device, 0.5)
    x = torch.randn(512, 512, device=device)
    plain = x @ x
    begun(turns)
    whole = x @ x
    turns.end_pass()
    with turns:
        served = x @ x
        begun(turns)
        trained = x @ x
        turns.end_pass()
    torch.cuda.synchronize()
    for found in (whole, served, trained):
        assert torch.allclose(found, plain, rtol=1e-3, atol=1e-3)
    lane = turns._lane("beside")
    assert 0 < lane.multiprocessors < torch.cuda.get_device_properties(device).multi_processor_count
    torch.cuda.set_stream(torch.cuda.default_stream(device))
