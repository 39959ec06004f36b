"""What does sharing cost a fine-tuning tenant on the GPU, and what does it save?

Tenants fine-tune a LoRA (rank 8 on q, k, v, o; batch 2 × 512; AdamW; bf16;
random weights at the true shapes), each a process of its own: with a private
copy of the model (plain transformers + PEFT), in direct mode, and through the
executor; several at a time with private copies and in mode "auto". One
tenant's `generate()` is timed the same ways.

All of a comparison's processes are there at once and take turns, window by
window; ratios are medians of the ratio to plain within one round of turns.
Memory is what the GPU has less after the tenants have trained than before they
came, beyond empty contexts; the executor's, its context included, is counted to
every shared mode.

    python -m benchmarks.sharing 1b          # Figures 11 and 12, about 2 minutes on one H200
    python -m benchmarks.sharing 7b          # some minutes
    python -m benchmarks.sharing 1b --mps    # the same under CUDA MPS
    python -m benchmarks.sharing tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options, used_bytes
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.served import Served
from benchmarks.shapes import SHAPES
from benchmarks.tenants import MODES, Workers

TENANTS = {"tiny": (1, 2), "1b": (1, 2, 4, 8), "7b": (1, 4), "13b": (1, 2)}
ALONE, TOGETHER = ("plain", "direct", "executor"), ("plain", "auto")
WARM_UP_STEPS = 4


def teams_of(modes: Sequence[str], count: int, size: int) -> dict[str, range]:
    """Who of `size` processes works for which mode: plain from the front, the others from the back.

    So a process that has private copies never has anything else.
    """
    teams, end = {"plain": range(count)}, size
    for mode in modes:
        if mode != "plain":
            teams[mode] = range(end - count, end)
            end -= count
    return teams


def measure(
    workers: Workers,
    teams: dict[str, range],
    shape: str,
    device: str,
    seconds: float,
    served: Served,
    shared: int,
    console: Console,
) -> dict[str, Any]:
    """As many tenants in each of the modes; `shared` is the executor's memory without tenants."""
    modes, count = list(teams), len(teams["plain"])
    tokens = SHAPES[shape].batch * SHAPES[shape].tokens
    memory: dict[str, list[float]] = {}
    for mode, team in teams.items():
        before = used_bytes(device)
        workers.all(team, "load", mode, shape, served.address)
        workers.all(team, "train", WARM_UP_STEPS)
        memory[mode] = [used_bytes(device) - before + (0 if mode == "plain" else shared)]
        console.log(f"{mode} × {count} are there")
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    steps: dict[str, list[float]] = {mode: [] for mode in modes}
    # Several tenants are bound by the GPU, one by its host, whose speed varies from second to second: many short windows.
    rounds, length = (21, seconds / 3) if count == 1 else (5, seconds)
    for repetition in range(rounds):
        for mode in rotated(modes, repetition):
            found = workers.window(teams[mode], "train_until", length)
            rates[mode].append(sum(tokens / statistics.mean(each) for each in found))
            steps[mode].append(statistics.mean(statistics.median(each) for each in found))
    figures = {"tokens_per_s": rates, "step_s": steps, "memory_bytes": memory}
    console.log("fine-tuned:", {mode: f"{statistics.median(each) * 1e3:.1f} ms" for mode, each in steps.items()})
    if count == 1:
        for mode in modes * 2:
            workers.all(teams[mode], "generate")
        pace: dict[str, list[float]] = {mode: [] for mode in modes}
        for repetition in range(21):
            for mode in rotated(modes, repetition):
                pace[mode] += workers.all(teams[mode], "generate")
        figures["seconds_per_token"] = pace
        console.log("generated")
    for team in teams.values():
        workers.all(team, "drop")
    return {name: compared(runs, "plain") for name, runs in figures.items()}


def line(figures: dict[str, Any], mode: str) -> str:
    units = {
        "tokens_per_s": (1, "tok/s"),
        "step_s": (1e-3, "ms"),
        "memory_bytes": (2**30, "GiB"),
        "seconds_per_token": (1e-3, "ms/token"),
    }
    shown = [(unit, figures[name][mode], scale) for name, (scale, unit) in units.items() if name in figures]
    return "  ".join(f"{each['median'] / scale:9.1f} {unit} ({each['ratio']:.3f})" for unit, each, scale in shown)


def run(
    shape: str, device: str, seconds: float, counts: Sequence[int], modes: Sequence[str], mps: bool, folder: Path = FOLDER
) -> None:
    console, results = Console(width=160, log_path=False), {}
    chosen = {count: tuple(modes) or (ALONE if count == 1 else TOGETHER) for count in counts}
    size = max(count * len(chosen[count]) for count in counts)
    with Workers(size, device) as workers:
        workers.all(range(size), "context")
        empty = used_bytes(device)
        with Served(shape, device) as served:
            console.log(f"{shape}: the executor is at {served.address}")
            shared = used_bytes(device) - empty
            for count in counts:
                teams = teams_of(chosen[count], count, size)
                results[count] = measure(workers, teams, shape, device, seconds, served, shared, console)
                for mode in teams:
                    console.print(f"{shape} {mode:9s}× {count} {line(results[count], mode)}")
                figures = {"script": "sharing", "shape": shape, "mps": mps, "executor_bytes": shared, "tenants": results}
                save(f"sharing-{shape}{'-mps' if mps else ''}", str(__doc__).splitlines()[0], figures, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(TENANTS), shape="1b", seconds=1.0)
    parser.add_argument("--tenants", type=int, nargs="+", help="how many at a time")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=(), help="in addition to plain, for any number of tenants")
    chosen = parser.parse_args(arguments)
    counts = chosen.tenants or TENANTS[chosen.shape]
    modes = chosen.modes and ["plain", *(mode for mode in chosen.modes if mode != "plain")]
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.seconds, counts, modes, chosen.mps, chosen.out)


if __name__ == "__main__":
    main()
