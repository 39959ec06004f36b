"""On a GPU nobody waits for a turn: training has a part of it while answers are served."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from symbiosis.errors import SymbiosisError
from symbiosis.executor.beside import Beside, fitting, turns_on
from symbiosis.executor.turns import Permit, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beside(clock: Clock) -> Beside:
    return Beside(torch.device("cpu"), clock=clock)


def begun(turns: Beside) -> Permit | None:
    return turns.begin_pass(60.0, lambda: False)


def test_training_has_a_part_while_answers_are_served_and_short_passes_for_a_minute_after():
    clock = Clock()
    turns = beside(clock)
    assert begun(turns) == Permit("full")
    turns.end_pass()
    with turns:
        assert begun(turns) == Permit("beside 0.5", 60.0, beside=True)
        turns.end_pass()
    clock.now += 0.5
    assert begun(turns).beside
    turns.end_pass()
    clock.now += 1.0
    assert begun(turns) == Permit("lately", 0.1)
    turns.end_pass()
    clock.now += 60.0
    assert begun(turns) == Permit("full")
    assert turns.begin_pass(60.0, lambda: True) is None


def test_a_part_is_found_that_slows_answers_as_much_as_is_allowed():
    assert fitting(0.5, slower=1.6, allowed=1.3) == 0.25
    assert fitting(0.5, slower=1.4, allowed=1.3) == 0.375
    assert fitting(0.5, slower=1.3, allowed=1.3) == 0.5
    assert fitting(0.5, slower=1.31, allowed=1.3) == 0.5, "not less for next to nothing"
    assert fitting(0.3125, slower=1.25, allowed=1.3) == 0.375
    assert fitting(0.5, slower=1.2, allowed=1.3) == 0.75
    assert fitting(0.5, slower=0.9, allowed=1.3) == 0.75, "not too much at a time"
    assert fitting(0.0625, slower=3.0, allowed=1.1) == 0.0625, "some training goes on"
    assert fitting(0.875, slower=1.0, allowed=1.3) == 0.875, "serving has some to itself"


@pytest.mark.parametrize(("slower", "share"), [(1.1, 0.75), (1.5, 0.25)])
def test_now_and_then_training_pauses_and_the_part_is_made_to_fit(slower, share):
    """The engine's passes take longer while training has half of the multiprocessors."""
    turns = Beside(torch.device("cpu"), slowdown=1.3)
    over, begins = threading.Event(), []

    def serve() -> None:
        while not over.is_set():
            with turns:
                time.sleep(0.004 * (slower if turns._training else 1.0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while turns.share == 0.5 and len(begins) < 200:
            begins.append(begun(turns))
            time.sleep(0.03)
            turns.end_pass()
    finally:
        over.set()
        thread.join()
    assert turns.share == pytest.approx(share, abs=0.13)
    assert set(turns.figures()) == {"alone_s", "beside_s", "training_share"}


def test_a_part_that_is_given_is_kept():
    turns = Beside(torch.device("cpu"), 0.25)
    assert turns.figures() == {"training_share": 0.25}
    assert turns_on(torch.device("cuda"), 0.25).share == 0.25


def test_what_cannot_be_asked_for_is_refused():
    with pytest.raises(SymbiosisError, match="one of them"):
        turns_on(torch.device("cuda"), 0.5, 1.2)
    with pytest.raises(SymbiosisError, match="for a GPU"):
        turns_on(torch.device("cpu"), None, 1.2)
    with pytest.raises(SymbiosisError, match="more than 1"):
        turns_on(torch.device("cuda"), None, 1.0)


def test_cores_are_shared_by_turns():
    assert type(turns_on(torch.device("cpu"), 0.3)) is Turns
    assert Turns().figures() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_parts_of_a_gpu_give_the_products_of_all_of_it():
    device = torch.device("cuda", 0)
    turns = Beside(device, 0.5)
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
    lane = turns._lanes()[2]
    assert 0 < lane.multiprocessors < torch.cuda.get_device_properties(device).multi_processor_count
    torch.cuda.set_stream(torch.cuda.default_stream(device))
