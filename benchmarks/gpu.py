"""What the GPU benchmarks have in common: their options, memory as the driver counts it, CUDA MPS."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results import FOLDER


def options(doc: str, *, shapes: Sequence[str], shape: str, seconds: float | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=shapes, default=shape)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"of each window of measuring (default {seconds:g})")
    parser.add_argument("--mps", action="store_true", help="under CUDA MPS")
    parser.add_argument(
        "--cpu", dest="device", action="store_const", const="cpu", default="cuda", help="to try the script, not to measure"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON")
    return parser


def used_bytes(device: str) -> int:
    """All that is taken of the GPU's memory, by whomever."""
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def total_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.mem_get_info()[1]


def process_bytes(pid: int, device: str) -> int | None:
    """A process's GPU memory as the driver counts it, its context included; None where the driver does not tell."""
    if device == "cpu":
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    for line in subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines():
        found, _, mib = line.partition(",")
        if found.strip() == str(pid) and mib.strip().isdigit():
            return int(mib) << 20
    return None


@contextlib.contextmanager
def mps_daemon(wanted: bool) -> Iterator[None]:
    """CUDA MPS for the processes started from here."""
    if not wanted:
        yield
        return
    folder = tempfile.mkdtemp()  # the daemon may outlive this process
    os.environ.update(CUDA_MPS_PIPE_DIRECTORY=f"{folder}/pipe", CUDA_MPS_LOG_DIRECTORY=f"{folder}/log")
    for name in ("pipe", "log"):
        Path(folder, name).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        # It exits with its last client, which can be this process: do not wait for it.
        asked = subprocess.Popen(["nvidia-cuda-mps-control"], stdin=subprocess.PIPE, start_new_session=True)
        assert asked.stdin is not None
        asked.stdin.write(b"quit\n")
        asked.stdin.close()
