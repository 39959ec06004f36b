"""Does the executor's GPU memory grow with the tenants or with their tokens?

Tenants fine-tune (LoRA rank 8 on q, k, v, o; batch 2) through the executor: one
with sequences of 512 to 4096 tokens, and 1 to 8 with 512; before that the same
with private copies, as far as they fit. The paper's Figures 9 and 10.

The executor's memory is read while the tenants are connected, after their
steps, in two ways. `executor_bytes` is what the GPU has less than with empty
contexts, minus what torch holds in the tenants: the executor's weights,
channels, reserve and context. `executor_bytes_by_driver` is what the driver
counts for its process, null where it does not tell. Before each case every
process gives back what its torch holds in reserve, so each case shows its own
peak.

    python -m benchmarks.gpu_memory 7b          # about 1.5 minutes on one H200
    python -m benchmarks.gpu_memory tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options, process_bytes, total_bytes, used_bytes
from benchmarks.results import FOLDER, save
from benchmarks.served import Served
from benchmarks.tenants import Workers

FULL = ((1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 512), (4, 512), (8, 512), (1, 512))
"""(tenants, tokens of each sequence); the first again at the end"""
CASES = {"tiny": ((1, 16), (2, 16)), "1b": FULL, "7b": FULL, "13b": FULL}
STEPS = 3


def train(workers: Workers, count: int, loaded: set[int], mode: str, shape: str, address: str, tokens: int) -> list[int]:
    """The first `count` tenants take their steps; bytes that torch holds in each."""
    missing = [number for number in range(count) if number not in loaded]
    workers.all(missing, "load", mode, shape, address)
    loaded.update(missing)
    workers.all(range(count), "resize", tokens)
    workers.all(sorted(loaded), "trim")
    workers.all(range(count), "train", STEPS)
    return workers.all(sorted(loaded), "reserved")


def plain(
    workers: Workers, shape: str, device: str, cases: Sequence[tuple[int, int]], console: Console
) -> list[dict[str, Any]]:
    empty, loaded, found, one = used_bytes(device), set[int](), [], 0
    for count, tokens in cases[:-1]:
        if count * one > total_bytes(device) - empty:
            found.append({"tenants": count, "tokens": tokens, "in_all_bytes": None, "would_need_bytes": count * one})
            console.print(f"{shape} plain    {count} × {tokens}: does not fit, {count * one / 2**30:.1f} GiB")
            continue
        train(workers, count, loaded, "plain", shape, "", tokens)
        in_all = used_bytes(device) - empty
        if count == 1 and not one:
            one = in_all
        found.append({"tenants": count, "tokens": tokens, "in_all_bytes": in_all})
        console.print(f"{shape} plain    {count} × {tokens}: {in_all / 2**30:.2f} GiB in all")
    workers.all(sorted(loaded), "drop")
    return found


def run(shape: str, device: str, mps: bool, folder: Path = FOLDER) -> None:
    console, cases = Console(width=160), CASES[shape]
    figures: dict[str, Any] = {"script": "gpu_memory", "shape": shape, "mps": mps, "plain": [], "runs": []}
    name, question = f"gpu-memory-{shape}{'-mps' if mps else ''}", str(__doc__).splitlines()[0]
    most = max(count for count, _ in cases)
    with Workers(most, device) as workers:
        workers.all(range(most), "context")
        figures["plain"] = plain(workers, shape, device, cases, console)
        save(name, question, figures, folder)
        empty, loaded = used_bytes(device), set[int]()  # after plain's run every process has loaded its kernels
        with Served(shape, device) as served:
            assert served.address
            figures["executor_alone_bytes"] = used_bytes(device) - empty
            for count, tokens in cases:
                if device != "cpu":
                    served.ask("trim")
                gone = [number for number in loaded if number >= count]
                workers.all(gone, "drop")
                loaded.difference_update(gone)
                held = train(workers, count, loaded, "executor", shape, served.address, tokens)
                in_all = used_bytes(device) - empty
                figures["runs"].append(
                    {
                        "tenants": count,
                        "tokens": tokens,
                        "executor_bytes": in_all - sum(held),
                        "executor_bytes_by_driver": process_bytes(served.pid, device),
                        "executor_torch_bytes": served.ask("reserved"),
                        "tenants_bytes": held,
                        "in_all_bytes": in_all,
                    }
                )
                console.print(line(shape, figures["runs"][-1]))
                told = [each["executor_bytes_by_driver"] for each in figures["runs"]]
                sizes = [each["executor_bytes"] for each in figures["runs"]] if None in told else told
                figures["spread"] = max(sizes) / (min(sizes) or 1)
                save(name, question, figures, folder)
            workers.all(sorted(loaded), "drop")
    console.print(f"largest to smallest executor: {figures['spread']:.3f}")


def line(shape: str, found: dict[str, Any]) -> str:
    by_driver = found["executor_bytes_by_driver"]
    told = "not told" if by_driver is None else f"{by_driver / 2**30:.2f}"
    return (
        f"{shape} executor {found['tenants']} × {found['tokens']}: executor {found['executor_bytes'] / 2**30:.2f} GiB "
        f"(by the driver {told}, torch's part {found['executor_torch_bytes'] / 2**30:.2f}), "
        f"a tenant {max(found['tenants_bytes']) / 2**30:.2f}, in all {found['in_all_bytes'] / 2**30:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(str(__doc__), shapes=list(CASES), shape="7b").parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(chosen.shape, chosen.device, chosen.mps, chosen.out)


if __name__ == "__main__":
    main()
