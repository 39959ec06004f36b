"""Scaling: how many engines the cluster needs. From the work of requests, not from their number.

The work of a request is the time that it adds to steps: prefill, and its decode rows. An engine whose requests add `u` seconds
of work per second takes steps of fixed / (1 − u) seconds, so the objective for a token bounds `u`. KV cache in use bounds the
number of engines from the other side. Scaling up follows the present need and its trend over the start-up time of an engine.
Scaling down follows the largest need of the last `hold_s` seconds.

Work per request has a heavy tail: a few long prompts in a window would look like a rise. So the need is the rate of arrivals,
which has none, times the mean work of a longer time. A short window counts where it differs by more than chance explains.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """Margins of the number of engines."""

    min_engines: int = 1
    max_engines: int = 1 << 20
    fill: float = 0.9
    """Most work on average, as a share of what an engine may take (`max_utilization`)."""
    max_utilization: float = 0.9
    """Most seconds of work per second that an engine may take, whatever the objective allows."""
    min_utilization: float = 0.5
    """What it may take in any case: steps of an engine that is too slow for the objective take twice their fixed time."""
    tpot_s: float = 0.08
    """Objective for the mean time of a token, with room for noise."""
    kv_share: float = 0.85
    """Most of the KV cache in use, on average."""
    window_s: float = 60.0
    """Arrivals of this time are the present rate."""
    jump_s: float = 5.0
    """Arrivals of this time are, where there are significantly more."""
    mean_s: float = 180.0
    """Time constant of the mean work of a request."""
    hold_s: float = 60.0
    """No engine leaves that was needed within this time."""
    significance: float = 4.0
    """Standard deviations of a number of arrivals that make a jump, or a trend."""
    wait_s: float = 1.0
    """Time that requests of a burst may wait: well below the objective for the first token."""
    late_share: float = 0.003
    """Most requests that wait longer."""
    drain_s: float = 10.0
    """Time that the backlog of the cluster's queue is worked off in."""


class ArrivalRate:
    """Arrivals of the last seconds, and the mean work of a request."""

    def __init__(self, window_s: float, jump_s: float, mean_s: float) -> None:
        self._window, self._jump = max(2, round(window_s)), max(1, round(jump_s))
        self._keep = 1 - 1 / mean_s
        self._counts: deque[int] = deque(maxlen=2 * self._window)
        self._count = 0
        self._requests = self._work = self._squares = 0.0  # with fading weights

    def add(self, prefill_s: float, decode_s: float) -> None:
        self._count += 1
        self._requests += 1
        self._work += prefill_s + decode_s
        self._squares += prefill_s * prefill_s

    def roll(self) -> None:
        """End of a second."""
        self._counts.append(self._count)
        self._count = 0
        self._requests *= self._keep
        self._work *= self._keep
        self._squares *= self._keep

    def rate(self, significance: float) -> tuple[float, float]:
        """Requests per second now, and their rise per second where it is significant."""
        counts = list(self._counts)
        recent, before = counts[-self._window :], counts[: -self._window]
        rate = sum(recent) / max(1, len(recent))
        last = counts[-self._jump :]
        fast = sum(last) / max(1, len(last))
        if fast > rate + significance * math.sqrt(max(rate, 1 / self._window) / len(last)):
            return fast, 0.0
        if len(before) < self._window:
            return rate, 0.0
        earlier = sum(before) / len(before)
        if rate - earlier > significance * math.sqrt((rate + earlier) / self._window):
            return rate, (rate - earlier) / self._window
        return rate, 0.0

    @property
    def mean_work_s(self) -> float:
        return self._work / self._requests if self._requests else 0.0

    @property
    def mean_square_s(self) -> float:
        """Of the prefill of a request."""
        return self._squares / self._requests if self._requests else 0.0


class WorkScaling:
    """Desired number of engines, once a second."""

    def __init__(self, config: ScalingConfig, *, start_s: float, utilization: float) -> None:
        """`utilization` is the work per second that one engine may take."""
        self.config, self.utilization = config, utilization
        self._start_s = start_s
        self._arrivals = ArrivalRate(config.window_s, config.jump_s, config.mean_s)
        self._needs: deque[tuple[int, int]] = deque()  # (second, need): decreasing needs, the largest of the hold first
        self._second = 0

    def arrive(self, prefill_s: float, decode_s: float) -> None:
        """A request arrived whose prefill and decode rows add so much time to steps."""
        self._arrivals.add(prefill_s, decode_s)

    def desired(self, *, backlog_s: float, kv_share: float) -> int:
        """Engines needed now. `backlog_s` is work that no engine has taken, `kv_share` KV cache in use, in engines."""
        config, arrivals, second = self.config, self._arrivals, self._second
        self._second += 1
        arrivals.roll()
        rate, rise = arrivals.rate(config.significance)
        rate += rise * (self._start_s + config.window_s / 2)
        work, variance = rate * arrivals.mean_work_s, rate * arrivals.mean_square_s
        margin = margin_for_bursts(work, variance, wait_s=config.wait_s, late_share=config.late_share)
        by_work = (work + margin + backlog_s / config.drain_s) / (self.utilization * config.fill)
        need = math.ceil(max(by_work, kv_share / config.kv_share) - 1e-9)
        need = min(config.max_engines, max(config.min_engines, need))
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((second, need))
        while self._needs[0][0] <= second - config.hold_s:
            self._needs.popleft()
        return need

    @property
    def held(self) -> int:
        """The largest need of the last `hold_s` seconds. Before that, all engines: a director that starts knows no load yet."""
        return self._needs[0][1] if self._second >= self.config.hold_s else self.config.max_engines


def allowed_utilization(config: ScalingConfig, fixed_s: float) -> float:
    """Work per second at which steps of `fixed_s` and that work take no longer than the objective for a token.

    Less than `min_utilization` would leave engines idle while requests wait, for an objective that they cannot meet.
    """
    return max(config.min_utilization, min(config.max_utilization, 1 - fixed_s / config.tpot_s))


def margin_for_bursts(work: float, variance: float, *, wait_s: float, late_share: float) -> float:
    """Work per second to keep free, so that at most `late_share` of all requests wait longer than `wait_s`.

    In heavy traffic the backlog of a queue is exponential with the mean variance / (2 × margin). Engines work off
    wait_s × (work + margin) of it within the wait: margin × (work + margin) follows.
    """
    product = math.log(1 / late_share) * variance / (2 * wait_s)
    return (math.sqrt(work * work + 4 * product) - work) / 2


def change_of_engines(need: int, held: int, *, ready: int, starting: int) -> int:
    """Engines to start (positive) or to drain (negative). Starting engines count, so a rise is asked for once."""
    there = ready + starting
    if need > there:
        return need - there
    return -min(there - held, ready) if held < there else 0
