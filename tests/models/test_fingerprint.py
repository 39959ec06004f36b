"""Equal models have equal fingerprints in every process; other weights have another one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from symbiosis.models.fingerprint import fingerprint_model
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import load
from tests.conftest import tiny_config

CODE = """
import sys, torch
from symbiosis.models.fingerprint import fingerprint_model
from symbiosis.models.loading import load
print(fingerprint_model(load(sys.argv[1], device=torch.device("cpu"), dtype=None).model))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with an embedding that is sampled: 2000 rows of 256 bytes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(tiny_config(vocab_size=2000, hidden_size=64)).save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype | None = None):
    return load(str(folder), device=torch.device("cpu"), dtype=dtype).model


def test_another_process_and_another_folder_have_the_same(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "copied")
    output = subprocess.run([sys.executable, "-c", CODE, str(copied)], capture_output=True, text=True, check=True).stdout
    assert output.strip() == fingerprint_model(loaded(folder))


def test_fused_projections_do_not_change_it(folder):
    model = loaded(folder)
    before = fingerprint_model(model)
    fuse_projections(model)
    assert fingerprint_model(model) == before


def test_a_tensor_at_an_odd_place_in_memory_does_not_change_it(folder):
    model = loaded(folder)
    before = fingerprint_model(model)
    weight = model.model.embed_tokens.weight
    moved = torch.empty(weight.numel() + 1)[1:].view_as(weight)
    moved.copy_(weight.detach())
    model.model.embed_tokens.weight = torch.nn.Parameter(moved)
    assert fingerprint_model(model) == before


@pytest.mark.parametrize("place", [0, 16 * 64, 2000 * 64 - 1, 31_337], ids=["first", "between pieces", "last", "anywhere"])
def test_one_changed_weight_changes_it(folder, place):
    model = loaded(folder)
    before = fingerprint_model(model)
    with torch.no_grad():
        weight = model.model.embed_tokens.weight.view(-1)
        weight[place] += 1e-3
    assert fingerprint_model(model) != before


def test_another_dtype_config_or_small_tensor_changes_it(folder):
    found = {fingerprint_model(loaded(folder)), fingerprint_model(loaded(folder, torch.bfloat16))}
    model = loaded(folder)
    model.config.rms_norm_eps *= 2
    found.add(fingerprint_model(model))
    model = loaded(folder)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    found.add(fingerprint_model(model))
    assert len(found) == 4
