"""What the README and the examples show is run here, on the real default model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import symbiosis

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def address(real_cache):
    with symbiosis.Executor() as executor:
        yield executor.listen()


def run(code_or_file, *arguments, cwd):
    command = [sys.executable, "-c", code_or_file] if "\n" in code_or_file else [sys.executable, code_or_file, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.real
def test_the_readmes_tenant_gets_its_answer_and_its_adapter(address, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    output = run(blocks[0].replace("tcp://127.0.0.1:7777", address), cwd=tmp_path)
    assert "Paris" in output
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.real
def test_two_tenants_example(real_cache, tmp_path):
    output = run(str(ROOT / "examples" / "two_tenants.py"), cwd=tmp_path)
    losses = {name: [float(x) for x in re.findall(rf"{name}: step \d+, loss ([\d.]+)", output)] for name in ("alice", "bob")}
    assert all(each[-1] < each[0] for each in losses.values())


@pytest.mark.real
def test_trl_example(address, tmp_path):
    assert "loss" in run(str(ROOT / "examples" / "sft_with_trl.py"), address, cwd=tmp_path)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_are_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60
