"""Results as JSON with machine and versions, and a plot next to it."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine and the versions behind a figure."""
    import torch
    import zmq

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        **{name: version(name) for name in ("torch", "transformers", "peft")},
    }


def save(name: str, question: str, figures: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write `name`.json; returns its path, for the plot next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"question": question, "taken": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **figures}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def compared(runs: dict[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Of each case its median, every repetition, and the ratio to the baseline.

    The ratio is the median over the repetitions of the ratio within one
    repetition: a machine whose speed drifts is as fast for one case as for the next.
    """
    return {
        case: {
            "median": statistics.median(values),
            "ratio": statistics.median(
                value / base if base else 1.0 for value, base in zip(values, runs[baseline], strict=True)
            ),
            "runs": values,
        }
        for case, values in runs.items()
    }


def rotated(cases: Sequence[str], repetition: int) -> list[str]:
    """The cases in rotation, so that none is always first."""
    first = repetition % len(cases)
    return [*cases[first:], *cases[:first]]
