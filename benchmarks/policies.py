"""Which batching policy serves tenants of very different batch sizes best?

Eight tenants, each a process of its own, decode on one executor with batches
of 1 to 64 sequences. The three policies run in turn, several times over, in
one run; figures are medians over the repetitions.

    python -m benchmarks.policies            # about 10 minutes on 2 cores
    python -m benchmarks.policies --tiny     # seconds, for the tests
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import FOLDER, rotated, save
from benchmarks.tenants import one_thread_each

POLICIES = ["none", "lockstep", "opportunistic"]
PROMPT, CONTEXT = 8, 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 48, 64)
    seconds: float = 20.0
    warm_up: float = 4.0
    repetitions: int = 5
    tiny: bool = False


def serve(policy: str, plan: Plan, pipe: Any) -> None:
    """The executor's process."""
    import symbiosis

    if plan.tiny:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    else:
        model = None
    with symbiosis.Executor(model, policy=policy) as executor:
        pipe.send(executor.listen("shm://"))
        while (asked := pipe.recv()) != "stop":
            assert asked == "stats"
            pipe.send(executor.stats())


def tenant(batch: int, plan: Plan, pipe: Any) -> None:
    """A tenant's process: decodes as fast as it can on each command, on the given executor."""
    import torch

    import symbiosis

    while (address := pipe.recv()) != "stop":
        model = symbiosis.connect(address, name=f"batch-{batch}")
        generator = torch.Generator().manual_seed(batch)
        prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), generator=generator)
        with torch.no_grad():
            output = model(prompt, use_cache=True)
        pipe.send("ready")
        start = pipe.recv()
        latencies = decode(model, output, start + plan.warm_up, start + plan.warm_up + plan.seconds)
        model.symbiosis.close()
        pipe.send(latencies)


def decode(model: Any, output: Any, begin: float, end: float) -> list[float]:
    """Seconds of each decode step that ended between `begin` and `end` (monotonic times)."""
    import torch

    latencies: list[float] = []
    with torch.no_grad():
        while True:
            started = time.monotonic()
            token = output.logits[:, -1:].argmax(-1)
            if (length := output.past_key_values.get_seq_length()) >= CONTEXT:
                output.past_key_values.crop(PROMPT - length)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            now = time.monotonic()
            if now > end:
                return latencies
            if started >= begin:
                latencies.append(now - started)


def measure(policy: str, plan: Plan, tenants: list[Any]) -> dict[str, Any]:
    """One policy, once."""
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    executor = context.Process(target=serve, args=(policy, plan, theirs))
    executor.start()
    address = pipe.recv()
    for conn in tenants:
        conn.send(address)
    for conn in tenants:
        assert conn.recv() == "ready"
    start = time.monotonic()
    for conn in tenants:
        conn.send(start)
    time.sleep(plan.warm_up)
    pipe.send("stats")
    before = pipe.recv()
    time.sleep(plan.seconds)
    pipe.send("stats")
    after = pipe.recv()
    latencies = [conn.recv() for conn in tenants]
    pipe.send("stop")
    executor.join()
    return figures_of(
        plan.batches, [steps or [plan.seconds] for steps in latencies], before, after
    )  # no step: at least so long


def figures_of(
    batches: Sequence[int], latencies: list[list[float]], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """One window's figures, from each tenant's seconds of each step and the executor's figures before and after."""
    medians = [statistics.median(steps) for steps in latencies]
    rates = [batch / statistics.mean(steps) for batch, steps in zip(batches, latencies, strict=True)]
    return {
        "tokens_per_s": sum(rates),
        "latency_ms": 1e3 * statistics.mean(medians),
        "latency_ms_by_tenant": [round(1e3 * m, 2) for m in medians],
        "tokens_per_s_by_tenant": [round(rate, 1) for rate in rates],
        "mean_batch": (after["calls"] - before["calls"]) / max(1, after["batches"] - before["batches"]),
        "busy_share": (after["busy_s"] - before["busy_s"]) / (after["uptime_s"] - before["uptime_s"]),
    }


def run(plan: Plan, folder: Path = FOLDER) -> dict[str, Any]:
    one_thread_each()
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for batch in plan.batches:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=tenant, args=(batch, plan, theirs)))
        processes[-1].start()
        pipes.append(ours)
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    console = Console()
    for repetition in range(plan.repetitions):
        for policy in rotated(POLICIES, repetition):
            figures = measure(policy, plan, pipes)
            runs[policy].append(figures)
            console.print(
                f"{repetition + 1}/{plan.repetitions} {policy:14s} {figures['tokens_per_s']:7.1f} tok/s  "
                f"{figures['latency_ms']:7.1f} ms  batch {figures['mean_batch']:.2f}  busy {figures['busy_share']:.0%}  "
                f"{figures['latency_ms_by_tenant']}"
            )
    for conn, process in zip(pipes, processes, strict=True):
        conn.send("stop")
        process.join()
    figures = {
        "plan": {"tenants": list(plan.batches), "seconds": plan.seconds, "repetitions": plan.repetitions},
        "medians": {policy: medians(each) for policy, each in runs.items()},
        "runs": runs,
    }
    path = save("policies", "Which batching policy serves tenants of batch 1 to 64 best?", figures, folder)
    show(console, figures)
    plot(figures, path.with_suffix(".png"))
    return figures


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("tokens_per_s", "latency_ms", "mean_batch", "busy_share")
    return {key: statistics.median(run[key] for run in runs) for key in keys}


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table("policy", "tokens/s", "latency ms (mean of tenants' medians)", "mean batch")
    for policy, row in figures["medians"].items():
        table.add_row(policy, f"{row['tokens_per_s']:.1f}", f"{row['latency_ms']:.1f}", f"{row['mean_batch']:.2f}")
    console.print(table)


def plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    names = list(figures["medians"])
    values = [figures["medians"][name]["tokens_per_s"] for name in names]
    bars = left.bar(names, values, color=["#9aa0a6", "#c58af9", "#1a73e8"])
    left.bar_label(bars, [f"{value:.0f}" for value in values])
    left.set_ylabel("tokens/s, all tenants")
    batches = [str(b) for b in figures["plan"]["tenants"]]
    for name, color in zip(names, ["#9aa0a6", "#c58af9", "#1a73e8"], strict=True):
        columns = zip(*[run["latency_ms_by_tenant"] for run in figures["runs"][name]], strict=True)
        right.plot(batches, [statistics.median(column) for column in columns], marker="o", label=name, color=color)
    right.set_xlabel("tenant's batch size")
    right.set_ylabel("median step, ms")
    right.set_ylim(bottom=0)
    right.legend()
    figure.suptitle("Eight tenants on one executor: three batching policies")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random toy model and three tenants")
    parser.add_argument("--seconds", type=float, default=Plan.seconds)
    parser.add_argument("--repetitions", type=int, default=Plan.repetitions)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.tiny:
        run(Plan(batches=(1, 4, 16), seconds=0.5, warm_up=0.2, repetitions=1, tiny=True), options.out)
    else:
        run(Plan(seconds=options.seconds, repetitions=options.repetitions), options.out)
