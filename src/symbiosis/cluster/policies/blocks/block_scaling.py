"""Scaling of blocks: a device whose queues are long gives half of a chain's requests to instances on another one.

Blocks of a chain on one device scale as one: a single block elsewhere would cost its requests two hops for each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.cluster.policies.blocks.block_placement import TrafficCounter
from symbiosis.cluster.policies.blocks.block_queue import ChainRequest
from symbiosis.cluster.policies.blocks.block_state import BlockCluster, BlockDevice, BlockInstance
from symbiosis.cluster.policies.blocks.dispatch import swap_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScalingConfig:
    queue_share: float = 0.5
    """Scale where requests take more than this share of the memory that weights leave: that much is the longest queue."""
    gain: float = 2.0
    """The other device has a queue that takes at most one of so many parts of the time."""
    per_tick: int = 2
    """Most chains that scale in one decision."""


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """Load blocks of a chain onto a device, then move requests there."""

    blocks: tuple[str, ...]
    source: int
    target: int
    missing: tuple[str, ...]
    """Of the blocks, those that the target does not have."""
    load_s: float
    evicted: Sequence[BlockInstance]


def queue_share(device: BlockDevice) -> float:
    """Memory of the requests on a device, by what weights leave."""
    return device.kv_bytes / max(1, device.memory_bytes - device.weight_bytes)


def choose_scale_outs(cluster: BlockCluster, traffic: TrafficCounter, config: BlockScalingConfig, now: float) -> list[ScaleOut]:
    """The heaviest devices first. A block that is being loaded somewhere does not scale again yet."""
    heavy = [device for device in cluster.devices if queue_share(device) > config.queue_share]
    chosen: list[ScaleOut] = []
    taken: set[int] = set()
    for device in sorted(heavy, key=lambda each: (-each.queue_s(now), each.number)):
        if len(chosen) == config.per_tick:
            break
        blocks = _heaviest_chain(device)
        if not blocks or any(each.ready_at > now for block in blocks for each in cluster.instances_of(block)):
            continue
        found = _target(cluster, traffic, config, device, blocks, taken, now)
        if found is not None:
            chosen.append(found)
            taken |= {found.source, found.target}
    return chosen


def _heaviest_chain(device: BlockDevice) -> tuple[str, ...]:
    """The blocks on a device of the chain with the most requests there."""
    counts: Counter[tuple[str, ...]] = Counter()
    seen: set[int] = set()
    for instance in device.instances.values():
        for request in instance.requests.values():
            if request.number not in seen and not request.is_prefill:
                seen.add(request.number)
                counts[request.chains[0].blocks] += 1
    if not counts:
        return ()
    chain = min(counts, key=lambda each: (-counts[each], each))
    return tuple(block for block in chain if block in device.instances)


def _target(
    cluster: BlockCluster,
    traffic: TrafficCounter,
    config: BlockScalingConfig,
    source: BlockDevice,
    blocks: tuple[str, ...],
    taken: set[int],
    now: float,
) -> ScaleOut | None:
    """The device with the shortest queue; of equal ones that whose server has most traffic with the blocks."""
    topology, most_s = cluster.topology, source.queue_s(now) / config.gain
    needed = sum(source.instances[block].kv_tokens * source.instances[block].cost.kv_bytes for block in blocks) // 4
    best: tuple[tuple[float, float, int], ScaleOut] | None = None
    for device in cluster.devices:
        if device.number in taken or device is source or device.queue_s(now) > most_s:
            continue
        missing = tuple(block for block in blocks if block not in device.instances)
        present = list(device.instances)
        loaded = sum(cluster.catalog.added_bytes(block, [*present, *missing[:index]]) for index, block in enumerate(missing))
        evicted = cluster.evictable(device.number, loaded + needed, now, keep=blocks)
        if evicted is None:
            continue
        near = sum(
            traffic.between(block, each.block)
            for block in blocks
            for each in cluster.instances
            if topology.is_local(each.device, device.number)
        )
        load_s = swap_s(loaded, sum(each.cost.weight_bytes for each in evicted), topology) if missing else 0.0
        order = (round(device.queue_s(now), 2), -near, device.number)
        if best is None or order < best[0]:
            best = order, ScaleOut(blocks, source.number, device.number, missing, load_s, evicted)
    return None if best is None else best[1]


def requests_to_move(cluster: BlockCluster, plan: ScaleOut) -> list[tuple[ChainRequest, list[int]]]:
    """Requests, and their positions whose keys and values go along; the youngest first, as far as the target's memory goes.

    Half of those that the source has more than the target. A request on its first pass stays.
    """
    source, target = cluster.devices[plan.source], cluster.devices[plan.target]
    found: dict[int, tuple[ChainRequest, list[int]]] = {}
    for block in plan.blocks:
        if block in source.instances and block in target.instances:
            for request in source.instances[block].requests.values():
                if not request.is_prefill:
                    found.setdefault(request.number, (request, []))[1].append(request.blocks.index(block))
    whole = [each for each in found.values() if len(each[1]) == len(plan.blocks)]
    others = min((len(target.instances[block].requests) for block in plan.blocks if block in target.instances), default=0)
    free, chosen = target.free_bytes, []
    for request, positions in sorted(whole, key=lambda each: -each[0].number)[: max(0, len(whole) - others) // 2]:
        free -= sum(request.held[at] * cluster.catalog.blocks[request.blocks[at]].kv_bytes for at in positions)
        if free < 0:
            break
        chosen.append((request, positions))
    return chosen
