"""Plans for a GPU, against memory that `benchmarks.gpu_memory` and `benchmarks.plan_memory` measured on an H200."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from benchmarks.plan_memory import GPU_CASES, MODELS
from benchmarks.results import FOLDER
from benchmarks.shapes import SHAPES
from symbiosis.app.planning.processes import ProcessEstimator
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.tenants import parse_tenants


@pytest.fixture(scope="module")
def measured():
    return json.loads((FOLDER / "gpu-memory-7b.json").read_text())


@pytest.fixture(scope="module")
def estimator():
    return ProcessEstimator(ModelSize.of(transformers.LlamaConfig(**SHAPES["7b"].config), torch.bfloat16), "", 0)


def test_an_executor_alone(measured, estimator):
    assert estimator.executor("cuda:0").total == pytest.approx(measured["executor_alone_bytes"], rel=0.1)


@pytest.mark.parametrize("tokens", [512, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (1024, 2048, 4096))])
@pytest.mark.slow
def test_a_training_tenant_that_maps_the_client_part(measured, estimator, tokens):
    """Without its context: the measure is what torch holds."""
    held = next(run["tenants_bytes"][0] for run in measured["runs"] if (run["tenants"], run["tokens"]) == (1, tokens))
    (load,) = parse_tenants([f"train,r=8,targets=q_proj+k_proj+v_proj+o_proj,batch=2x{tokens}"])
    parts = estimator.tenant(load, "cuda:0", maps=True).parts
    assert sum(parts.values()) - parts["CUDA context"] == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("case", [case for case in GPU_CASES if case.run in ("requests", "job")], ids=lambda case: case.name)
def test_a_server(case):
    runs = json.loads((FOLDER / "plan-memory-gpu.json").read_text())["runs"]
    measured = next(run["measured_bytes"] for run in runs if run["case"] == case.name)
    family, settings, dtype = MODELS[case.model]
    size = ModelSize.of(getattr(transformers, f"{family}Config")(**settings), getattr(torch, dtype))
    loads = parse_tenants(case.tenants)
    roles = {"serve": loads, "jobs": ()} if case.run == "requests" else {"serve": (), "jobs": loads}
    assert ProcessEstimator(size, "", 0).engine("cuda:0", **roles).total == pytest.approx(measured, rel=0.1)
