"""Costs of steps: their fit, their files, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from symbiosis.cluster.step_cost import PROFILES, StepCost, read_step_cost
from symbiosis.cluster.step_cost_fit import MeasuredStep, fit_steps
from symbiosis.errors import BadProfile


def test_the_fit_finds_the_terms_of_measured_steps():
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(200):
        rows, prefill = int(generator.integers(0, 64)), int(generator.integers(0, 2) * generator.integers(1, 512))
        context, attended = rows * int(generator.integers(10, 4000)), prefill * float(generator.integers(0, 8000))
        seconds = 5e-3 + 1e-5 * rows + 1e-7 * context + 2e-5 * prefill + 1e-9 * attended
        steps.append(MeasuredStep(rows, context, prefill, attended, seconds * float(generator.uniform(0.98, 1.02))))
    found = fit_steps(steps)
    terms = [found.fixed_s, found.row_s, found.context_s, found.prefill_s, found.attention_s]
    assert terms == pytest.approx([5e-3, 1e-5, 1e-7, 2e-5, 1e-9], rel=0.3)
    assert found.median_error < 0.03


def test_no_term_is_negative():
    steps = [MeasuredStep(rows, rows * 100, 0, 0.0, 0.01 - 1e-5 * rows) for rows in range(1, 20)]
    found = fit_steps(steps)
    assert min(found.fixed_s, found.row_s, found.context_s, found.prefill_s, found.attention_s) >= 0


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"step_cost": PROFILES["h200-7b"].to_json(), "steps": []}))
    assert read_step_cost(str(path)) == PROFILES["h200-7b"]
    assert read_step_cost("h200-70b") is PROFILES["h200-70b"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"step_cost": 1}',
        '{"step_cost": {"fixed_s": 1}}',
        '{"step_cost": {"other": 1}}',
        json.dumps({"step_cost": {**PROFILES["h200-7b"].to_json(), "row_s": -1}}),
        json.dumps({"step_cost": {**PROFILES["h200-7b"].to_json(), "row_s": "x"}}),
        json.dumps({"step_cost": {**PROFILES["h200-7b"].to_json(), "kv_tokens": 0}}),
        json.dumps({"step_cost": {**PROFILES["h200-7b"].to_json(), "fixed_s": float("nan")}}),
        json.dumps({"step_cost": {**PROFILES["h200-7b"].to_json(), "fixed_s": 0, "prefill_s": 0}}),
    ],
)
def test_a_broken_profile_is_one_clear_line(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(BadProfile, match="expected") as error:
        read_step_cost(str(path))
    assert "\n" not in str(error.value)


def test_costs_add_up():
    cost = StepCost(fixed_s=1, row_s=2, context_s=3, prefill_s=4, attention_s=5, kv_tokens=10, max_chunk=2)
    assert cost.step_s(rows=1, context=10, prefill=2, before=3) == 1 + 2 + 30 + 8 + 5 * 2 * 4
    assert cost.prompt_s(4, 2) == 4 * 2 + 5 * 2 * 3
    assert cost.first_token_s(4) == cost.prompt_s(4) + 2
    assert cost.completion_s(10, 2) == 2 * (2 + 3 * 11)
