"""Runs workloads over HTTP and by the engine alone, in turns, and writes the figures. The commands are in `__init__`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmarks.http_load as package
from benchmarks.gpu import options
from benchmarks.http_load import lengths
from benchmarks.http_load.client import LoadClient, Report
from benchmarks.http_load.figures import compare_cases, cpu_shares, growth, summarise
from benchmarks.http_load.host import DEFAULT, HostProcess, Served, compute, serve
from benchmarks.http_load.process_usage import ServerUsage
from benchmarks.http_load.workload import Traffic, Workload, made_by, made_of_words
from benchmarks.results import rotated, save

QUESTION = str(package.__doc__).splitlines()[0]
ENGINE, STREAMED, WHOLE = "engine", "streamed", "whole"
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    prompt: int = 128
    new: int = 192
    streams: tuple[int, ...] = (32, 128, 256)
    rounds: int = 4
    """Requests of each stream in a run."""
    repetitions: int = 5
    longest: int = 2048
    cache_tokens: int = 1 << 19
    """Most tokens in the KV cache of each of the two engines."""
    clients: int = 4
    """Processes of the load client."""
    open_rates: tuple[float, ...] = (0.5, 0.8)
    """Of the requests/s that the engine alone computes in a closed loop."""


PLANS = {
    "tiny": Plan(prompt=12, new=16, streams=(2, 4), rounds=2, repetitions=1, longest=64, cache_tokens=1 << 13, clients=2),
    DEFAULT: Plan(prompt=64, new=64, streams=(32,), rounds=1, repetitions=3, longest=512, cache_tokens=1 << 14, clients=1),
    "1b": Plan(),
    "qwen4b": Plan(cache_tokens=1 << 18),
    "7b": Plan(cache_tokens=5 << 14),
}


def served_model(chosen: Any, plan: Plan, streams: int, **http: Any) -> Served:
    """So many sequences run at once, of one tenant or of several."""
    longest = plan.prompt + plan.new if chosen.lengths == lengths.FIXED else plan.longest
    running = max(256, streams)
    wanted = (streams + 2) * (-(-longest // BLOCK) + 1) * BLOCK
    engine = {
        "pages": max(64, min(wanted, plan.cache_tokens) // BLOCK),
        "page_size": BLOCK,
        "max_running": running,
        "tenant_running": running,
        "max_rows": max(2048, 2 * running),
        "max_queued": 1 << 16,
        "tenant_queued": 1 << 16,
    }
    http = {"workers": chosen.workers, **http}
    return Served(model=chosen.shape, device=chosen.device, adapters=chosen.adapters, engine=engine, http=http)


class Bench:
    """Server, engine alone and load client. A context manager."""

    def __init__(self, chosen: Any, plan: Plan, streams: int) -> None:
        self.chosen, self.plan, self._stack = chosen, plan, ExitStack()
        self._served = served_model(chosen, plan, streams)
        self.console = Console(width=160)

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            self._client = stack.enter_context(LoadClient(self.plan.clients))
            self._server = stack.enter_context(HostProcess(serve, self._served))
            facts = self._server.facts
            self._alone = stack.enter_context(HostProcess(compute, self._served))
            self.url, self._usage = facts["url"], ServerUsage(self._server.pid)
            self.traffic = self._traffic(facts)
            assert self._alone.facts["vocabulary"] == facts["vocabulary"]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def _traffic(self, facts: dict[str, Any]) -> Traffic:
        vocabulary, text = facts["vocabulary"], None
        if self.chosen.text:
            text = made_by(facts["tokenizer"]) if self.chosen.shape == DEFAULT else made_of_words(vocabulary)
        return Traffic(
            vocabulary=vocabulary,
            prompt=self.plan.prompt,
            new=self.plan.new,
            lengths=self.chosen.lengths,
            longest=self.plan.longest,
            adapters=self.chosen.adapters,
            text=text,
        )

    def run(self, case: str, workload: Workload) -> dict[str, Any]:
        """Figures of one run of one case."""
        started = time.monotonic()
        report: Report
        if case == ENGINE:
            report, server = self._alone.ask(workload), None
        else:
            before = self._usage.cpu_s()
            report = self._client.send(
                self.url,
                replace(workload, stream=case != WHOLE),
                keep_every=1 if self.chosen.check else 16,
                is_in_words=self.chosen.shape != DEFAULT,
            )
            after = self._usage.cpu_s()
            server = {name: [late - early for early, late in zip(before[name], after[name], strict=False)] for name in before}
        figures = summarise(report)
        figures["cpu_cores"] = cpu_shares(report, server, figures.get("seconds", time.monotonic() - started))
        self.console.print(f"{case:9s} {line(figures)}", highlight=False)
        if figures["errors"]:
            self.console.print(f"{figures['errors']} errors: {figures['first_errors']}", markup=False)
        return figures

    def take_turns(
        self, cases: Sequence[str], workloads: dict[str, Callable[[object], Workload]]
    ) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """All cases of all workloads in each repetition, each time with other prompts. The first time is to warm up."""
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {case: [] for case in cases} for name in workloads}
        self.warm_up(cases, workloads)
        for repetition in range(self.chosen.repetitions or self.plan.repetitions):
            for name, make in workloads.items():
                for case in rotated(cases, repetition):
                    self.console.print(f"{name:>8s} ", end="", highlight=False)
                    runs[name][case].append(self.run(case, make((name, repetition))))
        return runs

    def warm_up(self, cases: Sequence[str], workloads: dict[str, Callable[[object], Workload]]) -> None:
        """Kernels are compiled and CUDA graphs captured; a CPU has neither, and a few tokens are enough."""
        for name, make in workloads.items():
            for case in cases:
                workload = make((name, "warm-up"))
                if self.chosen.device == "cpu":
                    short = [replace(each, new=2, arrival_s=None) for each in workload.requests[:2]]
                    workload = Workload(requests=short, concurrency=1)
                self.console.print("warm-up  ", end="")
                self.run(case, workload)


def line(figures: dict[str, Any]) -> str:
    shown = {"tokens_per_s": (1.0, "tok/s"), "first_p50_s": (1e3, "ms to the first p50"), "first_p99_s": (1e3, "p99")}
    shown |= {"gap_p50_s": (1e3, "ms between p50"), "gap_p99_s": (1e3, "p99"), "answer_p50_s": (1e3, "ms an answer p50")}
    there = [f"{scale * figures[name]:8.1f} {unit}" for name, (scale, unit) in shown.items() if name in figures]
    return f"{', '.join(there)}; cores {figures['cpu_cores']}"


def closed_loop(chosen: Any, plan: Plan) -> dict[str, Any]:
    """So many streams at a time, streamed and whole."""
    counts = chosen.streams or plan.streams
    rounds = chosen.rounds or plan.rounds
    with Bench(chosen, plan, max(counts)) as bench:
        traffic = bench.traffic

        def make(count: int) -> Callable[[object], Workload]:
            return lambda seed: traffic.closed(count, rounds, seed)

        runs = bench.take_turns((ENGINE, STREAMED, WHOLE), {str(count): make(count) for count in counts})
    return {
        "rounds": rounds,
        "streams": {name: compare_cases(cases, ENGINE) for name, cases in runs.items()},
        "engine_growth": growth({int(name): cases[ENGINE] for name, cases in runs.items()}),
        "runs": runs,
    }


def burst(chosen: Any, plan: Plan) -> dict[str, Any]:
    """So many requests at once."""
    counts = chosen.streams or plan.streams
    with Bench(chosen, plan, max(counts)) as bench:
        traffic = bench.traffic

        def make(count: int) -> Callable[[object], Workload]:
            return lambda seed: traffic.burst(count, seed)

        runs = bench.take_turns((ENGINE, STREAMED), {str(count): make(count) for count in counts})
    return {"streams": {name: compare_cases(cases, ENGINE) for name, cases in runs.items()}, "runs": runs}


def open_loop(chosen: Any, plan: Plan) -> dict[str, Any]:
    """Poisson arrivals."""
    streams = max(chosen.streams or plan.streams)
    count = (chosen.rounds or plan.rounds) * streams
    with Bench(chosen, plan, streams) as bench:
        traffic = bench.traffic
        rates = list(chosen.rates)
        if not rates:
            bench.warm_up((ENGINE,), {"closed": lambda seed: traffic.closed(streams, 1, seed)})
            found = bench.run(ENGINE, traffic.closed(streams, chosen.rounds or plan.rounds, "rate"))
            rates = [round(share * found["requests"] / found["seconds"], 2) for share in plan.open_rates]

        def make(rate: float) -> Callable[[object], Workload]:
            return lambda seed: traffic.open(rate, count, seed)

        runs = bench.take_turns((ENGINE, STREAMED), {f"{rate:g}/s": make(rate) for rate in rates})
    return {"rates": {name: compare_cases(cases, ENGINE) for name, cases in runs.items()}, "runs": runs}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(package.__doc__), shapes=list(PLANS), shape="1b")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--burst", action="store_true", help="all requests come at once")
    mode.add_argument("--open", action="store_true", help="requests come at random: an open loop")
    mode.add_argument("--soak", type=float, metavar="SECONDS", help="with readers that stall and connections that are cut")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="requests/s of --open (default: by the engine's)")
    parser.add_argument("--streams", type=int, nargs="+", help="at a time")
    parser.add_argument("--rounds", type=int, help="requests of each stream in a run")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--lengths", choices=lengths.NAMES, default=lengths.FIXED, help="of prompts and answers")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters of rank 16, popular by a Zipf law")
    parser.add_argument("--text", action="store_true", help="send prompts as text, not as token ids")
    parser.add_argument("--check", action="store_true", help="parse every frame of every answer, not of one in 16")
    parser.add_argument("--workers", type=int, help="HTTP workers, if the server has the option")
    parser.add_argument("--clients", type=int, help="processes of the load client")
    chosen = parser.parse_args(arguments)
    plan = PLANS[chosen.shape]
    if chosen.clients:
        plan = replace(plan, clients=chosen.clients)
    run(chosen, plan, chosen.out)


def run(chosen: Any, plan: Plan, folder: Path) -> None:
    from benchmarks.http_load import soak

    name, measure = "", closed_loop
    if chosen.burst:
        name, measure = "burst", burst
    elif chosen.open:
        name, measure = "open", open_loop
    elif chosen.soak is not None:
        name, measure = "soak", soak.soak
    found = measure(chosen, plan)
    kinds = [name, "" if chosen.lengths == lengths.FIXED else chosen.lengths.replace("_", "-")]
    kinds += [f"{chosen.adapters}-adapters" if chosen.adapters else "", "text" if chosen.text else ""]
    asked = {key: value for key, value in vars(chosen).items() if key not in ("out", "mps") and value not in (None, [], False)}
    record = {
        "script": "http_load",
        "mode": name or "closed",
        "shape": chosen.shape,
        "plan": {"prompt": plan.prompt, "new": plan.new, "clients": plan.clients, "longest": plan.longest},
        "options": asked,
        **found,
    }
    path = save("-".join(["http-load", chosen.shape, *filter(None, kinds)]), QUESTION, record, folder)
    Console().print(path, highlight=False)
    check(record, is_exact=chosen.device == "cpu")


def check(record: dict[str, Any], *, is_exact: bool) -> None:
    """Raise if answers were wrong; if `is_exact`, also if a request had different texts."""
    runs = [each for cases in record["runs"].values() for found in cases.values() for each in found]
    wrong = {"requests failed": sum(each["errors"] for each in runs)}
    if is_exact:
        wrong["texts differ"] = sum(each.get("differing_texts", 0) for each in runs)
    if "rate_limit" in record:
        limit = record["rate_limit"]
        wrong["rate limits were not exact"] = not limit["is_exact"]
        wrong["wrong keys were accepted"] = limit["wrong_keys"].keys() != {"401"}
    if any(wrong.values()):
        raise SystemExit(", ".join(f"{int(count)} {what}" for what, count in wrong.items() if count))
