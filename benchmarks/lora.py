"""What do the paper's four LoRA settings cost a tenant, alone on the GPU?

Its Table 2: rank 8 or 64, on q or on q, k, v, o; one fine-tuning tenant
(batch 2 × 512, Gemma2 2 × 64 as in the paper) with a private copy of the model,
in direct mode, and through the executor. The three processes are there at once and take
turns, window by window; ratios are medians of the ratio to plain within one
round of turns.

    python -m benchmarks.lora 13b                     # the paper's model, about 1.5 minutes on one H200
    python -m benchmarks.lora 1b --seconds 0.4        # about 1 minute
    python -m benchmarks.lora gemma27b --seconds 0.5  # about 2 minutes, half of them the executor's start
    python -m benchmarks.lora tiny --cpu              # seconds, for the tests
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.served import Served
from benchmarks.shapes import SHAPES
from benchmarks.tenants import Workers

MODES = ("plain", "direct", "executor")
REPETITIONS = 5


def run(shape: str, device: str, seconds: float, mps: bool, folder: Path = FOLDER) -> None:
    console, results = Console(width=160), dict[int, dict[str, Any]]()
    teams = {mode: range(number, number + 1) for number, mode in enumerate(MODES)}
    with Served(shape, device) as served, Workers(len(MODES), device) as workers:
        for setting, (rank, layers) in SHAPES[shape].lora.items():
            for mode, team in teams.items():
                if results:
                    workers.all(team, "adapt", setting)
                else:
                    workers.all(team, "load", mode, shape, "" if mode == "plain" else served.address, setting)
                workers.all(team, "train", 3)
            runs: dict[str, list[float]] = {mode: [] for mode in MODES}
            for repetition in range(REPETITIONS):
                for mode in rotated(MODES, repetition):
                    (steps,) = workers.window(teams[mode], "train_until", seconds)
                    runs[mode].append(statistics.median(steps))
            results[setting] = {"rank": rank, "layers": layers, "step_s": compared(runs, "plain")}
            shown = [
                f"{mode} {1e3 * each['median']:7.1f} ms ({each['ratio']:.3f})"
                for mode, each in results[setting]["step_s"].items()
            ]
            console.print(f"{shape} LoRA {setting}: rank {rank:2d}, {len(layers)} layers: {', '.join(shown)}")
            figures = {"script": "lora", "shape": shape, "mps": mps, "settings": results}
            save(f"lora-{shape}{'-mps' if mps else ''}", str(__doc__).splitlines()[0], figures, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(str(__doc__), shapes=list(SHAPES), shape="13b", seconds=0.8).parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.seconds, chosen.mps, chosen.out)


if __name__ == "__main__":
    main()
