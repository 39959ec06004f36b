"""Which process runs a cluster on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from symbiosis.app.cluster.state_folder import StateFolder, running_cluster, stop_cluster
from symbiosis.errors import SymbiosisError

_HOLD = """
import sys, time
from pathlib import Path
from symbiosis.app.cluster.state_folder import StateFolder
with StateFolder(Path(sys.argv[1])) as folder:
    folder.record(url="http://127.0.0.1:1")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_running_cluster_is_found_and_ended(tmp_path):
    assert running_cluster(tmp_path / "none") is None
    with subprocess.Popen([sys.executable, "-c", _HOLD, tmp_path], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert running_cluster(tmp_path) == {"pid": holder.pid, "url": "http://127.0.0.1:1"}
        with pytest.raises(SymbiosisError, match="in use by another server"):
            StateFolder(tmp_path)
        assert stop_cluster(tmp_path, 10) == holder.pid
    assert running_cluster(tmp_path) is None


def test_the_record_of_a_crashed_cluster_is_no_cluster(tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps({"pid": os.getpid()}))
    assert running_cluster(tmp_path) is None
    with pytest.raises(SymbiosisError, match="no cluster runs in"):
        stop_cluster(tmp_path, 1)
    with StateFolder(tmp_path):
        assert running_cluster(tmp_path) == {"pid": os.getpid()}
    assert not (tmp_path / "cluster.json").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "state", type(tmp_path)("/proc/none"), type(tmp_path)("/proc/self")):
        with pytest.raises(SymbiosisError, match="cannot store a cluster: "):
            StateFolder(path)
