from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from symbiosis.common.free_cores import FreeCores, choose_threads, parse_busy_s

STAT = """cpu  300 0 100 5000 10 0 0 50 0 0
cpu0 200 10 50 2500 5 3 2 25 0 0
cpu1 100 0 50 2500 5 0 0 25 0 0
cpu10 7 0 0 2500 5 0 0 25 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(
    ("cores", "max_threads", "busy", "expected"),
    [(2, 2, 0.0, 2), (2, 2, 0.3, 2), (2, 2, 0.67, 1), (2, 2, 1.0, 1), (2, 2, 1.9, 1), (16, 16, 0.94, 15), (16, 8, 3.0, 8)],
)
def test_threads_are_the_cores_that_are_left(cores, max_threads, busy, expected):
    assert choose_threads(cores, max_threads, busy) == expected


def test_busy_time_of_some_cores():
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert parse_busy_s(STAT, {0}) == pytest.approx(265 * tick)
    assert parse_busy_s(STAT, {1}) == pytest.approx(150 * tick)
    assert parse_busy_s(STAT, {0, 1}) == pytest.approx(415 * tick)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_busy_processes_take_threads_while_it_computes():
    """In a process of its own, whose threads no other test changes."""
    script = """
import os, subprocess, sys, time
import torch
from symbiosis.common.free_cores import FreeCores
cores = len(os.sched_getaffinity(0))
torch.set_num_threads(cores)
free_cores, within = FreeCores(), cores
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
try:
    deadline = time.monotonic() + 60
    while within != 1 and time.monotonic() < deadline:
        time.sleep(0.1)
        with free_cores:
            within = torch.get_num_threads()
    print(within, torch.get_num_threads() == cores)
finally:
    for process in busy:
        process.kill()
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.split() == ["1", "True"]


def test_one_thread_stays_one():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with FreeCores():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
