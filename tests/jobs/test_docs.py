"""docs/fine-tuning.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from symbiosis.jobs.plan import METHODS
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.server.adapter_store import StoreLimits
from symbiosis.server.openai.job_schemas import HyperparameterFields

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()


def test_every_hyperparameter_method_and_state_is_documented():
    named = set(re.findall(r"`\"?([a-z_0-9-]+)\"?`", PAGE))
    assert not [name for name in (*HyperparameterFields.model_fields, *METHODS, *JobState) if name not in named]


def test_the_limits_of_jobs_and_adapters_are_documented():
    adapters, jobs = StoreLimits().adapters, JobLimits().tenant_open
    assert f"`--tenant-adapters`, {adapters})" in PAGE
    assert f"with 4 adapters may have {adapters - 4} jobs\nthat have not ended; with a higher limit, {jobs} at most" in PAGE
