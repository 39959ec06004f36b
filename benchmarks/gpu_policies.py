"""Which batching policy serves decoding tenants of very different batch sizes best, on a GPU?

Eight tenants, each a process of its own, decode through the executor with 2
to 256 sequences and the paper's LoRA settings 1 and 4 in turn (its Table 5).
The executor is one and the same; its policies take turns, window by window. A
decode step always has the same length of cache. Latency is the mean of the
tenants' median steps; ratios are medians of the ratio to "opportunistic" within
one round of turns. There is no plain case: eight private copies with such
caches do not fit (`mixed` has smaller ones).

With `--remote 8` the tenants are not on the executor's GPU, as in the paper:
they compute on the host's CPUs, with a shorter cache, and the executor has the
head too. With `--remote 2` only the first two do, the ones with the smallest
batches: tenants of very different speed. Otherwise all share the one GPU.

    python -m benchmarks.gpu_policies 7b          # about 1.5 minutes on one H200
    python -m benchmarks.gpu_policies 7b --length 256   # with caches of so many tokens
    python -m benchmarks.gpu_policies 7b --remote 8 --seconds 4
    python -m benchmarks.gpu_policies tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options
from benchmarks.policies import POLICIES, figures_of, medians, show
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.served import Served
from benchmarks.tenants import Workers, window_of

_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
BATCHES = {"tiny": (1, 4, 16), "1b": _SIZES, "7b": _SIZES, "13b": _SIZES, "gemma27b": _SIZES}
LENGTH, LENGTH_REMOTE = 64, 16
REPETITIONS = 5


def measure(workers: Workers, policy: str, served: Served, batches: Sequence[int], seconds: float) -> dict[str, Any]:
    """One window of one policy."""
    served.ask(f"policy {policy}")
    begin, end = window_of(seconds)
    team = range(len(batches))
    workers.tell(team, "decode_until", begin, end)
    time.sleep(max(0.0, begin - time.monotonic()))
    before = served.ask("stats")
    time.sleep(max(0.0, end - time.monotonic()))
    after = served.ask("stats")
    return figures_of(batches, workers.hear(team), before, after)


def connect(workers: Workers, shape: str, served: Served, batches: Sequence[int], length: int, remote: int) -> None:
    """Every tenant, with its cache filled."""
    team = range(len(batches))
    for number in team:
        workers.tell([number], "load", "executor", shape, served.address, 4 if number % 2 else 1)
    workers.hear(team)
    for number, batch in enumerate(batches):
        workers.tell([number], *(("fill", batch, LENGTH_REMOTE) if number < remote else ("prefill", batch, length)))
    workers.hear(team)


def run(shape: str, device: str, seconds: float, mps: bool, remote: int, length: int, folder: Path = FOLDER) -> None:
    console, batches = Console(width=160), BATCHES[shape]
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    remote = min(remote, len(batches))
    all_remote = remote == len(batches)
    kind = "cpu" if all_remote else device
    with Served(shape, device, head=remote > 0) as served, Workers(len(batches), kind, remote) as workers:
        connect(workers, shape, served, batches, length, remote)
        for policy in POLICIES:  # warm-up: repeated batches become CUDA graphs
            measure(workers, policy, served, batches, seconds * (5 if policy == "opportunistic" and not all_remote else 1))
        for repetition in range(REPETITIONS):
            for policy in rotated(POLICIES, repetition):
                found = measure(workers, policy, served, batches, seconds)
                runs[policy].append(found)
                console.print(
                    f"{repetition + 1}/{REPETITIONS} {policy:14s} {found['tokens_per_s']:7.0f} tok/s  "
                    f"{found['latency_ms']:7.1f} ms  batch {found['mean_batch']:.2f}  busy {found['busy_share']:.0%}  "
                    f"{found['latency_ms_by_tenant']}"
                )
            ratios = {
                key: compared({policy: [run[key] for run in each] for policy, each in runs.items()}, "opportunistic")
                for key in ("tokens_per_s", "latency_ms")
            }
            figures = {
                "script": "gpu_policies",
                "shape": shape,
                "mps": mps,
                "tenants_on": f"the host's CPUs: {remote}, the same GPU: {len(batches) - remote}",
                "plan": {
                    "tenants": list(batches),
                    "lengths": [LENGTH_REMOTE if number < remote else length for number in range(len(batches))],
                    "seconds": seconds,
                    "repetitions": repetition + 1,
                },
                "medians": {policy: medians(each) for policy, each in runs.items()},
                "ratios": {key: {policy: each["ratio"] for policy, each in found.items()} for key, found in ratios.items()},
                "runs": runs,
            }
            parts = [
                "gpu-policies",
                shape,
                "remote" * all_remote or f"remote{remote}" * (remote > 0),
                "mps" * mps,
                "" if length == LENGTH else str(length),
            ]
            save("-".join(part for part in parts if part), str(__doc__).splitlines()[0], figures, folder)
    show(console, figures)
    console.print("ratios to opportunistic:", figures["ratios"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(BATCHES), shape="7b", seconds=3.0)
    parser.add_argument("--remote", type=int, default=0, metavar="N", help="so many tenants are on the host's CPUs")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens in the cache of each sequence")
    chosen = parser.parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.seconds, chosen.mps, chosen.remote, chosen.length, chosen.out)


if __name__ == "__main__":
    main()
