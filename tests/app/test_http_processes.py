"""Starting HTTP processes."""

from __future__ import annotations

import socket
import subprocess

import pytest

from symbiosis.app.http_processes import HttpProcesses
from symbiosis.errors import SymbiosisError


def test_a_process_that_cannot_be_started_leaves_none_behind(tmp_path, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_two(*args, **kwargs):
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_two)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(OSError, match="no more processes"):
        HttpProcesses(listening, 3, tmp_path)
    assert [process.poll() is not None for process in started] == [True, True]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, -1, 65])
def test_the_number_of_workers_is_bounded(workers, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(SymbiosisError, match="expected 1 to 64"):
        HttpProcesses(listening, workers, tmp_path)
