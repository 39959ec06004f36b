"""Scaling: how many engines the cluster needs. From the work of requests, not from their number.

The work of a request is the time that it adds to steps: prefill, and its decode rows. An engine whose requests add `u` seconds
of work per second takes steps of fixed / (1 − u) seconds, so the objective for a token bounds `u`. KV cache in use bounds the
number of engines from the other side. Scaling up follows the present need and its trend over the start-up time of an engine.
Scaling down follows the largest need of the last `hold_s` seconds.
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
    fill: float = 0.85
    """Most work on average, as a share of what an engine may take (`max_utilization`)."""
    max_utilization: float = 0.9
    """Most seconds of work per second that an engine may take, whatever the objective allows."""
    tpot_s: float = 0.08
    """Objective for the mean time of a token, with room for noise."""
    kv_share: float = 0.85
    """Most of the KV cache in use, on average."""
    window_s: float = 20.0
    """Arrivals of this time are the present need."""
    trend_s: float = 60.0
    """The trend is taken over this time."""
    hold_s: float = 90.0
    """No engine leaves that was needed within this time."""
    deviations: float = 2.0
    """Standard deviations of the work in `burst_s` that engines are kept ready for."""
    burst_s: float = 5.0
    """Bursts shorter than this wait in queues."""
    drain_s: float = 10.0
    """Time that the backlog of the cluster's queue is worked off in."""


class WorkRate:
    """Work of arrivals per second in buckets of one second, with its sum of squares for the deviation."""

    def __init__(self, window_s: float) -> None:
        self.window = max(1, round(window_s))
        self._buckets: deque[tuple[float, float]] = deque()  # work, squared work of each request
        self._work = self._squares = 0.0
        self._total = self._total_squares = 0.0

    def add(self, work_s: float) -> None:
        self._work += work_s
        self._squares += work_s * work_s

    def roll(self) -> None:
        """End of a second."""
        self._buckets.append((self._work, self._squares))
        self._total += self._work
        self._total_squares += self._squares
        self._work = self._squares = 0.0
        if len(self._buckets) > self.window:
            work, squares = self._buckets.popleft()
            self._total -= work
            self._total_squares -= squares

    @property
    def rate(self) -> float:
        """Seconds of work per second."""
        return max(0.0, self._total) / max(1, len(self._buckets))

    @property
    def deviation(self) -> float:
        """Standard deviation of the work of one second, if arrivals are independent."""
        return math.sqrt(max(0.0, self._total_squares) / max(1, len(self._buckets)))


class WorkScaling:
    """Desired number of engines, once a second."""

    def __init__(self, config: ScalingConfig, *, start_s: float, utilization: float) -> None:
        """`utilization` is the work per second that one engine may take."""
        self.config, self.utilization = config, utilization
        self._start_s = start_s
        self._rate = WorkRate(config.window_s)
        self._rates: deque[float] = deque(maxlen=max(2, round(config.trend_s)))
        self._needs: deque[tuple[int, int]] = deque()  # (second, need): decreasing needs, the largest of the hold first
        self._second = 0

    def arrive(self, work_s: float) -> None:
        """A request arrived that adds so much time to steps."""
        self._rate.add(work_s)

    def desired(self, *, backlog_s: float, kv_share: float) -> int:
        """Engines needed now. `backlog_s` is work that no engine has taken, `kv_share` KV cache in use, in engines."""
        config, second = self.config, self._second
        self._second += 1
        self._rate.roll()
        rate = self._rate.rate
        self._rates.append(rate)
        ahead = self._start_s + config.window_s / 2
        # Less than the whole start-up time as long as the trend is younger than that: one burst is no trend.
        rise = (rate - self._rates[0]) / len(self._rates)
        expected = rate + max(0.0, rise) * min(ahead, float(len(self._rates)))
        margin = config.deviations * self._rate.deviation / math.sqrt(config.burst_s)
        by_work = (expected + margin + backlog_s / config.drain_s) / (self.utilization * config.fill)
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
        """The largest need of the last `hold_s` seconds."""
        return self._needs[0][1] if self._needs else self.config.min_engines


def allowed_utilization(config: ScalingConfig, fixed_s: float) -> float:
    """Work per second at which steps of `fixed_s` and that work take no longer than the objective for a token."""
    return max(0.1, min(config.max_utilization, 1 - fixed_s / config.tpot_s))


def change_of_engines(need: int, held: int, *, ready: int, starting: int) -> int:
    """Engines to start (positive) or to drain (negative). Starting engines count, so a rise is asked for once."""
    there = ready + starting
    if need > there:
        return need - there
    return -min(there - held, ready) if held < there else 0
