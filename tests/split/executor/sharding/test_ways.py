"""The choice between the two ways of sharding, on made-up costs."""

from __future__ import annotations

import random

import pytest

from symbiosis.split.executor.sharding.ways import Way, WayChooser

ROWS = [2**power for power in range(14)]


def seconds(way: Way, rows: int, noise: random.Random) -> float:
    """Tensor: a little latency, and the rows. Parameters: the weight, and less for each row."""
    exact = 1e-4 + 4e-6 * rows if way is Way.TENSOR else 4e-3 + 2e-6 * rows
    return exact * noise.uniform(0.9, 1.1)


def test_it_learns_the_faster_way_for_every_size():
    chooser, noise = WayChooser(), random.Random(1)
    for _ in range(8):
        for rows in noise.sample(ROWS, len(ROWS)):
            way = chooser.choose("a layer", rows)
            chooser.observe("a layer", way, rows, seconds(way, rows, noise))
    for rows in ROWS:
        best, other = sorted(Way, key=lambda way: seconds(way, rows, random.Random(2)))
        clear = seconds(other, rows, random.Random(2)) > 1.3 * seconds(best, rows, random.Random(2))
        assert not clear or chooser.best("a layer", rows) is best


def test_a_way_that_is_clearly_slower_is_hardly_tried():
    chooser, noise, tried = WayChooser(), random.Random(1), []
    for _ in range(100):
        way = chooser.choose("a layer", 1)
        tried.append(way)
        chooser.observe("a layer", way, 1, seconds(way, 1, noise))
    assert tried.count(Way.PARAMETERS) <= 6


@pytest.mark.parametrize("delayed", range(6))
def test_one_delayed_run_does_not_decide_for_long(delayed):
    chooser, noise, runs = WayChooser(), random.Random(1), 0
    for _ in range(16):
        for rows in ROWS:
            way = chooser.choose("a layer", rows)
            runs += way is Way.TENSOR
            late = 0.1 if way is Way.TENSOR and runs == delayed + 1 else 0.0
            chooser.observe("a layer", way, rows, seconds(way, rows, noise) + late)
    assert all(chooser.best("a layer", rows) is Way.TENSOR for rows in ROWS[:9])


def test_delays_of_a_busy_machine_do_not_decide():
    wrong, clear = 0, 0
    for seed in range(40):
        chooser, noise = WayChooser(), random.Random(seed)
        for rows in ROWS:
            for _ in range(32):
                way = chooser.choose("a layer", rows)
                late = noise.choice([0.0, 0.0, 0.0, 0.008])
                chooser.observe("a layer", way, rows, seconds(way, rows, noise) + late)
            best, other = sorted(Way, key=lambda way: seconds(way, rows, random.Random(2)))
            if seconds(other, rows, random.Random(2)) > 1.3 * seconds(best, rows, random.Random(2)):
                clear += 1
                wrong += chooser.best("a layer", rows) is not best
    assert wrong <= 0.03 * clear


@pytest.mark.parametrize("way", Way)
def test_a_fixed_way_is_kept(way):
    chooser = WayChooser(way)
    chooser.observe("a layer", way, 1, 1e9)
    assert chooser.choose("a layer", 1) is chooser.best("a layer", 1) is way
