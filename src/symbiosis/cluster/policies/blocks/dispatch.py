"""Dispatch: which block instance serves a request next, by BlockLLM's estimate of latency.

latency = T_queue + T_compute + T_transfer + T_load. The owner of the keys and values comes first if it has memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from symbiosis.cluster.policies.blocks.block_queue import ChainRequest
from symbiosis.cluster.policies.blocks.block_state import BlockCluster, BlockInstance
from symbiosis.cluster.policies.blocks.catalog import MeasuredChain
from symbiosis.cluster.policies.blocks.kv_migration import KvMove, plan_kv_move
from symbiosis.cluster.policies.blocks.topology import BlockTopology


class KvRule(StrEnum):
    """Who serves a request whose keys and values a device has."""

    OWNER_FIRST = "owner-first"
    LEAST_BUSY = "least-busy"
    """The instance with the shortest queue; the owner sends it the keys and values."""
    RECOMPUTE = "recompute"
    """As `OWNER_FIRST`, but keys and values are never sent: a request that moves computes its whole chain again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchConfig:
    kv_rule: KvRule = KvRule.OWNER_FIRST
    is_adaptive: bool = True
    """Whether equivalent chains may serve the tenants that allow them."""
    behind: float = 1.5
    """An instance is behind if a request takes so many times as long there as on an idle device."""
    near_s: float = 0.002
    """Candidates within so many seconds of the best count as equal: the nearest one serves."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The next block of a request, and where."""

    block: str
    device: int
    latency_s: float
    transfer_s: float
    """Until the request is there, on idle links."""
    size: int
    """Bytes of its rows on the way."""
    instance: BlockInstance | None
    """None: the block has to be loaded first."""
    load_s: float = 0.0
    evicted: Sequence[BlockInstance] = ()
    """Idle instances that make room for the block."""
    move: KvMove | None = None
    """Of keys and values, from the owner."""


class BlockDispatcher:
    """Reads the state and decides; the caller carries it out."""

    def __init__(self, cluster: BlockCluster, config: DispatchConfig) -> None:
        self._cluster, self.config = cluster, config

    def next_hop(self, request: ChainRequest, source: int | None, now: float) -> Hop | None:
        """From a device, or from the scheduler (None). None: no device has room."""
        if request.has_owner:
            return self._return_hop(request, source, now)
        return self._first_hop(request, source, now)

    def can_stay(self, request: ChainRequest, device: int, now: float) -> bool:
        """Whether `next_hop` is the device where the request is, with nothing to reserve or to wait for: the usual case."""
        position = request.position
        return (
            position < len(request.devices)
            and request.devices[position] == device
            and request.held[position] > request.prompt + request.generated
            and request.kv_ready[position] <= now
            and not request.has_lost_kv
            and self.config.kv_rule is not KvRule.LEAST_BUSY
        )

    def can_admit(self, request: ChainRequest, now: float) -> bool:
        """Whether some allowed chain has room for the whole prompt, block by block."""
        return any(all(self._has_room(block, request, now) for block in chain.blocks) for chain in self._chains(request))

    def victim(self, device: int, request: ChainRequest) -> ChainRequest | None:
        """The youngest request on a device, if it is younger than `request`."""
        found = [each for instance in self._cluster.devices[device].instances.values() for each in instance.requests.values()]
        youngest = max(found, key=lambda each: each.number, default=request)
        return youngest if youngest.number > request.number else None

    # A request that was here before

    def _return_hop(self, request: ChainRequest, source: int | None, now: float) -> Hop | None:
        cluster, position = self._cluster, request.position
        owner = cluster.instance(request, position)
        size = owner.cost.row_bytes * (request.tokens if request.is_prefill else 1)
        at = owner.device if source is None else source
        if self.config.kv_rule is KvRule.LEAST_BUSY:
            least = min(
                (each for each in self._ready(owner.block, now) if each is owner or self._fits(each, request)),
                key=lambda each: (cluster.devices[each.device].queue_s(now), each is not owner, each.device),
                default=owner,
            )
            if least is not owner:
                return self._moved(request, owner, least, at, size, now)
        if cluster.needs_bytes(request, position) <= cluster.devices[owner.device].free_bytes:
            transfer_s = cluster.topology.transfer_s(at, owner.device, size)
            return Hop(owner.block, owner.device, 0.0, transfer_s, size, owner)
        others = [
            self._moved(request, owner, each, at, size, now)
            for each in self._ready(owner.block, now)
            if each is not owner and self._fits(each, request)
        ]
        return min(others, key=lambda each: (each.latency_s, each.device), default=None)

    def _moved(self, request: ChainRequest, owner: BlockInstance, target: BlockInstance, at: int, size: int, now: float) -> Hop:
        topology, rule = self._cluster.topology, self.config.kv_rule
        move = plan_kv_move(
            owner.cost,
            request.tokens,
            topology.transfer_s(owner.device, target.device, 0),
            topology.local_bytes_s if topology.is_local(owner.device, target.device) else topology.net_bytes_s,
            can_compute=request.position == 0,
            can_copy=rule is not KvRule.RECOMPUTE,
        )
        hop_s = topology.transfer_s(at, target.device, size)
        queue_s = self._cluster.devices[target.device].queue_s(now)
        compute_s = target.cost.row_s + target.cost.prompt_s(move.computed)
        latency_s = queue_s + compute_s + max(hop_s, move.seconds)
        return Hop(target.block, target.device, latency_s, hop_s, size, target, move=move)

    # A request on its first pass

    def _chains(self, request: ChainRequest) -> Sequence[MeasuredChain]:
        return request.chains if self.config.is_adaptive else request.chains[:1]

    def _first_hop(self, request: ChainRequest, source: int | None, now: float) -> Hop | None:
        position = request.position
        options: dict[str, bool] = {}  # blocks, and whether the best chain has them
        rests: dict[str, Sequence[str]] = {}
        for chain in self._chains(request):
            options.setdefault(chain.blocks[position], not options)
            rests.setdefault(chain.blocks[position], chain.blocks[position + 1 :])
        best: dict[bool, Hop] = {}
        for block, is_own in options.items():
            hop = self._best_of(block, rests[block], request, source, now)
            if hop is not None and (is_own not in best or hop.latency_s < best[is_own].latency_s):
                best[is_own] = hop
        own, other = best.get(True), best.get(False)
        if own is None or other is None:
            return own or other
        return other if other.latency_s < own.latency_s and self._is_behind(own, request) else own

    def _is_behind(self, hop: Hop, request: ChainRequest) -> bool:
        costs = [self._cluster.catalog.blocks[block] for block in request.chains[0].blocks[request.position :]]
        idle_s = sum(cost.fixed_s + cost.prompt_s(request.tokens) for cost in costs)
        return hop.latency_s > self.config.behind * idle_s

    def _best_of(self, block: str, rest: Sequence[str], request: ChainRequest, source: int | None, now: float) -> Hop | None:
        found = list(self._candidates(block, rest, request, source, now))
        if not found:
            found += self._loads(block, rest, request, source, now)
        least = min((each.latency_s for each in found), default=0.0)
        topology = self._cluster.topology

        def order(hop: Hop) -> tuple[int, float, int]:
            is_far = 0 if source is None or hop.device == source else 2 - topology.is_local(source, hop.device)
            return is_far, hop.latency_s, hop.device

        return min((each for each in found if each.latency_s <= least + self.config.near_s), key=order, default=None)

    def _candidates(
        self, block: str, rest: Sequence[str], request: ChainRequest, source: int | None, now: float
    ) -> Iterator[Hop]:
        cluster = self._cluster
        size = self._size(request, source)
        for instance in cluster.instances_of(block):
            if not self._fits(instance, request):
                continue
            device = instance.device
            transfer_s = 0.0 if source is None else cluster.topology.transfer_s(source, device, size)
            load_s = max(0.0, instance.ready_at - now)
            # passes end before others begin: a request that stays waits for its own block only
            queue_s = instance.cycle_s if device == source else cluster.devices[device].queue_s(now)
            latency_s = queue_s + instance.compute_s(request) + transfer_s + max(0.0, load_s - transfer_s)
            latency_s += self._rest_s(rest, device, now)
            yield Hop(block, device, latency_s, transfer_s, size, instance)

    def _rest_s(self, rest: Sequence[str], device: int, now: float) -> float:
        """T_queue and latency of the links of a chain's other blocks: nothing while they are on the same device."""
        cluster, total_s = self._cluster, 0.0
        for block in rest:
            if block in cluster.devices[device].instances:
                continue
            ways = [
                (cluster.devices[each.device].queue_s(now) + cluster.topology.transfer_s(device, each.device, 0), each.device)
                for each in cluster.instances_of(block)
            ]
            if ways:
                more_s, device = min(ways)
                total_s += more_s
        return total_s

    def _loads(self, block: str, rest: Sequence[str], request: ChainRequest, source: int | None, now: float) -> Iterator[Hop]:
        """Devices that could load the block, and what T_load would be."""
        cluster, cost, topology = self._cluster, self._cluster.catalog.blocks[block], self._cluster.topology
        size, kv_bytes = self._size(request, source), cluster.kv_bytes(cost, request.tokens + 1)
        for device in cluster.devices:
            loaded = cluster.catalog.added_bytes(block, device.instances)
            if block in device.instances or (evicted := cluster.evictable(device.number, loaded + kv_bytes, now)) is None:
                continue
            transfer_s = 0.0 if source is None else topology.transfer_s(source, device.number, size)
            load_s = swap_s(loaded, sum(each.cost.weight_bytes for each in evicted), topology)
            queue_s = device.queue_s(now)
            shown_s = load_s if queue_s > 0 else max(load_s - transfer_s, 0.0)
            latency_s = queue_s + cost.fixed_s + cost.prompt_s(request.tokens) + transfer_s + shown_s
            latency_s += self._rest_s(rest, device.number, now)
            yield Hop(block, device.number, latency_s, transfer_s, size, None, load_s, evicted)

    def _size(self, request: ChainRequest, source: int | None) -> int:
        """Bytes that travel: from the scheduler token ids, from a block its output."""
        if source is None or not request.blocks:
            return 0 if source is None else 4 * request.tokens
        return self._cluster.catalog.blocks[request.blocks[-1]].row_bytes * request.tokens

    def _ready(self, block: str, now: float) -> list[BlockInstance]:
        return [each for each in self._cluster.instances_of(block) if each.ready_at <= now]

    def _fits(self, instance: BlockInstance, request: ChainRequest) -> bool:
        needed = self._cluster.kv_bytes(instance.cost, request.tokens + 1)
        return needed <= self._cluster.devices[instance.device].free_bytes

    def _has_room(self, block: str, request: ChainRequest, now: float) -> bool:
        if any(self._fits(each, request) for each in self._cluster.instances_of(block)):
            return True
        return next(self._loads(block, (), request, None, now), None) is not None


def swap_s(loaded: int, evicted: int, topology: BlockTopology) -> float:
    """T_swap: an old block of `evicted` bytes goes, one of `loaded` bytes comes."""
    return evicted / topology.memory_bytes_s + loaded / topology.load_bytes_s
