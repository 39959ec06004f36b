"""How many tokens a second do N jobs train in shared passes, against N plain processes?

Each job fine-tunes a LoRA (rank 8 on q, k, v, o; batch 2 × 512; AdamW; bf16; random weights at the true shapes):
as a process of its own with transformers and PEFT ("plain"), or as a session of one `training.Host` in this process,
in the ways that it has: "graphs" (kernels, passes as CUDA graphs: what a host does by itself), "kernels" (the same
without graphs) and "loop" (plain torch, session by session: their reference). Plain and shared take turns, window by
window; ratios are medians of the ratio within one round of turns. Memory is what the GPU has less than before the
jobs came, beyond empty contexts, with all they have trained on.

    python -m benchmarks.gpu_training 1b                          # 4 and 8 jobs, about 2.5 minutes on one H200
    python -m benchmarks.gpu_training 7b --jobs 4                 # about 2 minutes
    python -m benchmarks.gpu_training 7b --jobs 8 --no-plain      # eight copies do not fit
    python -m benchmarks.gpu_training 1b --mps                    # plain processes under CUDA MPS
    python -m benchmarks.gpu_training 1b --scale                  # 1 to 64 jobs of 256 tokens, no processes
    python -m benchmarks.gpu_training 1b --fair                   # eight jobs of very different size, no processes
    python -m benchmarks.gpu_training 1b --jobs 4 --profile       # where the time of a pass goes, no processes
    python -m benchmarks.gpu_training tiny --cpu                  # seconds, for the tests
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import mps_daemon, options, used_bytes
from benchmarks.hosted_jobs import HostedJobs, synchronize, training_way
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.shapes import SHAPES, random_model
from benchmarks.tenants import Workers

JOBS = {"tiny": (1, 2), "1b": (4, 8), "7b": (4,)}
SCALE = {"tiny": (1, 2), "1b": (1, 2, 4, 8, 16, 32, 64), "7b": (1, 2, 4, 8, 16, 32)}
SCALE_TOKENS = 256
FAIR = {
    "tiny": ((1, 8), (4, 8), (2, 16), (1, 32)),
    "gpu": ((1, 64), (16, 64), (8, 128), (2, 256), (4, 512), (1, 1024), (4, 1024), (2, 2048)),
}
FAIR_ROWS = {"tiny": (64,), "1b": (4096,), "7b": (4096,)}
FAIR_ROUNDS = 5
WAYS = ("graphs", "kernels", "loop")
REPETITIONS = 5
LIMIT = 790e12
"""FLOP/s that products reach on an H200."""


def profile(shared: HostedJobs, device: str, console: Console) -> dict[str, Any]:
    """Kernels of one step of all jobs: how many, how long, and the host's time."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    steps = 3
    synchronize(device)
    started = time.monotonic()
    shared.steps(steps)
    synchronize(device)
    wall = (time.monotonic() - started) / steps
    with torch.profiler.profile(activities=kinds) as trace:
        shared.steps(steps)
        synchronize(device)
    averages = trace.key_averages()
    on_device = [each for each in averages if device == "cpu" or each.device_type == torch.autograd.DeviceType.CUDA]
    name = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    busy = sum(getattr(each, name) for each in on_device) / steps / 1e6
    count = sum(each.count for each in on_device) / steps
    console.print(
        f"a step of all jobs: {1e3 * wall:.1f} ms, of which the device is busy {1e3 * busy:.1f} ms with {count:.0f} kernels"
    )
    top = sorted(on_device, key=lambda each: -getattr(each, name))[:40]
    rows = [{"kernel": e.key[:100], "ms": getattr(e, name) / steps / 1e3, "count": e.count / steps} for e in top]
    for row in rows:
        console.print(f"{row['ms']:9.3f} ms {row['count']:7.1f} × {row['kernel']}", highlight=False)
    return {"wall_s": wall, "busy_s": busy, "kernels": count, "top": rows}


def flops_share(model: Any, tokens_per_s: float) -> float:
    """Of the limit: LoRA training takes about 4 operations with every parameter for each token."""
    return 4 * sum(p.numel() for p in model.parameters()) * tokens_per_s / LIMIT


def _started(model: Any, shape: str, jobs: int, way: str, device: str, *, batch: int, tokens: int) -> tuple[HostedJobs, float]:
    """A host with jobs that have trained a few steps, and the seconds that took: compiling and capturing."""
    with training_way(way):
        started = time.monotonic()
        shared = HostedJobs(model, shape, way, [(batch, tokens)] * jobs)
        shared.steps(5)
        synchronize(device)
    return shared, time.monotonic() - started


def measure(
    workers: Workers | None, model: Any, shape: str, jobs: int, ways: Sequence[str], device: str, seconds: float, empty: int
) -> dict[str, Any]:
    """As many jobs in each way; the model is there once for all shared ways, `empty` is the GPU's memory without it."""
    size = {"batch": SHAPES[shape].batch, "tokens": SHAPES[shape].tokens}
    tokens = size["batch"] * size["tokens"]
    memory: dict[str, list[float]] = {}
    startup: dict[str, float] = {}
    modes = [*(["plain"] if workers else []), *ways]
    shared: dict[str, HostedJobs] = {}
    base = used_bytes(device) - empty
    if workers:
        before = used_bytes(device)
        workers.all(range(jobs), "load", "plain", shape)
        workers.all(range(jobs), "train", 4)
        memory["plain"] = [used_bytes(device) - before]
    for way in ways:
        before = used_bytes(device)
        shared[way], startup[way] = _started(model, shape, jobs, way, device, **size)
        memory[way] = [used_bytes(device) - before + base]
        _trim(device)
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    for repetition in range(REPETITIONS):
        for mode in rotated(modes, repetition):
            if mode == "plain":
                found = workers.window(range(jobs), "train_until", seconds)  # type: ignore[union-attr]
            else:
                with training_way(mode):
                    found = shared[mode].window(seconds)
            rates[mode].append(sum(tokens / statistics.mean(each) for each in found))
    passes = {way: each.host.stats for way, each in shared.items()}
    for each in shared.values():
        each.close()
    if workers:
        workers.all(range(jobs), "drop")
    _trim(device)
    first = modes[0]
    return {
        "tokens_per_s": compared(rates, first),
        "memory_bytes": compared(memory, first),
        "startup_s": startup,
        "sessions_per_pass": {way: stats.sessions / max(1, stats.passes) for way, stats in passes.items()},
        "share_of_limit": {mode: flops_share(model, statistics.median(rates[mode])) for mode in modes},
    }


def scaled(model: Any, shape: str, way: str, device: str, seconds: float, console: Console) -> dict[int, Any]:
    """Seconds of a step of 1 to 64 jobs of one short sequence each."""
    found: dict[int, Any] = {}
    tokens = min(SCALE_TOKENS, SHAPES[shape].tokens)
    for jobs in SCALE[shape]:
        shared, startup = _started(model, shape, jobs, way, device, batch=1, tokens=tokens)
        runs = []
        for _ in range(REPETITIONS):
            runs.append(statistics.mean(statistics.mean(each) for each in shared.window(seconds)))
        shared.close()
        _trim(device)
        step = statistics.median(runs)
        found[jobs] = {
            "step_s": step,
            "per_job_s": step / jobs,
            "tokens_per_s": jobs * tokens / step,
            "startup_s": startup,
            "runs": runs,
        }
        console.print(
            f"{shape} {jobs:3d} jobs of {tokens} tokens: step {1e3 * step:7.1f} ms, {1e3 * step / jobs:6.2f} ms a job, "
            f"{jobs * tokens / step:9.0f} tok/s"
        )
    return found


def fair(model: Any, shape: str, way: str, seconds: float, pass_rows: Sequence[int], console: Console) -> dict[str, Any]:
    """Jobs of very different size begin together: when each has ended, against 8 times what it takes alone.

    That is the mean of just before and just after: the host's speed varies.
    """
    sizes = FAIR["tiny" if shape == "tiny" else "gpu"]
    names = [f"{batch} × {tokens}" for batch, tokens in sizes]
    figures: dict[str, Any] = {}
    with training_way(way):
        for rows in pass_rows:
            shared = HostedJobs(model, shape, way, sizes, pass_rows=rows)
            for _ in range(2):  # kernels are compiled and graphs captured; again after larger ones, which start anew
                shared.alone([5] * len(sizes))
            counts = [max(5, round(seconds * 5 / end)) for end in shared.alone([5] * len(sizes))]
            shared.finish([-(-count // 4) for count in counts])
            ratios: dict[str, list[float]] = {name: [] for name in names}
            ends: dict[str, list[float]] = {name: [] for name in names}
            before = shared.alone(counts)
            for _ in range(FAIR_ROUNDS):
                together, after = shared.finish(counts), shared.alone(counts)
                for number, name in enumerate(names):
                    ends[name].append(together[number])
                    ratios[name].append(together[number] / (len(sizes) * statistics.mean((before[number], after[number]))))
                before = after
            shared.close()
            found = {
                name: {"steps": count, "end_s": statistics.median(ends[name]), "ratio": statistics.median(ratios[name])}
                for name, count in zip(names, counts, strict=True)
            }
            figures[str(rows)] = {"jobs": found, "runs": ratios, "worst": max(each["ratio"] for each in found.values())}
            console.print(f"{shape}, passes of {rows} rows: latest against its fair share {figures[str(rows)]['worst']:.2f}")
            for name, each in found.items():
                console.print(f"  {name:10s} {each['steps']:5d} steps, ends at {each['end_s']:6.2f} s ({each['ratio']:.2f})")
    return figures


def _trim(device: str) -> None:
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def line(figures: dict[str, Any], mode: str) -> str:
    rate, memory = figures["tokens_per_s"][mode], figures["memory_bytes"][mode]
    more = f", first steps {figures['startup_s'][mode]:.1f} s" if mode in figures["startup_s"] else ""
    return (
        f"{rate['median']:9.0f} tok/s ({rate['ratio']:.2f}), {100 * figures['share_of_limit'][mode]:4.1f} % of the limit, "
        f"{memory['median'] / 2**30:6.1f} GiB ({memory['ratio']:.2f}){more}"
    )


def run(
    shape: str,
    device: str,
    seconds: float,
    counts: Sequence[int],
    ways: Sequence[str],
    *,
    plain: bool,
    mps: bool,
    scale: bool,
    profiled: bool,
    fairly: bool,
    folder: Path = FOLDER,
) -> None:
    console = Console(width=160)
    figures: dict[str, Any] = {"script": "gpu_training", "shape": shape, "mps": mps}
    compare = not scale and not profiled and not fairly
    name = f"gpu-training-{shape}{'-mps' if mps else ''}{'-scale' if scale else ''}{'-profile' if profiled else ''}"
    name += "-fair" if fairly else ""
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers(max(counts), device)) if plain and compare else None
        if workers:
            workers.all(range(max(counts)), "context")
        synchronize(device)
        empty = used_bytes(device)
        model = random_model(shape, device)
        console.print(f"{shape}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters")
        if scale:
            figures["scale"] = scaled(model, shape, ways[0], device, seconds, console)
        elif fairly:
            figures["fair"] = fair(model, shape, ways[0], seconds / 3, FAIR_ROWS[shape], console)
        elif profiled:
            size = {"batch": SHAPES[shape].batch, "tokens": SHAPES[shape].tokens}
            figures["profile"] = {}
            for way in ways:
                shared, startup = _started(model, shape, counts[0], way, device, **size)
                console.print(f"{shape} {way}, {counts[0]} jobs, first steps {startup:.1f} s")
                with training_way(way):
                    figures["profile"][way] = profile(shared, device, console)
                shared.close()
                _trim(device)
        else:
            results: dict[int, Any] = {}
            figures["jobs"] = results
            for count in counts:
                results[count] = measure(workers, model, shape, count, ways, device, seconds, empty)
                for mode in results[count]["tokens_per_s"]:
                    console.print(f"{shape} {mode:8s}× {count} {line(results[count], mode)}", highlight=False)
                console.print(f"  sessions in a pass: {results[count]['sessions_per_pass']}")
                save(name, str(__doc__).splitlines()[0], figures, folder)
        save(name, str(__doc__).splitlines()[0], figures, folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(JOBS), shape="1b", seconds=1.5)
    parser.add_argument("--jobs", type=int, nargs="+", help="how many at a time")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["graphs"], help="ways of sharing, in addition to plain processes"
    )
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="without the processes")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--scale", action="store_true", help="the time of a step against the number of jobs")
    instead.add_argument("--fair", dest="fairly", action="store_true", help="when jobs of very different size end")
    instead.add_argument("--profile", dest="profiled", action="store_true", help="kernels of a pass")
    chosen = parser.parse_args(arguments)
    with mps_daemon(chosen.mps):
        run(
            chosen.shape,
            chosen.device,
            chosen.seconds,
            chosen.jobs or JOBS[chosen.shape],
            chosen.ways,
            plain=chosen.plain,
            mps=chosen.mps,
            scale=chosen.scale,
            profiled=chosen.profiled,
            fairly=chosen.fairly,
            folder=chosen.out,
        )


if __name__ == "__main__":
    main()
