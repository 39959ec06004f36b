"""Placement of block instances: how many of each, and on which devices.

By locality, blocks with frequent direct traffic share a device or at least a server. The comparison policy minimises
fragments of memory. Both have the same instances, and the same bound on the load of a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.topology import BlockTopology
from symbiosis.errors import DoesNotFit

_BATCH = 16  # rows that share the fixed time of a block, for the expected load
_FULL = 1.2  # times the mean load: a device with more takes no further block while another one has room
_WEIGHTS = 0.75  # of the memory of a device: the rest is for keys and values, unless blocks fit nowhere else


class PlacementRule(StrEnum):
    LOCALITY = "locality"
    FRAGMENTATION = "fragmentation"
    """Each block, the largest first, goes where it leaves the least memory free."""


class TrafficCounter:
    """How often requests went from one block directly to another."""

    def __init__(self) -> None:
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._out: Counter[str] = Counter()
        self._in: Counter[str] = Counter()

    @classmethod
    def expected(cls, catalog: BlockCatalog) -> TrafficCounter:
        """Before any traffic: own chains, by the weights of their applications, and the way back for the next token."""
        made = cls()
        for application in catalog.applications.values():
            made.add_chain(application.own.blocks, application.weight)
        return made

    def add_chain(self, blocks: Sequence[str], count: float) -> None:
        for source, target in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            self.add(source, target, count)

    def add(self, source: str, target: str, count: float = 1) -> None:
        if source != target:
            self._pairs[source, target] += count  # type: ignore[assignment]
            self._out[source] += count  # type: ignore[assignment]
            self._in[target] += count  # type: ignore[assignment]

    def between(self, one: str, other: str) -> float:
        """Both ways."""
        return self._pairs[one, other] + self._pairs[other, one]

    def total(self, block: str) -> float:
        return self._out[block] + self._in[block]

    def is_single(self, source: str, target: str) -> bool:
        """Whether all traffic of both blocks is that between them, in this direction: on one device they run as one."""
        return 0 < self._pairs[source, target] == self._out[source] == self._in[target]

    @property
    def blocks(self) -> list[str]:
        return sorted(self._out.keys() | self._in.keys())


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """One instance."""

    block: str
    device: int
    load: float
    """Share of the device's time, if the cluster were exactly full."""


def request_s(catalog: BlockCatalog, block: str, prompt: float, output: float) -> float:
    """Seconds that a block takes for one request, in batches of usual size."""
    cost = catalog.blocks[block]
    row_s = cost.fixed_s / _BATCH + cost.row_s + cost.context_s * (prompt + output / 2)
    return cost.prompt_s(round(prompt)) + output * row_s


@dataclass(slots=True)
class _Planned:
    number: int
    free: int
    loads: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> float:
        return sum(self.loads.values())


def place_by_locality(
    catalog: BlockCatalog, topology: BlockTopology, traffic: TrafficCounter, *, prompt: float, output: float
) -> list[PlacedBlock]:
    """As many copies of each chain as its share of the load asks for, each on one device if there is room.

    A chain goes where most of its blocks are already: there they run one batch for both chains. One without room is cut at
    the pair of blocks with the least traffic, and its parts go to one server. `prompt`, `output`: mean lengths. Raises
    `DoesNotFit`.
    """
    seconds: Counter[tuple[str, ...]] = Counter()
    for application in catalog.applications.values():
        chain = application.own.blocks
        each_s = sum(request_s(catalog, block, prompt, output) for block in chain)
        seconds[chain] += application.weight * each_s  # type: ignore[assignment]
    per_device = sum(seconds.values()) / topology.num_devices or 1.0
    parts: list[tuple[float, tuple[str, ...]]] = []
    for chain, whole_s in seconds.items():
        count = max(1, min(topology.num_devices, round(whole_s / per_device)))
        parts += [(whole_s / per_device / count, chain)] * count
    devices = [_Planned(number, topology.memory_bytes) for number in range(topology.num_devices)]
    for load, chain in sorted(parts, key=lambda part: (-part[0], part[1])):
        total_s = sum(request_s(catalog, block, prompt, output) for block in chain) or 1.0
        shares = {block: load * request_s(catalog, block, prompt, output) / total_s for block in chain}
        _place_part(chain, shares, catalog, topology, traffic, devices, None)
    _place_equivalents(catalog, devices, _reserve(topology))
    return [PlacedBlock(block, each.number, load) for each in devices for block, load in each.loads.items()]


def _reserve(topology: BlockTopology) -> int:
    """Bytes of each device that are kept for keys and values."""
    return round((1 - _WEIGHTS) * topology.memory_bytes)


def _place_part(
    blocks: tuple[str, ...],
    shares: dict[str, float],
    catalog: BlockCatalog,
    topology: BlockTopology,
    traffic: TrafficCounter,
    devices: Sequence[_Planned],
    server: int | None,
) -> int:
    """On one device, or cut in two; the server. With `server`, there if possible."""
    load = sum(shares[block] for block in blocks)
    reserve = _reserve(topology)

    def size(device: _Planned) -> int:
        present = list(device.loads)
        return sum(
            catalog.added_bytes(block, [*present, *blocks[:index]])
            for index, block in enumerate(blocks)
            if block not in device.loads
        )

    fits = [each for each in devices if size(each) <= each.free - reserve]
    if not fits and len(blocks) == 1:
        fits = [each for each in devices if size(each) <= each.free]
        if not fits:
            gigabytes = catalog.blocks[blocks[0]].weight_bytes / 1e9
            raise DoesNotFit(f"no device has {gigabytes:.1f} GB for {blocks[0]}: expected more devices or fewer applications")
    if not fits:
        cut = min(
            range(1, len(blocks)), key=lambda at: (traffic.between(blocks[at - 1], blocks[at]), abs(at - len(blocks) / 2))
        )
        found = _place_part(blocks[:cut], shares, catalog, topology, traffic, devices, server)
        return _place_part(blocks[cut:], shares, catalog, topology, traffic, devices, found)

    def order(device: _Planned) -> tuple[bool, bool, float, float, int]:
        is_far = server is not None and topology.server_of[device.number] != server
        shared = sum(shares[block] for block in blocks if block in device.loads)
        return device.load + load > _FULL, is_far, -shared, device.load, device.number

    open_devices = [each for each in fits if each.load + load <= _FULL]
    chosen = min(open_devices, key=order) if open_devices else min(fits, key=lambda each: (each.load, each.number))
    chosen.free -= size(chosen)
    for block in blocks:
        chosen.loads[block] = chosen.loads.get(block, 0.0) + shares[block]
    return topology.server_of[chosen.number]


def _place_equivalents(catalog: BlockCatalog, devices: Sequence[_Planned], reserve: int) -> None:
    """Chains that may serve instead of the own one: on its devices, where memory allows, and somewhere in any case."""
    for application in catalog.applications.values():
        for block in dict.fromkeys(block for chain in application.allowed[1:] for block in chain.blocks):
            size = catalog.blocks[block].weight_bytes
            for each in devices:
                is_near = application.own.blocks[0] in each.loads and each.free - size >= reserve
                is_first = not any(block in other.loads for other in devices) and each is devices[-1]
                if block not in each.loads and (is_near or is_first) and each.free >= size:
                    each.loads[block] = 0.0
                    each.free -= size


def place_by_fragments(instances: Sequence[PlacedBlock], catalog: BlockCatalog, topology: BlockTopology) -> list[PlacedBlock]:
    """The same instances, the largest first, each where it leaves the least memory free. Raises `DoesNotFit`."""
    devices = [_Planned(number, topology.memory_bytes) for number in range(topology.num_devices)]
    reserve = _reserve(topology)
    for item in sorted(instances, key=lambda each: (-catalog.blocks[each.block].weight_bytes, each.block, -each.load)):
        sizes = [catalog.added_bytes(item.block, each.loads) for each in devices]
        size = catalog.blocks[item.block].weight_bytes
        fits = [each for each in devices if each.free >= sizes[each.number] and item.block not in each.loads]
        if not fits:
            raise DoesNotFit(f"no device has {size / 1e9:.1f} GB for {item.block}: expected more devices or fewer applications")
        roomy = [each for each in fits if each.free - reserve >= sizes[each.number]] or fits
        light = [each for each in roomy if each.load + item.load <= _FULL] or [min(roomy, key=lambda each: each.load)]
        chosen = min(light, key=lambda each: (each.free, each.load, each.number))
        chosen.free -= sizes[chosen.number]
        chosen.loads[item.block] = item.load
    return [PlacedBlock(block, each.number, load) for each in devices for block, load in each.loads.items()]
