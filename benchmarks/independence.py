"""Does a stalled or slow tenant slow the others down?

Three tenants, each a process of its own, fine-tune a LoRA on one executor. A
fourth is silent, then stalled inside its own code in the middle of a step,
then 100 times slower than the others. The three's median step times are
compared within one run; repetitions interleave the three cases.

    python -m benchmarks.independence          # about 6 minutes on 2 cores
    python -m benchmarks.independence --tiny   # seconds, for the tests
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.policies import Plan as ServePlan
from benchmarks.policies import serve
from benchmarks.results import FOLDER, rotated, save
from benchmarks.tenants import one_thread_each

CASES = ["silent", "stalled", "100 times slower"]
TENANTS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int = 12
    tokens: int = 32
    repetitions: int = 5
    tiny: bool = False


def _model(address: str, name: str) -> Any:
    from peft import LoraConfig, get_peft_model

    import symbiosis

    return get_peft_model(symbiosis.connect(address, name=name), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def train(address: str, plan: Plan, pipe: Any) -> None:
    """A normal tenant: trains `steps` steps on each command and reports their seconds."""
    import torch

    model = _model(address, "trainer")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (1, plan.tokens))
    pipe.send("ready")
    while pipe.recv() == "go":
        seconds = []
        for step in range(plan.steps + 2):
            started = time.monotonic()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                seconds.append(time.monotonic() - started)
        pipe.send(seconds)


def disturb(address: str, plan: Plan, pipe: Any, stop: Any) -> None:
    """The fourth tenant: silent, stalled between two layers, or sleeping 99 times its own time at every layer."""
    import torch

    model = _model(address, "fourth")
    ids = torch.randint(0, model.config.vocab_size, (1, plan.tokens))
    layers = model.base_model.model.model.layers
    case, last = "silent", time.monotonic()

    def before_layer(*_: Any) -> None:
        nonlocal last
        if case == "stalled":
            stop.wait()
        elif case == "100 times slower":
            stop.wait(99 * (time.monotonic() - last))
        last = time.monotonic()

    for layer in layers[1:]:
        layer.register_forward_pre_hook(before_layer)
    model(input_ids=ids, labels=ids).loss.backward()
    pipe.send("ready")
    while (case := pipe.recv()) != "end":
        pipe.send("started")
        while not stop.is_set():
            last = time.monotonic()
            if case == "silent":
                stop.wait()
            else:
                model(input_ids=ids, labels=ids).loss.backward()
        pipe.send("stopped")


def run(plan: Plan, folder: Path = FOLDER) -> dict[str, Any]:
    one_thread_each()
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    executor = context.Process(target=serve, args=("opportunistic", ServePlan(tiny=plan.tiny), theirs))
    executor.start()
    address, stop = pipe.recv(), context.Event()
    ends = [context.Pipe() for _ in range(TENANTS + 1)]
    workers = [context.Process(target=train, args=(address, plan, end[1])) for end in ends[:TENANTS]]
    workers.append(context.Process(target=disturb, args=(address, plan, ends[TENANTS][1], stop)))
    for worker in workers:
        worker.start()
    trainers, fourth = [end[0] for end in ends[:TENANTS]], ends[TENANTS][0]
    for conn in (*trainers, fourth):
        assert conn.recv() == "ready"
    console = Console()
    runs: dict[str, list[float]] = {case: [] for case in CASES}
    for repetition in range(plan.repetitions):
        for case in rotated(CASES, repetition):
            stop.clear()
            fourth.send(case)
            assert fourth.recv() == "started"
            for conn in trainers:
                conn.send("go")
            seconds = [step for conn in trainers for step in conn.recv()]
            stop.set()
            assert fourth.recv() == "stopped"
            runs[case].append(statistics.median(seconds))
            console.print(
                f"{repetition + 1}/{plan.repetitions} fourth tenant {case}: median step {1e3 * runs[case][-1]:.1f} ms"
            )
    for conn in trainers:
        conn.send("end")
    fourth.send("end")
    for worker in workers:
        worker.join()
    pipe.send("stop")
    executor.join()
    medians = {case: statistics.median(values) for case, values in runs.items()}
    figures: dict[str, Any] = {
        "plan": {"tenants": TENANTS, "steps": plan.steps, "tokens": plan.tokens, "repetitions": plan.repetitions},
        "median_step_s": medians,
        "ratio_to_silent": {case: medians[case] / medians["silent"] for case in CASES},
        "runs": runs,
    }
    save("independence", "Does a stalled or slow tenant slow the others down?", figures, folder)
    console.print({case: f"{ratio:.3f}" for case, ratio in figures["ratio_to_silent"].items()})
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random toy model")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    run(Plan(steps=3, repetitions=1, tiny=True) if options.tiny else Plan(), options.out)
