"""Does a small request wait for a large one?

Two tenants send one prompt after the other through the executor, of 1 token or
of 512, in pairs (the paper's Table 4). Policies of the one executor and pairs take
turns, window by window. Figures are each tenant's median time of a prompt;
and the same of one plain tenant alone.

    python -m benchmarks.small_and_large 7b          # about 1.5 minutes on one H200
    python -m benchmarks.small_and_large tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.policies import POLICIES
from benchmarks.results import FOLDER, rotated, save
from benchmarks.served import Served
from benchmarks.tenants import Workers, window_of

SMALL, LARGE = 1, 512
PAIRS: dict[str, tuple[int, ...]] = {
    "small & small": (SMALL, SMALL),
    "small & large": (SMALL, LARGE),
    "large & large": (LARGE, LARGE),
}
ALONE: dict[str, tuple[int, ...]] = {"small": (SMALL,), "large": (LARGE,)}
REPETITIONS = 5


def prompts(workers: Workers, first: int, sizes: Sequence[int], seconds: float) -> list[float]:
    """Median seconds of a prompt for each of as many tenants as there are sizes, at the same time."""
    begin, end = window_of(seconds)
    team = range(first, first + len(sizes))
    for number, size in zip(team, sizes, strict=True):
        workers.tell([number], "prompt_until", size, begin, end)
    return [statistics.median(steps) for steps in workers.hear(team)]


def run(shape: str, device: str, seconds: float, mps: bool, folder: Path = FOLDER) -> None:
    console = Console(width=160)
    runs: dict[str, dict[str, list[list[float]]]] = {policy: {pair: [] for pair in PAIRS} for policy in POLICIES}
    runs["plain alone"] = {size: [] for size in ALONE}
    with Served(shape, device) as served, Workers(3, device) as workers:
        workers.all([2], "load", "plain", shape)
        workers.all([0, 1], "load", "executor", shape, served.address)
        prompts(workers, 0, PAIRS["small & large"], 0.5)
        for repetition in range(REPETITIONS):
            for policy in rotated([*POLICIES, "plain alone"], repetition):
                first, cases = (2, ALONE) if policy == "plain alone" else (0, PAIRS)
                if policy in POLICIES:
                    served.ask(f"policy {policy}")
                for case in rotated(list(cases), repetition):
                    runs[policy][case].append(prompts(workers, first, cases[case], seconds))
            middle = {
                policy: {
                    case: [statistics.median(each) for each in zip(*found, strict=True)] for case, found in of_policy.items()
                }
                for policy, of_policy in runs.items()
            }
            figures = {"script": "small_and_large", "shape": shape, "mps": mps, "median_s": middle, "runs": runs}
            save(f"small-and-large-{shape}{'-mps' if mps else ''}", str(__doc__).splitlines()[0], figures, folder)
    for policy, found in middle.items():
        shown = [f"{case} {' / '.join(f'{1e3 * each:.1f}' for each in times)} ms" for case, times in found.items()]
        console.print(f"{shape} {policy:14s} {', '.join(shown)}")


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(str(__doc__), shapes=["tiny", "1b", "7b"], shape="7b", seconds=0.6).parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.seconds, chosen.mps, chosen.out)


if __name__ == "__main__":
    main()
