"""How much host time does `kernels.launcher` save a launch, against Triton's own launch?

RMS norm and SiLU × up of decode batches, called as the model calls them: by the
launcher, by Triton's own launch, and without any launch. The last is what the
call costs besides, and is subtracted. A round queues some launches and stops
the clock before it waits for the GPU, so that only the host is timed. Modes
alternate; results are compared before anything is timed.

    python -m benchmarks.kernel_launch          # seconds on one GPU
    python -m benchmarks.kernel_launch --tiny   # to try the script; without a GPU by Triton's interpreter
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, compared, rotated, save

LAUNCHES = 200  # of a round: fewer than the driver queues before the host has to wait
MODES = ("triton", "launcher", "none")


@contextmanager
def launching_by(mode: str) -> Iterator[None]:
    """All kernels of `Launcher` are launched in this mode."""
    from symbiosis.kernels.launcher import Launcher

    cached = Launcher.__call__
    modes = {"launcher": cached, "triton": Launcher.launch_uncached, "none": lambda *_args, **_named: None}
    Launcher.__call__ = modes[mode]
    try:
        yield
    finally:
        Launcher.__call__ = cached


def calls(device: str, *, rows: int, width: int) -> dict[str, Callable[[], Any]]:
    """The kernels' public functions, of one model's width and four times that in its MLP."""
    import torch

    from symbiosis.kernels.rms_norm import rms_norm
    from symbiosis.kernels.silu_mul import silu_mul

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight = torch.randn(rows, width, device=device, dtype=dtype), torch.ones(width, device=device, dtype=dtype)
    gate, up = torch.randn(rows, 8 * width, device=device, dtype=dtype).chunk(2, dim=1)
    return {"rms_norm": lambda: rms_norm(x, weight, 1e-5, twice=True), "silu_mul": lambda: silu_mul(gate, up)}


def host_seconds(call: Callable[[], Any], launches: int, device: str) -> float:
    """Host time of one call."""
    import torch

    started = time.perf_counter()
    for _ in range(launches):
        call()
    seconds = (time.perf_counter() - started) / launches
    if device == "cuda":
        torch.cuda.synchronize()
    return seconds


def measure(call: Callable[[], Any], *, launches: int, repetitions: int, device: str) -> dict[str, Any]:
    import torch

    results, runs = {}, {mode: list[float]() for mode in MODES}
    for mode in ("triton", "launcher", "launcher"):
        with launching_by(mode):
            results[mode] = call()
    if not torch.equal(results["triton"], results["launcher"]):
        raise RuntimeError("the launcher's results differ from those of Triton's own launch")
    for repetition in range(repetitions):
        for mode in rotated(MODES, repetition):
            with launching_by(mode):
                runs[mode].append(host_seconds(call, launches, device))
    none = statistics.median(runs.pop("none"))
    launch = {mode: statistics.median(values) - none for mode, values in runs.items()}
    return {
        "call": compared(runs, "triton"),
        "call_without_launch_s": none,
        "launch_s": launch,
        "launch_ratio": launch["launcher"] / launch["triton"] if launch["triton"] > 0 else None,
    }


def run(*, tiny: bool, repetitions: int, folder: Path = FOLDER) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(2, 64)] if tiny else list(itertools.product((1, 8, 32), (2048, 4096)))
    launches = 2 if tiny else LAUNCHES
    results = [
        {
            "kernel": kernel,
            "rows": rows,
            "width": width,
            **measure(call, launches=launches, repetitions=repetitions, device=device),
        }
        for rows, width in shapes
        for kernel, call in calls(device, rows=rows, width=width).items()
    ]
    ratios = [each["launch_ratio"] for each in results if each["launch_ratio"] is not None]
    figures = {
        "script": "kernel_launch",
        "triton": version("triton"),
        "launch_ratio": statistics.median(ratios) if ratios else None,
        "call_ratio": statistics.median(each["call"]["launcher"]["ratio"] for each in results),
        "kernels": results,
    }
    save(f"kernel-launch{'-tiny' if tiny else ''}", str(__doc__).splitlines()[0], figures, folder)
    summary = [
        {
            "kernel": each["kernel"],
            "rows": each["rows"],
            "width": each["width"],
            "launch_us": {mode: round(1e6 * seconds, 2) for mode, seconds in each["launch_s"].items()},
        }
        for each in results
    ]
    print(json.dumps({name: figures[name] for name in ("launch_ratio", "call_ratio")} | {"kernels": summary}, indent=1))
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with torch.inference_mode():
        run(tiny=options.tiny, repetitions=options.repetitions, folder=options.out)


if __name__ == "__main__":
    main()
