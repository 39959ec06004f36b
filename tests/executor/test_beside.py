"""On a GPU nobody waits for a turn: training has a part of it while answers are served."""

from __future__ import annotations

import pytest
import torch

from symbiosis.executor.beside import Beside, turns_on
from symbiosis.executor.turns import Turns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beside(clock: Clock) -> Beside:
    return Beside(torch.device("cpu"), clock=clock)


def test_training_is_told_that_answers_are_served_until_nobody_was_for_a_second():
    clock = Clock()
    turns = beside(clock)
    assert turns.begin_pass(0.1, lambda: False) is False
    turns.end_pass()
    with turns:
        assert turns.begin_pass(0.1, lambda: False) is True
        turns.end_pass()
    clock.now += 0.5
    assert turns.begin_pass(0.1, lambda: False) is True
    turns.end_pass()
    clock.now += 1.0
    assert turns.begin_pass(0.1, lambda: False) is False
    assert turns.begin_pass(0.1, lambda: True) is None


def test_passes_of_the_engine_are_timed_alone_and_beside_training():
    clock = Clock()
    turns = beside(clock)
    with turns:
        clock.now += 0.004
    turns.begin_pass(0.1, lambda: False)
    with turns:
        clock.now += 0.005
    turns.end_pass()
    figures = turns.figures()
    assert figures["alone_s"] == pytest.approx(0.004)
    assert figures["beside_s"] == pytest.approx(0.005)


def test_cores_are_shared_by_turns():
    assert type(turns_on(torch.device("cpu"), 0.3)) is Turns
    assert Turns().figures() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_parts_of_a_gpu_give_the_products_of_all_of_it():
    device = torch.device("cuda", 0)
    turns = Beside(device, 0.5, apart=True)
    x = torch.randn(512, 512, device=device)
    plain = x @ x
    with turns:
        served = x @ x
        turns.begin_pass(0.1, lambda: False)
        trained = x @ x
        turns.end_pass()
    with turns:
        apart = x @ x
    torch.cuda.synchronize()
    for found in (served, trained, apart):
        assert torch.allclose(found, plain, rtol=1e-3, atol=1e-3)
    whole = torch.cuda.get_device_properties(device).multi_processor_count
    assert 0 < turns.figures()["training_multiprocessors"] < whole
    torch.cuda.set_stream(torch.cuda.default_stream(device))
