"""What the policies of blocks know: devices, the block instances on them, and the requests that these own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from symbiosis.cluster.policies.blocks.block_cost import BlockCost
from symbiosis.cluster.policies.blocks.block_queue import BatchConfig, BlockQueue, ChainRequest
from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.topology import BlockTopology

PAGE_TOKENS = 64
"""Keys and values are reserved in steps of so many tokens."""


@dataclass(slots=True, eq=False)
class BlockInstance:
    """A block on a device, with its queue."""

    block: str
    cost: BlockCost
    device: int
    queue: BlockQueue
    ready_at: float
    """When its weights are loaded."""
    used_at: float
    adapter_s: float
    """Of each further application in a batch."""
    requests: dict[int, ChainRequest] = field(default_factory=dict)
    """By number: those whose keys and values are here, and those that wait for their first pass."""
    kv_tokens: int = 0
    """Reserved."""
    applications: Counter[str] = field(default_factory=Counter)
    """Of its requests."""

    @property
    def cycle_s(self) -> float:
        """Seconds to serve all its requests once: prompts that wait, and the next row of each other one."""
        if not self.requests:
            return 0.0
        cost = self.cost
        batches = -(-len(self.requests) // self.queue.max_rows)
        shared_s = cost.fixed_s * batches + self.adapter_s * (len(self.applications) - 1)
        return shared_s + cost.row_s * len(self.requests) + cost.context_s * self.kv_tokens + self.queue.prefill_s

    def compute_s(self, request: ChainRequest) -> float:
        """T_compute of a request's first pass, among those that are here."""
        more_s = self.adapter_s if request.application.name not in self.applications else 0.0
        return self.cost.prompt_s(request.tokens) + (more_s if self.applications else self.cost.fixed_s)

    def take(self, request: ChainRequest) -> None:
        self.requests[request.number] = request
        self.applications[request.application.name] += 1

    def leave(self, request: ChainRequest) -> None:
        del self.requests[request.number]
        name = request.application.name
        self.applications[name] -= 1
        if not self.applications[name]:
            del self.applications[name]


@dataclass(slots=True, eq=False)
class BlockDevice:
    """One accelerator. It runs one batch at a time."""

    number: int
    memory_bytes: int
    instances: dict[str, BlockInstance] = field(default_factory=dict)
    weight_bytes: int = 0
    kv_bytes: int = 0
    busy_until: float = 0.0

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.weight_bytes - self.kv_bytes

    def queue_s(self, now: float) -> float:
        """T_queue of a request that arrives now."""
        return max(0.0, self.busy_until - now) + sum(each.cycle_s for each in self.instances.values())

    def next_instance(self, now: float) -> BlockInstance | None:
        """Whose batch runs next: the deepest in its chain, then the one that waits longest.

        Passes end before others begin, so requests meet again at the first block of a chain, and run as one batch from there.
        """
        waiting = [each for each in self.instances.values() if len(each.queue) and each.ready_at <= now]
        return min(waiting, key=lambda each: (-each.queue.depth, each.queue.waits_since, each.block), default=None)


class BlockCluster:
    """The state, and its changes. Every change keeps the sums right (`check_integrity`)."""

    def __init__(self, catalog: BlockCatalog, topology: BlockTopology, batches: BatchConfig) -> None:
        self.catalog, self.topology, self._batches = catalog, topology, batches
        self.devices = [BlockDevice(number, topology.memory_bytes) for number in range(topology.num_devices)]
        self._by_block: dict[str, list[BlockInstance]] = {}

    def instances_of(self, block: str) -> list[BlockInstance]:
        return self._by_block.get(block, [])

    @property
    def instances(self) -> Iterator[BlockInstance]:
        for device in self.devices:
            yield from device.instances.values()

    def instance(self, request: ChainRequest, position: int) -> BlockInstance:
        """The owner of its keys and values."""
        return self.devices[request.devices[position]].instances[request.blocks[position]]

    # Instances

    def add_instance(self, block: str, device: int, ready_at: float) -> BlockInstance:
        cost, found = self.catalog.blocks[block], self.devices[device]
        assert block not in found.instances
        queue = BlockQueue(cost, self._batches, self.catalog.adapter_share)
        made = BlockInstance(block, cost, device, queue, ready_at, ready_at, self.catalog.adapter_share * cost.fixed_s)
        found.weight_bytes += self.catalog.added_bytes(block, found.instances)
        found.instances[block] = made
        self._by_block.setdefault(block, []).append(made)
        return made

    def remove_instance(self, instance: BlockInstance) -> None:
        assert not instance.requests
        device = self.devices[instance.device]
        del device.instances[instance.block]
        device.weight_bytes -= self.catalog.added_bytes(instance.block, device.instances)
        self._by_block[instance.block].remove(instance)

    def evictable(self, device: int, size: int, now: float, *, keep: Sequence[str] = ()) -> list[BlockInstance] | None:
        """Idle instances to remove so that `size` bytes are free, the longest idle first; None if that is not enough.

        The last instance of a block stays, and the blocks to `keep`.
        """
        found, chosen = self.devices[device], list[BlockInstance]()
        free, left = found.free_bytes, list(found.instances)
        for each in sorted(found.instances.values(), key=lambda each: (each.used_at, each.block)):
            if free >= size:
                break
            is_last = len(self._by_block[each.block]) == 1
            if not each.requests and each.ready_at <= now and not is_last and each.block not in keep:
                chosen.append(each)
                left.remove(each.block)
                free += self.catalog.added_bytes(each.block, left)
        return chosen if free >= size else None

    # Keys and values

    @staticmethod
    def kv_bytes(cost: BlockCost, tokens: int) -> int:
        """Of a request with so many tokens, in whole pages."""
        return math.ceil(tokens / PAGE_TOKENS) * PAGE_TOKENS * cost.kv_bytes

    def assign(self, request: ChainRequest, instance: BlockInstance, kv_ready: float = 0.0) -> None:
        """The instance becomes the owner of the request's next block, which has none."""
        assert request.position == len(request.devices)
        request.blocks.append(instance.block)
        request.devices.append(instance.device)
        request.held.append(0)
        request.kv_ready.append(kv_ready)
        instance.take(request)
        self.grow(request, request.position)

    def grow(self, request: ChainRequest, position: int) -> None:
        """Reserve what the request's tokens need."""
        instance = self.instance(request, position)
        pages = math.ceil((request.tokens + 1) / PAGE_TOKENS) * PAGE_TOKENS
        more = pages - request.held[position]
        if more > 0:
            request.held[position] = pages
            instance.kv_tokens += more
            self.devices[instance.device].kv_bytes += more * instance.cost.kv_bytes

    def move(self, request: ChainRequest, position: int, target: BlockInstance, kv_ready: float) -> None:
        """Another instance of the same block becomes the owner."""
        held = self._release_at(request, position)
        request.devices[position], request.held[position] = target.device, held
        request.kv_ready[position] = kv_ready
        target.take(request)
        target.kv_tokens += held
        self.devices[target.device].kv_bytes += held * target.cost.kv_bytes

    def release(self, request: ChainRequest) -> None:
        """Its keys and values are gone everywhere; it has no owners."""
        for position in range(len(request.devices)):
            self._release_at(request, position)
        for each in (request.blocks, request.devices, request.held, request.kv_ready):
            each.clear()

    def _release_at(self, request: ChainRequest, position: int) -> int:
        instance, held = self.instance(request, position), request.held[position]
        instance.leave(request)
        instance.kv_tokens -= held
        self.devices[instance.device].kv_bytes -= held * instance.cost.kv_bytes
        return held

    def needs_bytes(self, request: ChainRequest, position: int) -> int:
        """More bytes at its owner for the next token."""
        pages = math.ceil((request.tokens + 1) / PAGE_TOKENS) * PAGE_TOKENS
        return max(0, pages - request.held[position]) * self.instance(request, position).cost.kv_bytes

    def check_integrity(self, requests: Iterable[ChainRequest] = ()) -> None:
        """Sums are those of their parts, and no device has more than its memory. `requests`: all that are under way."""
        for device in self.devices:
            names = list(device.instances)
            weights = sum(self.catalog.added_bytes(block, names[:index]) for index, block in enumerate(names))
            kv = sum(each.kv_tokens * each.cost.kv_bytes for each in device.instances.values())
            assert (weights, kv) == (device.weight_bytes, device.kv_bytes), device.number
            assert device.free_bytes >= 0, (device.number, device.free_bytes)
            for block, instance in device.instances.items():
                assert instance.block == block
                assert instance.device == device.number
                assert instance in self._by_block[block]
                held = sum(
                    each.held[position]
                    for each in instance.requests.values()
                    for position, found in enumerate(each.blocks)
                    if found == block and each.devices[position] == device.number
                )
                assert held == instance.kv_tokens, (block, held, instance.kv_tokens)
        assert sum(map(len, self._by_block.values())) == sum(1 for _ in self.instances)
        for request in requests:
            for position, chain_block in enumerate(request.blocks):
                assert self.devices[request.devices[position]].instances[chain_block].requests[request.number] is request
            served = tuple(request.blocks)
            assert any(chain.blocks[: len(served)] == served for chain in request.application.allowed), served
