"""Does the simulator predict a live cluster? The same trace, the same policy, the same engines.

Engines of this machine are profiled, all at once, as they run later. A trace of Poisson arrivals with the lengths of Azure's
conversations is replayed over HTTP on a live cluster of them, and simulated with the fitted costs. Compared are the times to
the first token (TTFT), the mean times of each later token (TPOT), and the engine-seconds.

    python -m benchmarks.cluster_replay                          # the default model, 2 engines of one thread: 10 minutes
    python -m benchmarks.cluster_replay --engines 3 --threads 4  # a machine with more cores
    python -m benchmarks.cluster_replay 1b --engines 1           # one engine on a GPU
    python -m benchmarks.cluster_replay tiny                     # to try it
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cluster_live import ADMIN, Cluster, Plan, make_model
from benchmarks.gpu import mps_daemon, options
from benchmarks.http_load import lengths
from benchmarks.http_load.client import LoadClient, Report
from benchmarks.http_load.workload import Request, Workload
from benchmarks.results import save
from symbiosis.cluster.policies.objective import Objective
from symbiosis.cluster.policies.policy import ClusterPolicy, PolicyConfig
from symbiosis.cluster.policies.scaling import ScalingConfig
from symbiosis.cluster.simulation.report import make_report
from symbiosis.cluster.simulation.simulator import Simulator
from symbiosis.cluster.simulation.trace import Trace
from symbiosis.cluster.step_cost import StepCost, read_step_cost

QUESTION = "Does the simulator predict a live cluster?"
FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "engine_s")
_WARM_UP = 8
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Replay:
    longest: int
    """Most tokens of a request."""
    requests: int
    cache_gb: float
    batches: tuple[int, ...] = (1, 4, 16, 48)
    contexts: tuple[int, ...] = (64, 256, 768)
    prompts: tuple[int, ...] = (32, 128, 512, 1024)


REPLAYS = {
    "tiny": Replay(longest=64, requests=40, cache_gb=0.05, batches=(1, 4, 16), contexts=(16, 48), prompts=(16, 32, 48)),
    "default": Replay(longest=512, requests=400, cache_gb=1.0),
    "1b": Replay(longest=2048, requests=3000, cache_gb=8.0, batches=(1, 16, 64, 192), contexts=(128, 512, 1500)),
}


def _profile(replay: Replay, engine: dict[str, Any], ready: Any, over: Any, out: Any) -> None:
    """In a process of its own: the profile of an engine, again and again until all have one."""
    import torch

    from symbiosis.app.engine_profile import ProfilePlan, profile_engine, with_start_time
    from symbiosis.models.loading import load_for_hosting
    from symbiosis.serving.engine_core import EngineCore

    torch.set_num_threads(engine.get("threads") or torch.get_num_threads())
    started = time.monotonic()
    model, _ = load_for_hosting(engine["model"], None, engine.get("device") or "cpu", engine.get("dtype"))
    core = EngineCore(model, cache_bytes=int(engine["cache_gb"] * 1e9))
    start_s = time.monotonic() - started
    plan = ProfilePlan(batches=replay.batches, contexts=replay.contexts, prompts=replay.prompts)
    ready.wait()
    first = None
    while first is None or not over.is_set():
        made = profile_engine(core, plan, source="this machine, all engines at once")
        if first is None:
            first = with_start_time(made, start_s)
            out.put((first.cost.to_json(), first.terms.median_error))


def profile_engines(replay: Replay, engine: dict[str, Any], count: int) -> tuple[StepCost, float]:
    """The costs of the median engine, and how far its steps are from them."""
    context = multiprocessing.get_context("spawn")
    ready, over, out = context.Barrier(count), context.Event(), context.SimpleQueue()
    processes = [context.Process(target=_profile, args=(replay, engine, ready, over, out)) for _ in range(count)]
    for process in processes:
        process.start()
    found = sorted((out.get() for _ in processes), key=lambda each: each[0]["row_s"] + each[0]["fixed_s"])
    over.set()
    for process in processes:
        process.join()
    cost, error = found[len(found) // 2]
    return StepCost(**cost), error


def make_trace(replay: Replay, cost: StepCost, engines: int, load: float) -> Trace:
    """Arrivals at the rate at which engines work for this share of the time, beyond the fixed time of their steps."""
    random = Random(0)
    sizes = lengths.sample("azure_conv", replay.requests, replay.longest, random)
    work = sum(cost.prompt_s(prompt) + cost.completion_s(prompt, new) for prompt, new in sizes) / len(sizes)
    times = list(accumulate(random.expovariate(load * engines / work) for _ in sizes))
    return Trace(
        "azure_conv lengths, Poisson", times, [each[0] for each in sizes], [each[1] for each in sizes], [""] * len(sizes)
    )


def suited_objective(trace: Trace, cost: StepCost) -> Objective:
    """The default, or one that these engines can meet. Otherwise most requests are late, and the policy only orders them."""
    mean = sum(trace.prompts) // len(trace)
    return Objective(ttft_s=max(2.0, 8 * cost.first_token_s(mean)), tpot_s=max(0.1, 3 * cost.fixed_s))


def replay_live(cluster: Cluster, trace: Trace, vocabulary: int) -> dict[str, float]:
    random = Random(1)
    requests = [
        Request(
            prompt=tuple(random.choices(range(1, vocabulary), k=prompt)),
            new=new,
            adapter=cluster.model,
            key=f"{ADMIN}-ann",
            arrival_s=at,
        )
        for at, prompt, new in zip(trace.arrivals, trace.prompts, trace.outputs, strict=True)
    ]
    with LoadClient(1) as client:
        warm = [replace(each, prompt=each.prompt[::-1], arrival_s=0.0) for each in requests[:_WARM_UP]]
        client.send(cluster.host.url, Workload(requests=warm, concurrency=None), keep_every=0)
        counted = _EngineSeconds(cluster)
        with counted:
            report = client.send(cluster.host.url, Workload(requests=requests, concurrency=None), keep_every=0)
    errors = [answer.error for answer in report.answers if answer.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    return {**_times(report), "engine_s": counted.total}


class _EngineSeconds:
    """Engines over time, starting ones included. A context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._over = cluster, threading.Event()
        self._thread = threading.Thread(target=self._count)
        self.total = 0.0

    def _count(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_POLL_S):
            found = self._cluster.host.ask("statistics")
            now = time.monotonic()
            self.total += (now - last) * max(found["cluster"]["wanted"], len(found["engines"]))
            last = now

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _times(report: Report) -> dict[str, float]:
    later = [
        (answer.done - answer.due - first) / (answer.tokens - 1)
        for answer, first in zip(report.answers, report.first_s, strict=True)
        if answer.tokens > 1
    ]
    found = {}
    for name, values in (("ttft", report.first_s), ("tpot", later)):
        found |= {f"{name}_p{share}_s": float(np.quantile(values, share / 100)) for share in (50, 99)}
    return found


def simulate(trace: Trace, cost: StepCost, objective: Objective, engines: int, most: int) -> dict[str, float]:
    scaling = ScalingConfig(min_engines=engines, max_engines=most)
    policy = ClusterPolicy(PolicyConfig(scale=True, scaling=scaling).aimed_at(objective), cost)
    result = Simulator(trace, policy, cost, engines=engines, most_engines=most).run()
    report = make_report("symbiosis", result, cost, objective, 0.0)
    tpot = [seconds for seconds, new in zip(result.tpot_s, trace.outputs, strict=True) if new > 1]
    found = {name: float(getattr(report, name)) for name in ("ttft_p50_s", "ttft_p99_s")}
    found |= {f"tpot_p{share}_s": float(np.quantile(tpot, share / 100)) for share in (50, 99)}
    return {**found, "engine_s": result.engine_s}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(REPLAYS), shape="default")
    parser.add_argument("--engines", type=int, default=2, help="at the start")
    parser.add_argument("--most", type=int, help="engines that the policy may start; none: as many as at the start")
    parser.add_argument("--threads", type=int, default=1, help="of an engine on the CPU")
    parser.add_argument("--load", type=float, default=0.4, help="share of the time that engines work")
    chosen = parser.parse_args(arguments)
    replay, console, most = REPLAYS[chosen.shape], Console(width=140), chosen.most or chosen.engines
    on_cpu = chosen.shape != "1b" or chosen.device == "cpu"
    with tempfile.TemporaryDirectory() as place, mps_daemon(chosen.mps):
        model, vocabulary = make_model(chosen.shape, Path(place))
        engine: dict[str, Any] = {"model": model or None, "cache_gb": replay.cache_gb}
        engine |= {"dtype": "float32", "threads": chosen.threads} if on_cpu else {"device": chosen.device}
        cost, error = profile_engines(replay, engine, most)
        console.print(f"costs: {cost.to_json()}, median error {error:.1%}")
        trace = make_trace(replay, cost, chosen.engines, chosen.load)
        console.print(f"{len(trace)} requests in {trace.duration:.0f} s")
        profile = Path(place) / "profile.json"
        profile.write_text(json.dumps({"step_cost": cost.to_json()}))
        objective = suited_objective(trace, cost)
        plan = Plan(engines=chosen.engines)
        more: dict[str, Any] = {"profile": str(profile), "max_engines": most, "objective": objective}
        with Cluster(model, plan, engine, Path(place) / "state", **more) as cluster:
            live = replay_live(cluster, trace, vocabulary)
        limits = read_step_cost(str(profile))
        simulated = simulate(trace, limits, objective, chosen.engines, most)
    ratios = {name: simulated[name] / live[name] for name in FIGURES}
    for name in FIGURES:
        console.print(f"{name}: live {live[name]:.4g}, simulated {simulated[name]:.4g}, ratio {ratios[name]:.3f}")
    name = "cluster-replay" if chosen.shape == "default" else f"cluster-replay-{chosen.shape}"
    record = {"engines": chosen.engines, "most": most, "threads": chosen.threads if on_cpu else None, "load": chosen.load}
    record |= {
        "objective": asdict(objective),
        "requests": len(trace),
        "seconds": trace.duration,
        "step_cost": cost.to_json(),
        "median_error": error,
    }
    record |= {"live": live, "simulated": simulated, "simulated_of_live": ratios}
    console.print(save(name, QUESTION, {"script": "cluster_replay", "shape": chosen.shape, **record}, chosen.out))


if __name__ == "__main__":
    main()
