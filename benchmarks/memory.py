"""Does the executor's memory grow with tenants or tokens?

An executor in a process of its own; 1 to 8 tenants train one LoRA step of 64
to 2048 tokens over it. After each case the executor's private resident
memory is read, and the bytes of weights it holds.

    python -m benchmarks.memory          # about 5 minutes on 2 cores
    python -m benchmarks.memory --tiny   # seconds, for the tests
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.policies import Plan as ServePlan
from benchmarks.policies import serve
from benchmarks.results import FOLDER, save


@dataclass(frozen=True, kw_only=True)
class Plan:
    cases: tuple[tuple[int, int], ...] = ((1, 64), (1, 512), (1, 2048), (4, 64), (8, 64), (8, 256), (1, 64))
    """(tenants, tokens of each)"""
    tiny: bool = False


def private_mib(pid: int) -> float:
    """Resident memory of a process that is its own: not files, not what it shares with tenants."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no figure for process {pid}")


def step(address: str, tokens: int) -> None:
    """One forward and backward of a LoRA tenant."""
    import torch
    from peft import LoraConfig, get_peft_model

    import symbiosis

    model = get_peft_model(symbiosis.connect(address), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    model(input_ids=ids, labels=ids).loss.backward()
    model.symbiosis.close()


def run(plan: Plan, folder: Path = FOLDER) -> dict[str, Any]:
    context, console = mp.get_context("spawn"), Console()
    pipe, theirs = context.Pipe()
    executor = context.Process(target=serve, args=("opportunistic", ServePlan(tiny=plan.tiny), theirs))
    executor.start()
    assert executor.pid is not None
    address, runs = pipe.recv(), []
    step(address, 64)  # the first call of each kind makes the libraries' own buffers
    for tenants, tokens in plan.cases:
        threads = [threading.Thread(target=step, args=(address, tokens)) for _ in range(tenants)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send("stats")
        held = pipe.recv()["bytes_held"] / 2**20
        runs.append({"tenants": tenants, "tokens": tokens, "private_mib": private_mib(executor.pid), "weights_mib": held})
        console.print(f"{tenants} tenants x {tokens} tokens: private {runs[-1]['private_mib']:.0f} MiB, weights {held:.0f} MiB")
    pipe.send("stop")
    executor.join()
    sizes = [run["private_mib"] for run in runs]
    figures = {"spread": max(sizes) / min(sizes), "runs": runs}
    save("memory", "Does the executor's memory grow with tenants or tokens?", figures, folder)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random toy model")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    run(Plan(cases=((1, 8), (3, 16)), tiny=True) if options.tiny else Plan(), options.out)
