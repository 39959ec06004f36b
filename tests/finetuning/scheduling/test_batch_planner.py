"""The size of passes follows measurements, except of new shapes; on a GPU it has few values."""

from __future__ import annotations

import math

from symbiosis.device_sharing.cpu_time_share import PassBudget
from symbiosis.finetuning.scheduling.batch_planner import BatchPlanner
from symbiosis.finetuning.scheduling.fairness import Candidate

TIMED = PassBudget("timed", 0.1)


def test_passes_of_new_shapes_do_not_count_as_measurements():
    planner = BatchPlanner(4096, min_rows=256)
    planner.record_pass(PassBudget("full"), 4096, 0.2)
    assert planner.max_rows(TIMED) == 2048
    for _ in range(8):
        planner.record_pass(TIMED, 2048, 0.9, is_new=True)
        assert planner.max_rows(TIMED) == 2048
    for _ in range(20):
        planner.record_pass(TIMED, 2048, 0.9, is_new=True)
    assert planner.max_rows(TIMED) == 256, "unless all passes are new"


def test_time_budgets_are_rounded_to_few_sizes_on_a_gpu():
    planner, on_cpu = BatchPlanner(3000, min_rows=256), BatchPlanner(3000)
    for each in (planner, on_cpu):
        each.record_pass(TIMED, 1000, 0.1)
    assert (planner.max_rows(TIMED), on_cpu.max_rows(TIMED)) == (768, 1000)
    assert planner.max_rows(PassBudget("full", math.inf)) == 3000, "without a time budget"


def test_a_small_job_is_not_delayed_although_its_first_passes_are_new():
    planner, full = BatchPlanner(4096, min_rows=256), PassBudget("full")
    waiting = [Candidate("small", "ann", 1.0, [64]), Candidate("large", "bob", 1.0, [1024] * 4)]
    sizes = []
    for number in range(20):
        picked = planner.plan(waiting, full)
        rows = sum(sum(each.costs[: picked.get(each.session, 0)]) for each in waiting)
        sizes.append(rows)
        planner.record_pass(full, rows, 0.001 + rows * 1e-4, is_new=number < 5)
    assert sizes[0] == 64, "alone, to measure its time"
    assert sizes[-1] <= 64 + 1024
