"""How large passes are: by what was measured, but for the first ones of their kind; on a GPU of few sizes."""

from __future__ import annotations

import math

from symbiosis.device_sharing.cpu_turns import Permit
from symbiosis.finetuning.scheduling.batch_planner import BatchPlanner
from symbiosis.finetuning.scheduling.fairness import Candidate

LATELY = Permit("lately", 0.1)


def test_passes_that_had_to_be_made_ready_tell_nothing():
    planner = BatchPlanner(4096, min_rows=256)
    planner.record_pass(Permit("full"), 4096, 0.2)
    assert planner.max_rows(LATELY) == 2048
    for _ in range(8):
        planner.record_pass(LATELY, 2048, 0.9, is_new=True)
        assert planner.max_rows(LATELY) == 2048
    for _ in range(20):
        planner.record_pass(LATELY, 2048, 0.9, is_new=True)
    assert planner.max_rows(LATELY) == 256, "unless all do"


def test_short_passes_are_of_few_sizes_where_those_that_come_again_are_faster():
    planner, on_cores = BatchPlanner(3000, min_rows=256), BatchPlanner(3000)
    for each in (planner, on_cores):
        each.record_pass(LATELY, 1000, 0.1)
    assert (planner.max_rows(LATELY), on_cores.max_rows(LATELY)) == (768, 1000)
    assert planner.max_rows(Permit("full", math.inf)) == 3000, "as large as they may be"


def test_a_small_job_is_not_held_up_although_its_first_passes_had_to_be_made_ready():
    planner, full = BatchPlanner(4096, min_rows=256), Permit("full")
    waiting = [Candidate("small", "ann", 1.0, [64]), Candidate("large", "bob", 1.0, [1024] * 4)]
    sizes = []
    for turn in range(20):
        picked = planner.plan(waiting, full)
        rows = sum(sum(each.costs[: picked.get(each.session, 0)]) for each in waiting)
        sizes.append(rows)
        planner.record_pass(full, rows, 0.001 + rows * 1e-4, is_new=turn < 5)
    assert sizes[0] == 64, "by itself, to see how long it takes"
    assert sizes[-1] <= 64 + 1024
