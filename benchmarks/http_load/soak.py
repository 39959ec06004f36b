"""Do readers that stall, and connections that are cut, cost the others anything?

So many streams for so long (`--soak SECONDS`), of 64 tenants with keys, in phases. Before and after ("before", "after") all
read. Between them ("stalled") a tenth of the readers stall in the middle of an answer, most for some seconds and the others
for good, and one in a hundred of the other requests has its connection cut. The readers that stall ask for long answers and
have small buffers, so that the server notices. In the last phase ("limits") one tenant sends more requests than its rate
limit allows, and some have a wrong key: so many are accepted as one limit for all HTTP workers allows.

All other answers are read whole: the number of tokens in the text is the one that was asked for and that the server counts,
and the same request has the same text each time (exact on a CPU; on a GPU bf16 rounds otherwise in other batches). Figures:
their time between tokens in each phase, and the memory of the server.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.http_load.client import Faults, LoadClient, Report, Task, merge, parse_url
from benchmarks.http_load.figures import cpu_shares, summarise
from benchmarks.http_load.host import DEFAULT, HostProcess, serve
from benchmarks.http_load.process_usage import MemorySampler, ServerUsage
from benchmarks.http_load.workload import Request, Traffic

SLOW, FOR_GOOD, CUT = 0.1, 0.2, 0.01
"""Shares: of the streams; of the slow ones; of the other requests."""
PAUSE_S = 5.0
PHASES = {"before": 0.1, "stalled": 0.75, "after": 0.1, "limits": 0.05}
"""Shares of the time."""
LIMITED, WRONG = "limited", "wrong"
LIMITED_CONNECTIONS = 16
_START_S = 1.0
_POINTS = 60
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    streams: int = 512
    tenants: int = 64
    slow_new: int = 1536
    """Tokens of the answers of readers that stall."""
    distinct: int = 16
    """Different requests of each client process."""
    per_minute: int = 1200
    """Rate limit of each tenant."""
    wrong_keys: int = 20


TINY = Plan(streams=20, tenants=4, slow_new=64, distinct=4, per_minute=300, wrong_keys=3)


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    seconds: float

    @property
    def has_faults(self) -> bool:
        return self.name == "stalled"

    @property
    def has_limits(self) -> bool:
        return self.name == "limits"


def soak(chosen: Any, bench_plan: Any) -> dict[str, Any]:
    from benchmarks.http_load.benchmark import served_model
    from symbiosis.server.rate_limits import RequestLimits

    plan = TINY if chosen.shape == "tiny" and not chosen.streams else Plan()
    if chosen.streams:
        plan = replace(plan, streams=chosen.streams[0])
    keys = {f"t{number}": f"key-{number}" for number in range(plan.tenants)} | {LIMITED: f"key-{LIMITED}"}
    limits = RequestLimits(per_minute=plan.per_minute)
    needed = plan.streams * (bench_plan.prompt + bench_plan.new) + round(SLOW * plan.streams) * plan.slow_new
    # with less KV cache the others would wait for the long answers
    longest = replace(
        bench_plan, new=max(bench_plan.new, plan.slow_new), cache_tokens=max(bench_plan.cache_tokens, 3 * needed // 2)
    )
    served = served_model(chosen, longest, plan.streams, keys=keys, requests=limits)
    console = Console(width=160)
    phases = [Phase(name=name, seconds=share * chosen.soak) for name, share in PHASES.items()]
    runs: dict[str, dict[str, Any]] = {}
    with LoadClient(bench_plan.clients + 3) as client, HostProcess(serve, served) as server:
        traffic = Traffic(vocabulary=server.facts["vocabulary"], prompt=bench_plan.prompt, new=bench_plan.new)
        usage = ServerUsage(server.pid)
        tasks = Tasks(plan, traffic, bench_plan.clients, server.facts["url"], is_in_words=chosen.shape != DEFAULT)
        client.run(tasks.of(Phase(name="warm-up", seconds=min(5.0, chosen.soak / 10))))
        with MemorySampler(usage, min(1.0, chosen.soak / 20)) as memory:
            for phase in phases:
                before, begin = usage.cpu_s(), time.monotonic()
                reports = client.run(tasks.of(phase))
                runs[phase.name] = figures = tasks.figures(phase, reports)
                after = usage.cpu_s()
                used = {name: [late - early for early, late in zip(before[name], after[name], strict=False)] for name in before}
                figures["cpu_cores"] = cpu_shares(merge(reports), used, time.monotonic() - begin)
                figures["memory"] = summarise_memory([each for each in memory.samples if each[0] >= begin])
                console.print(phase.name, figures, highlight=False)
    usual = statistics.median(runs[name]["others"]["gap_p99_s"] for name in ("before", "after"))
    return {
        "soak": {"streams": plan.streams, "tenants": plan.tenants, "slow": SLOW, "for_good": FOR_GOOD, "cut": CUT},
        "gap_p99_ratio": runs["stalled"]["others"]["gap_p99_s"] / usual,
        "rate_limit": runs["limits"]["rate_limit"],
        "phases": runs,
        "runs": {name: {kind: [found[kind]] for kind in ("others", "pausing")} for name, found in runs.items()},
    }


class Tasks:
    """What the client processes do: others, readers that pause, readers that stall for good, the limited tenant."""

    def __init__(self, plan: Plan, traffic: Traffic, clients: int, url: str, *, is_in_words: bool) -> None:
        self._plan, self._clients, self._address, self._is_in_words = plan, clients, parse_url(url), is_in_words
        slow = max(2, round(SLOW * plan.streams))
        self._for_good = max(1, round(FOR_GOOD * slow))
        self._pausing, self._others = slow - self._for_good, plan.streams - slow
        requests = traffic.requests((clients + 2) * plan.distinct, "soak")
        keyed = [replace(each, key=f"key-{number % plan.tenants}") for number, each in enumerate(requests)]
        self._requests = [keyed[place : place + plan.distinct] for place in range(0, len(keyed), plan.distinct)]
        short = replace(requests[0], new=1)
        count = plan.per_minute + plan.per_minute // 4
        wrong = [replace(short, key=f"key-{WRONG}")] * plan.wrong_keys
        self._limited = [*wrong, *([replace(short, key=f"key-{LIMITED}")] * count)]

    def of(self, phase: Phase) -> list[Task]:
        start = time.monotonic() + _START_S
        common = {"start": start, "until": start + phase.seconds}
        cut = Faults(cut=CUT) if phase.has_faults else None
        tasks = [
            self._task(
                self._requests[number],
                len(range(number, self._others, self._clients)),
                faults=cut,
                keep_every=1,
                **common,
            )
            for number in range(self._clients)
        ]
        for requests, connections, faults in (
            (self._requests[-2], self._pausing, Faults(stalled=1.0, pause_s=min(PAUSE_S, phase.seconds / 3))),
            (self._requests[-1], self._for_good, Faults(stalled_for_good=1.0)),
        ):
            long = [replace(request, new=self._plan.slow_new) for request in requests]
            given = faults if phase.has_faults else None
            tasks.append(self._task(long, connections, faults=given, has_small_buffers=True, **common))
        if phase.has_limits:
            tasks.append(self._task(self._limited, LIMITED_CONNECTIONS, stream=False, start=start))
        return tasks

    def _task(self, requests: Sequence[Request], connections: int, **options: Any) -> Task:
        return Task(
            address=self._address,
            requests=[*enumerate(requests)],
            connections=connections,
            is_in_words=self._is_in_words,
            **{"stream": True, "keep_every": 0, **options},
        )

    def figures(self, phase: Phase, reports: Sequence[Report]) -> dict[str, Any]:
        others, (pausing, for_good) = merge(reports[: self._clients]), reports[self._clients : self._clients + 2]
        found = {
            "seconds": phase.seconds,
            "others": {**summarise(others), "cut": sum(answer.is_cut for answer in others.answers)},
            "pausing": {**summarise(pausing), "stalled": sum(answer.is_stalled for answer in pausing.answers)},
            "for_good": {**summarise(for_good), "connections": self._for_good},
        }
        if phase.has_limits:
            found["rate_limit"] = self._check_limit(reports[-1])
        return found

    def _check_limit(self, report: Report) -> dict[str, Any]:
        """The bucket is full at the first request, and refilled at a constant rate until the last."""
        is_wrong = [answer.request < self._plan.wrong_keys for answer in report.answers]
        wrong = [answer.status for answer, is_so in zip(report.answers, is_wrong, strict=True) if is_so]
        limited = [answer for answer, is_so in zip(report.answers, is_wrong, strict=True) if not is_so]
        rate = self._plan.per_minute / 60
        spread_s = max(answer.due for answer in limited) - min(answer.done for answer in limited)
        whole_s = max(answer.done for answer in limited) - min(answer.due for answer in limited)
        most_sent = len(limited)  # a slow machine may not reach the limit
        least = min(most_sent, self._plan.per_minute + int(rate * spread_s))
        most = min(most_sent, self._plan.per_minute + int(rate * whole_s) + 1)
        accepted = sum(answer.status == 200 for answer in limited)
        statuses = Counter(str(answer.status) for answer in limited)
        return {
            "statuses": dict(statuses),
            "allowed": [least, most],
            "is_exact": least <= accepted <= most and statuses.keys() <= {"200", "429"},
            "wrong_keys": dict(Counter(map(str, wrong))),
        }


def summarise_memory(samples: Sequence[tuple[float, dict[str, int]]]) -> dict[str, Any]:
    """Points over time, and the growth of the second half in MiB a minute by least squares."""
    if len(samples) < 4:
        return {}
    start = samples[0][0]
    late = samples[len(samples) // 2 :]
    found: dict[str, Any] = {"seconds": [round(when - start, 1) for when, _ in samples[:: len(samples) // _POINTS + 1]]}
    for name in samples[0][1]:
        found[f"{name}_mib"] = [round(sizes[name] / MIB) for _, sizes in samples[:: len(samples) // _POINTS + 1]]
        slope = statistics.linear_regression([when for when, _ in late], [sizes[name] / MIB for _, sizes in late]).slope
        found[f"{name}_mib_per_minute"] = round(60 * slope, 2)
    return found
