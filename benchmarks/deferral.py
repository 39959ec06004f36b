"""What do deferred calls save a fine-tuning tenant that goes through the executor?

One tenant fine-tunes a LoRA (rank 8 on q, k, v, o; batch 2 × 512; AdamW; random weights at the true shapes) with a
private copy of the model, through the executor with deferral, and through the executor without it
(`model.symbiosis.defer_training = False`). The three take turns, window by window; ratios are medians of the ratio to
plain within one round of turns. With `--round-trip-ms` the calls go over TCP through a relay that adds this time.

    python -m benchmarks.deferral 7b                                          # about 1 minute on one H200
    python -m benchmarks.deferral 7b --mps                                    # the same under CUDA MPS
    python -m benchmarks.deferral 1b --round-trip-ms 1 --batch 1 --tokens 32  # a tenant elsewhere, few rows a step
    python -m benchmarks.deferral tiny --cpu                                  # seconds, for the tests
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.relay import Relay
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.served import Served
from benchmarks.shapes import SHAPES
from benchmarks.tenants import Workers

CASES = {"plain": 0, "deferred": 1, "call by call": 2}
"""The process of each."""
WARM_UP_STEPS, ROUNDS = 4, 15


@contextlib.contextmanager
def reachable(address: str, round_trip_ms: float) -> Iterator[str]:
    """The address at which tenants reach the executor."""
    if not round_trip_ms:
        yield address
        return
    with Relay(address.removeprefix("tcp://"), round_trip_ms / 1e3) as relay:
        yield f"tcp://{relay.address}"


def run(
    shape: str, device: str, seconds: float, batch: int, tokens: int, round_trip_ms: float, mps: bool, folder: Path = FOLDER
) -> None:
    console = Console(width=160, log_path=False)
    steps: dict[str, list[float]] = {case: [] for case in CASES}
    link = "tcp://127.0.0.1:0" if round_trip_ms else "shm://"
    with (
        Workers(len(CASES), device) as workers,
        Served(shape, device, link=link) as served,
        reachable(served.address, round_trip_ms) as address,
    ):
        for case, number in CASES.items():
            workers.all([number], "load", "plain" if case == "plain" else "executor", shape, address)
            workers.all([number], "defer", case != "call by call")
            workers.all([number], "resize", tokens, batch)
            workers.all([number], "train", WARM_UP_STEPS)
        for repetition in range(ROUNDS):
            for case in rotated(list(CASES), repetition):
                found = workers.window([CASES[case]], "train_until", seconds)
                steps[case].append(statistics.median(found[0]))
    figures = compared(steps, "plain")
    for case, each in figures.items():
        console.print(f"{shape} {batch} × {tokens} {case:14s}{1e3 * each['median']:9.2f} ms a step ({each['ratio']:.3f})")
    size = "" if (batch, tokens) == (SHAPES[shape].batch, SHAPES[shape].tokens) else f"-{batch}x{tokens}"
    name = f"deferral-{shape}{size}{'-mps' if mps else ''}{'-remote' if round_trip_ms else ''}"
    setting = {"shape": shape, "batch": batch, "tokens": tokens, "mps": mps, "round_trip_ms": round_trip_ms, "link": link}
    save(name, str(__doc__).splitlines()[0], {"script": "deferral", **setting, "step_s": figures}, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=["tiny", "1b", "7b", "13b"], shape="7b", seconds=0.5)
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="added between tenant and executor, over TCP")
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--tokens", type=int, help="tokens of each sequence")
    chosen = parser.parse_args(arguments)
    batch, tokens = chosen.batch or SHAPES[chosen.shape].batch, chosen.tokens or SHAPES[chosen.shape].tokens
    with mps_daemon(chosen.mps):
        run(
            chosen.shape, chosen.device, chosen.seconds, batch, tokens, chosen.round_trip_ms, chosen.mps, chosen.out
        )  # fmt: skip


if __name__ == "__main__":
    main()
