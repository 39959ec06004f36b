"""A zoo survives SIGKILL at any moment: no model is lost, and none names a block that is not there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from symbiosis.zoo.zoo import Zoo
from tests.zoo.conftest import fine_tuned

_WRITER = """
import sys
from pathlib import Path
from symbiosis.zoo.zoo import Zoo

zoo, folders = Zoo(Path(sys.argv[1])), [Path(each) for each in sys.argv[2:]]
print("ready", flush=True)
for turn in range(10**9):
    for folder in folders:
        if folder.name in zoo.names():
            zoo.remove(folder.name)
        zoo.add(folder.name, folder)
    zoo.remove(folders[turn % len(folders)].name)
    zoo.gc()
"""


def kill_writers(zoo, tmp_path, folders, tries: int) -> None:
    numbers = random.Random(0)
    for _ in range(tries):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / "zoo"), *map(str, folders)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(numbers.uniform(0.0, 0.6))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert zoo.verify() == []
        assert "base" in zoo.names()
        before = zoo.manifest("base")
        Zoo(tmp_path / "zoo").gc()
        assert zoo.verify() == []
        assert zoo.manifest("base") == before
        assert not list((tmp_path / "zoo" / "scratch").iterdir())


@pytest.fixture
def folders(zoo, save, base):
    zoo.add("base", save(base, "base"))
    return [save(fine_tuned(base, range(first, 4), seed=first), f"tuned-{first}") for first in range(3)]


def test_a_few_kills(zoo, tmp_path, folders):
    kill_writers(zoo, tmp_path, folders, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(zoo, tmp_path, folders):
    kill_writers(zoo, tmp_path, folders, 200)
