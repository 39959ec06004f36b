"""What does fine-tuning next to inference cost it, and what does the GPU gain?

Eight tenants, each a process of its own: six decode (batch 2, 512 tokens of
context) and two are silent, decode too, or fine-tune (batch 2 × 512), all
through the executor (the paper's Figures 22 and 23), and before that with
private copies of the model. The cases take turns, window by window; ratios are
medians of the ratio to the six alone within one round of turns. Tokens are
those decoded and those trained on.

    python -m benchmarks.mixed 7b          # about 2 minutes on one H200
    python -m benchmarks.mixed tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.served import Served
from benchmarks.shapes import SHAPES
from benchmarks.tenants import MODES, Workers, window_of

REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    inference: int = 6
    others: int = 2
    batch: int = 2
    length: int = 512

    @property
    def cases(self) -> dict[str, tuple[range, range]]:
        """Who decodes, who fine-tunes."""
        some, all_of_them = range(self.inference), range(self.inference + self.others)
        return {
            f"{len(some)} decode": (some, range(0)),
            f"{len(all_of_them)} decode": (all_of_them, range(0)),
            f"{len(some)} decode, {self.others} fine-tune": (some, range(len(some), len(all_of_them))),
        }


PLANS = {"tiny": Plan(inference=2, others=1, length=16), "1b": Plan(), "7b": Plan()}


def measure(workers: Workers, plan: Plan, case: str, shape: str, seconds: float) -> dict[str, float]:
    """One window of one case."""
    (decoding, training), (begin, end) = plan.cases[case], window_of(seconds)
    workers.tell(decoding, "decode_until", begin, end)
    workers.tell(training, "train_until", begin, end)
    decoded, trained = workers.hear(decoding), workers.hear(training)
    tokens = SHAPES[shape].batch * SHAPES[shape].tokens
    return {
        "latency_s": statistics.mean(statistics.median(steps) for steps in decoded[: plan.inference]),
        "decoded_per_s": sum(plan.batch / statistics.mean(steps) for steps in decoded),
        "trained_per_s": sum(tokens / statistics.mean(steps) for steps in trained),
    }


def compare(workers: Workers, mode: str, address: str, shape: str, seconds: float, console: Console) -> dict[str, Any]:
    """All cases of one mode."""
    plan = PLANS[shape]
    tenants = range(plan.inference + plan.others)
    workers.all(tenants, "load", mode, shape, address)
    workers.all(tenants[plan.inference :], "train", 3)
    workers.all(tenants, "prefill", plan.batch, plan.length)
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in plan.cases}
    for repetition in range(REPETITIONS):
        for case in rotated(list(plan.cases), repetition):
            runs[case].append(measure(workers, plan, case, shape, seconds))
    workers.all(tenants, "drop")
    first = next(iter(runs))
    latency = compared({case: [each["latency_s"] for each in found] for case, found in runs.items()}, first)
    tokens = compared(
        {case: [each["decoded_per_s"] + each["trained_per_s"] for each in found] for case, found in runs.items()}, first
    )
    for case in runs:
        console.print(
            f"{shape} {mode:9s} {case:22s} decode step {1e3 * latency[case]['median']:7.1f} ms ({latency[case]['ratio']:.3f})  "
            f"{tokens[case]['median']:8.0f} tok/s ({tokens[case]['ratio']:.2f})"
        )
    return {"latency_s": latency, "tokens_per_s": tokens, "runs": runs}


def run(shape: str, device: str, seconds: float, modes: Sequence[str], mps: bool, folder: Path = FOLDER) -> None:
    console, results, plan = Console(width=160), {}, PLANS[shape]
    with Workers(plan.inference + plan.others, device) as workers:
        for mode in modes:
            with ExitStack() as stack:
                # private copies need the whole GPU: no executor next to them
                address = "" if mode == "plain" else stack.enter_context(Served(shape, device)).address
                results[mode] = compare(workers, mode, address, shape, seconds, console)
            figures = {"script": "mixed", "shape": shape, "mps": mps, "modes": results}
            save(f"mixed-{shape}{'-mps' if mps else ''}", str(__doc__).splitlines()[0], figures, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(PLANS), shape="7b", seconds=1.5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=("plain", "executor"))
    chosen = parser.parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.seconds, chosen.modes, chosen.mps, chosen.out)


if __name__ == "__main__":
    main()
