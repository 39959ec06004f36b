"""The page about fine-tuning says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from symbiosis.jobs.plan import METHODS
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.server.adapter_store import StoreLimits
from symbiosis.server.openai.job_schemas import HyperparameterFields

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "fine-tuning.md").read_text()


def test_every_hyperparameter_method_and_state_is_named():
    named = set(re.findall(r"`\"?([a-z_0-9-]+)\"?`", PAGE))
    assert not [name for name in (*HyperparameterFields.model_fields, *METHODS, *JobState) if name not in named]


def test_how_many_jobs_a_tenant_may_have_is_said_with_what_bounds_it_first():
    adapters, jobs = StoreLimits().adapters, JobLimits().tenant_open
    assert f"`--tenant-adapters`, {adapters})" in PAGE
    assert f"with 4 adapters may have {adapters - 4} jobs\nthat have not ended; with a higher limit, {jobs} at most" in PAGE


def test_every_module_is_named():
    files = (DOCS.parent / "src" / "symbiosis" / "jobs").glob("[a-z]*.py")
    design = (DOCS / "design.md").read_text()
    assert not [file.stem for file in files if f"`{file.stem}`" not in design]
