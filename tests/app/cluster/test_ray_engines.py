"""Engines as Ray actors: a real Ray on this machine, real engines with a tiny model, and a real director."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from symbiosis.app.cluster.cluster_host import HostLink
from symbiosis.app.cluster.director_process import DirectorProcess
from symbiosis.app.cluster.ray_engines import RayEngines
from symbiosis.app.cluster.ray_node import RayNode
from symbiosis.app.cluster.secret_file import read_or_create_secret
from symbiosis.errors import EngineLost, Unauthorized, Unreachable
from symbiosis.transport.engine_ipc import ClusterKey
from tests.tiny_chat import make_tiny_chat

_PATIENCE_S = 90.0


@dataclass
class Ray:
    launcher: RayEngines
    link: HostLink
    secret: str
    secret_file: Path

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline
            self.launcher.check()
            time.sleep(0.05)

    def members(self) -> set[str]:
        return set() if self.link.table is None else set(self.link.table["engines"])

    def until_joined(self, number: int) -> None:
        """So many engines, all of them placed and members."""
        self.until(lambda: len(self.launcher.pids) == number and self.launcher.pids.keys() == self.members())


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    folder = tmp_path_factory.mktemp("ray")
    file, environment = folder / "secret", dict(os.environ)
    secret = read_or_create_secret(file)
    model = make_tiny_chat(folder / "model")
    director = DirectorProcess({"host": "127.0.0.1", "secret": secret, "state": str(folder / "state"), "max_engines": 9})
    config = {
        "model": str(model),
        "threads": 1,
        "training": False,
        "host": "127.0.0.1",
        "secret": secret,
        "director": director.address.to_json(),
    }
    launcher = RayEngines(config, secret_file=file, slots=1)
    link = HostLink(director.address, ClusterKey.of(secret))
    try:
        yield Ray(launcher, link, secret, file)
    finally:
        node, pids = launcher.node, [psutil.Process(pid) for pid in launcher.pids.values()]
        assert node is not None
        launcher.close()
        link.close()
        director.close()
        os.environ.clear()
        os.environ.update(environment)
        assert not any(process.is_running() for process in pids)
        assert not node.folder.exists()


def test_an_engine_that_dies_or_leaves_is_replaced(ray):
    launcher = ray.launcher
    launcher.keep(1, ())
    ray.until_joined(1)
    ((name, pid),) = launcher.pids.items()
    assert launcher.nodes[name]["ip"]
    assert ray.secret not in " ".join(psutil.Process(pid).cmdline())
    os.kill(pid, signal.SIGKILL)
    ray.until(lambda: name not in launcher.pids)
    ray.until_joined(1)
    ((second, pid),) = launcher.pids.items()
    assert second != name
    process = psutil.Process(pid)
    launcher.keep(0, [second])
    ray.until(lambda: not ray.members() and not process.is_running())
    assert not launcher.pids


def test_the_secret_is_not_in_the_files_of_ray(ray):
    files = [file for file in ray.launcher.node.folder.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert not any(ray.secret.encode() in file.read_bytes() for file in files)
    assert (ray.launcher.node.folder / "token").stat().st_mode & 0o777 == 0o600


def test_a_node_that_cannot_join_is_one_line(ray):
    with pytest.raises(Unreachable, match=r"no Ray cluster at 127\.0\.0\.1:1 "):
        RayNode(ray.secret, ray.secret_file, host="127.0.0.1", join="127.0.0.1:1", slots=1, gpus=0)


@pytest.mark.slow
def test_engines_of_a_lost_node_are_placed_on_another(ray):
    launcher = ray.launcher
    node = RayNode(ray.secret, ray.secret_file, host="127.0.0.1", join=launcher.address, slots=2, gpus=0)
    launcher.keep(2, ())
    ray.until_joined(2)
    nodes = {facts["node"] for facts in launcher.nodes.values()}
    assert len(nodes) == 2
    processes = [psutil.Process(pid) for pid in launcher.pids.values()]
    node.close()
    gone, _ = psutil.wait_procs(processes, timeout=10)
    assert len(gone) == 1
    second = RayNode(ray.secret, ray.secret_file, host="127.0.0.1", join=launcher.address, slots=2, gpus=0)
    try:
        ray.until(lambda: {facts["node"] for facts in launcher.nodes.values()} - nodes != set())
        ray.until_joined(2)
    finally:
        second.close()


@pytest.mark.slow
def test_a_node_with_another_secret_does_not_join(ray, tmp_path):
    other = read_or_create_secret(tmp_path / "secret")
    with pytest.raises(Unauthorized, match="has another secret"):
        RayNode(other, tmp_path / "secret", host="127.0.0.1", join=ray.launcher.address, slots=1, gpus=0)


@pytest.mark.slow
def test_engines_that_cannot_start_end_in_an_error(ray):
    """The model is not there."""
    launcher = ray.launcher
    config, launcher._config = launcher._config, {**launcher._config, "model": "/nonexistent"}
    try:
        launcher.keep(0, list(launcher.pids))
        ray.until(lambda: not ray.members())
        launcher.keep(1, ())
        with pytest.raises(EngineLost, match="engines failed 3 times at their start: there is no folder /nonexistent"):
            ray.until(lambda: False)
    finally:
        launcher._config = config


def test_without_ray_it_is_one_line(monkeypatch):
    from symbiosis.app.cluster import ray_engines

    monkeypatch.setattr(ray_engines, "find_spec", lambda name: None)
    with pytest.raises(ray_engines.RayMissing, match=r"Ray is not installed: pip install 'symbiosis\[cluster\]'"):
        RayEngines({}, secret_file=Path("none"))
