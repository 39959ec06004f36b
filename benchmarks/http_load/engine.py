"""The same workloads by the engine alone: no HTTP, no text."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from benchmarks.http_load.answer import Answer
from benchmarks.http_load.client import Report
from benchmarks.http_load.workload import Request, Workload

_WAIT_S = 1.0


class EngineAlone:
    """Steps an engine core as `Engine.generate` does, with as many sequences as the workload has at a time."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def run(self, workload: Workload) -> Report:
        """Bookkeeping in a step is a list of ids. All else is computed after the run."""
        core, requests = self._core, workload.requests
        at_once = workload.concurrency or len(requests)
        due: dict[str, tuple[int, float]] = {}
        steps: list[tuple[float, list[str]]] = []
        failed, num_added, num_running = 0, 0, 0
        start, cpu_s = time.monotonic(), time.process_time()
        while num_running or num_added < len(requests):
            while num_added < len(requests) and num_running < at_once:
                arrival_s = requests[num_added].arrival_s
                now = time.monotonic()
                when = now if arrival_s is None else start + arrival_s
                if when > now:
                    if num_running:
                        break
                    time.sleep(when - now)
                due[self._add(requests[num_added])] = num_added, when
                num_added, num_running = num_added + 1, num_running + 1
            num_steps = core.num_steps
            sampled = core.step()
            steps.append((time.monotonic(), [sequence.id for sequence, _, _ in sampled]))
            num_running -= sum(sequence.reason is not None for sequence, _, _ in sampled)
            if core.num_steps == num_steps and num_running:
                core.wait(_WAIT_S)  # for an adapter
            for _ in core.take_failed():
                failed, num_running = failed + 1, num_running - 1
        cpu_s = time.process_time() - cpu_s
        report = make_report(requests, due, steps, failed)
        report.cpu_s.append(cpu_s)
        return report

    def _add(self, request: Request) -> str:
        from symbiosis.serving.scheduling.sequence import Sampling

        sampling = Sampling(temperature=0.0, max_tokens=request.new, ignore_eos=True)
        return str(self._core.add(request.prompt, sampling, adapter=request.adapter).id)


def make_report(
    requests: Sequence[Request], due: dict[str, tuple[int, float]], steps: list[tuple[float, list[str]]], failed: int
) -> Report:
    """As the load client makes it: a token arrives when its step has ended."""
    report, arrivals = Report(), {id: array("d") for id in due}
    for when, ids in steps:
        for id in ids:
            arrivals[id].append(when)
    for id, (number, when) in due.items():
        times = arrivals[id]
        answer = Answer(number, when, requests[number].new, arrivals=times, tokens=len(times), status=200)
        if answer.tokens != answer.new:
            answer.error = f"{answer.tokens} tokens, expected {answer.new} ({failed} sequences failed)"
        if times:
            answer.done = times[-1]
            report.first_s.append(times[0] - when)
            report.gaps_s.extend(answer.gaps())
        answer.arrivals = array("d")
        report.answers.append(answer)
    return report
