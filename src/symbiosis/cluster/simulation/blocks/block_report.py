"""Figures of one simulation of blocks: latencies, throughput, traffic between servers, chains that served."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from symbiosis.cluster.simulation.blocks.block_simulator import BlockRun, BlockTimeline
from symbiosis.cluster.simulation.trace import Trace


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One run."""

    system: str
    trace: str
    requests: int
    applications: int
    latency_p50_s: float
    latency_p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    throughput: float
    """Completion tokens a second, from the first arrival to the last completion."""
    utilization: float
    """Share of all devices' time with a batch."""
    mean_batch: float
    weight_gb: float
    """Of all instances at the start."""
    between_servers_gb: float
    """Rows, keys and values."""
    kv_between_servers_gb: float
    hops_between_servers: int
    transfer_share: float
    """Of the latency of all requests: on the way between devices."""
    moves: int
    preemptions: int
    scale_outs: int
    loads: int
    rejected: int
    adaptive: int
    """Requests served by an equivalent chain."""
    mean_loss: float
    most_loss: float
    """Above the own chain of the application, in nats per token."""
    chains: dict[str, int]
    """Requests by the chain that served them."""
    seconds: float
    """Processor time of the simulation."""
    timeline: BlockTimeline

    def to_json(self, *, timeline: bool = True) -> dict[str, Any]:
        found = asdict(self)
        if not timeline:
            del found["timeline"], found["chains"]
        return found


def make_block_report(
    system: str, trace: Trace, run: BlockRun, *, applications: int, devices: int, seconds: float
) -> BlockReport:
    latencies = np.asarray([each.latency_s for each in run.served] or [0.0])
    first = np.asarray([each.first_token_s for each in run.served] or [0.0])
    losses = np.asarray([each.loss for each in run.served] or [0.0])
    span_s = max(1e-9, run.end_s - (trace.arrivals[0] if len(trace) else 0.0))
    chains = Counter(" > ".join(each.chain) for each in run.served)
    return BlockReport(
        system=system,
        trace=trace.name,
        requests=len(trace),
        applications=applications,
        latency_p50_s=float(np.percentile(latencies, 50)),
        latency_p95_s=float(np.percentile(latencies, 95)),
        ttft_p50_s=float(np.percentile(first, 50)),
        ttft_p95_s=float(np.percentile(first, 95)),
        throughput=sum(each.output for each in run.served) / span_s,
        utilization=run.busy_s / (span_s * devices),
        mean_batch=run.rows / max(1, run.batches),
        weight_gb=run.weight_bytes / 1e9,
        between_servers_gb=(run.row_bytes + run.kv_bytes) / 1e9,
        kv_between_servers_gb=run.kv_bytes / 1e9,
        hops_between_servers=run.hops,
        transfer_share=run.transfer_s / max(1e-9, float(latencies.sum())),
        moves=run.moves,
        preemptions=run.preemptions,
        scale_outs=run.scale_outs,
        loads=run.loads,
        rejected=run.rejected,
        adaptive=int((losses > 0).sum()),
        mean_loss=float(losses.mean()),
        most_loss=float(losses.max()),
        chains=dict(chains.most_common()),
        seconds=seconds,
        timeline=run.timeline,
    )
