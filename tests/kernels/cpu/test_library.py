"""The compiled library runs on torch's threads, and a stale one is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis.kernels.cpu import library


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
def test_kernels_are_compiled_where_there_is_a_compiler():
    """Otherwise all tests of kernels would be skipped silently. Install the package again: `make .venv/.ready`."""
    assert library.is_compiled()


ALONE = """
import pathlib, torch
from symbiosis.kernels.cpu import library
def openmp():
    paths = {line[line.find("/"):] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    return {path for path in paths if pathlib.Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
before = openmp()
assert library.is_compiled()
assert openmp() == before, openmp() - before
"""


@pytest.mark.skipif(not library.is_compiled(), reason="not compiled")
def test_there_is_one_openmp():
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_a_library_older_than_its_sources_is_not_used(tmp_path):
    built, source = tmp_path / "_compiled.so", tmp_path / "numbers.h"
    shutil.copy(Path(library.__file__).parent / "numbers.h", source)
    built.touch()
    os.utime(source, (built.stat().st_mtime - 5,) * 2)
    assert not library._is_stale(built)
    os.utime(source, (built.stat().st_mtime + 5,) * 2)
    assert library._is_stale(built)
