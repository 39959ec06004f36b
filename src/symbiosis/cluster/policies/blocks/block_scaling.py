"""Scaling of single blocks: an instance whose queue is long gets a second one elsewhere, and half of its requests move there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.cluster.policies.blocks.block_placement import TrafficCounter
from symbiosis.cluster.policies.blocks.block_queue import ChainRequest
from symbiosis.cluster.policies.blocks.block_state import BlockCluster, BlockInstance
from symbiosis.cluster.policies.blocks.dispatch import swap_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScalingConfig:
    queue_share: float = 0.25
    """Scale an instance whose requests are more than this share of what the memory of its device could hold."""
    gain: float = 2.0
    """The other device has a queue that takes at most one of so many parts of the time."""
    per_tick: int = 2
    """Most instances that start in one decision."""


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """Load the block of `instance` onto a device."""

    instance: BlockInstance
    device: int
    load_s: float
    evicted: Sequence[BlockInstance]


def queue_share(cluster: BlockCluster, instance: BlockInstance) -> float:
    """The requests of an instance, by how many its device could hold: those and what fits into the free memory."""
    count = len(instance.requests)
    if not count:
        return 0.0
    each = max(1.0, instance.kv_tokens / count * instance.cost.kv_bytes)
    return count / (count + max(0, cluster.devices[instance.device].free_bytes) / each)


def choose_scale_outs(
    cluster: BlockCluster, traffic: TrafficCounter, config: BlockScalingConfig, now: float
) -> list[ScaleOut]:
    """The heaviest instances first. A block that is being loaded somewhere does not scale again yet."""
    heavy = sorted(
        (
            (share, each)
            for each in cluster.instances
            if (share := queue_share(cluster, each)) > config.queue_share
            and each.cost.fixed_s > 0
            and all(other.ready_at <= now for other in cluster.instances_of(each.block))
        ),
        key=lambda found: (-found[0], found[1].device, found[1].block),
    )
    chosen: list[ScaleOut] = []
    taken_devices: set[int] = set()
    taken_blocks: set[str] = set()
    for _, instance in heavy:
        if len(chosen) == config.per_tick:
            break
        if instance.block in taken_blocks:
            continue
        found = _target(cluster, traffic, config, instance, taken_devices, now)
        if found is not None:
            chosen.append(found)
            taken_devices.add(found.device)
            taken_blocks.add(instance.block)
    return chosen


def _target(
    cluster: BlockCluster,
    traffic: TrafficCounter,
    config: BlockScalingConfig,
    instance: BlockInstance,
    taken: set[int],
    now: float,
) -> ScaleOut | None:
    """The device with the shortest queue; of equal ones that whose server has most traffic with the block."""
    topology, cost = cluster.topology, instance.cost
    most_s = cluster.devices[instance.device].queue_s(now) / config.gain
    best: tuple[tuple[float, float, int], ScaleOut] | None = None
    for device in cluster.devices:
        if device.number in taken or instance.block in device.instances or device.queue_s(now) > most_s:
            continue
        loaded = cluster.catalog.added_bytes(instance.block, device.instances)
        evicted = cluster.evictable(device.number, loaded + instance.kv_tokens * cost.kv_bytes // 2, now)
        if evicted is None:
            continue
        near = sum(
            traffic.between(instance.block, each.block)
            for each in cluster.instances
            if topology.is_local(each.device, device.number)
        )
        load_s = swap_s(loaded, sum(each.cost.weight_bytes for each in evicted), topology)
        order = (round(device.queue_s(now), 2), -near, device.number)
        if best is None or order < best[0]:
            best = order, ScaleOut(instance, device.number, load_s, evicted)
    return None if best is None else best[1]


def requests_to_move(cluster: BlockCluster, source: BlockInstance, target: BlockInstance) -> list[ChainRequest]:
    """Every second request, the youngest first, as far as the target's memory goes. Requests on their first pass stay."""
    settled = [each for each in source.requests.values() if not each.is_prefill and len(each.chains) == 1]
    settled.sort(key=lambda each: -each.number)
    free, chosen = cluster.devices[target.device].free_bytes, []
    for request in settled[: max(0, len(source.requests) - len(target.requests)) // 2]:
        free -= cluster.kv_bytes(target.cost, request.tokens + 1)
        if free < 0:
            break
        chosen.append(request)
    return chosen
