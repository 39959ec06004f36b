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
class ProvisionedBlock:
    """One instance to place."""

    block: str
    load: float
    """Share of one device's time, if the cluster were exactly full."""


def expected_load(catalog: BlockCatalog, prompt: float, output: float) -> dict[str, float]:
    """Seconds of each block for a mean request of the mix."""
    total = sum(each.weight for each in catalog.applications.values()) or 1.0
    found = dict.fromkeys(catalog.blocks, 0.0)
    for application in catalog.applications.values():
        for block in application.own.blocks:
            cost = catalog.blocks[block]
            row_s = cost.fixed_s / _BATCH + cost.row_s + cost.context_s * (prompt + output / 2)
            found[block] += application.weight / total * (cost.prompt_s(round(prompt)) + output * row_s)
    return found


def provision(catalog: BlockCatalog, devices: int, prompt: float, output: float) -> list[ProvisionedBlock]:
    """As many instances of each block as its share of the load asks for, at least one. Blocks of allowed chains only."""
    loads = expected_load(catalog, prompt, output)
    per_device = sum(loads.values()) / devices
    wanted = dict.fromkeys(catalog.used, 0)
    for application in catalog.applications.values():
        for chain in application.allowed:
            wanted.update(dict.fromkeys(chain.blocks, 0))
    made = []
    for block in wanted:
        count = max(1, min(devices, round(loads[block] / per_device)))
        made += [ProvisionedBlock(block, loads[block] / per_device / count)] * count
    return made


@dataclass(slots=True)
class _Planned:
    free: int
    budget: int
    load: float = 0.0
    blocks: list[str] = field(default_factory=list)


def place(
    items: Sequence[ProvisionedBlock],
    catalog: BlockCatalog,
    topology: BlockTopology,
    rule: PlacementRule,
    traffic: TrafficCounter,
) -> list[tuple[str, int]]:
    """A device for each instance. Raises `DoesNotFit`."""
    memory = topology.memory_bytes
    devices = [_Planned(memory, round(_WEIGHTS * memory)) for _ in range(topology.num_devices)]
    copies = Counter(item.block for item in items)
    placed: list[tuple[str, int]] = []
    left = sorted(items, key=lambda item: (-catalog.blocks[item.block].weight_bytes, item.block))
    while left:
        if rule is PlacementRule.FRAGMENTATION:
            item = left.pop(0)
            choices = _open_devices(item, catalog, devices)
            device = min(choices, key=lambda each: (devices[each].budget, devices[each].load, each))
        else:
            item, device = _most_local(left, catalog, topology, devices, copies, traffic)
            left.remove(item)
        size = catalog.blocks[item.block].weight_bytes
        found = devices[device]
        found.free, found.budget, found.load = found.free - size, found.budget - size, found.load + item.load
        found.blocks.append(item.block)
        placed.append((item.block, device))
    return placed


def _open_devices(item: ProvisionedBlock, catalog: BlockCatalog, devices: Sequence[_Planned]) -> list[int]:
    """Where an instance may go: room, no other instance of the block, and no more load than the bound, if there is such a one."""
    size = catalog.blocks[item.block].weight_bytes
    fits = [number for number, each in enumerate(devices) if each.free >= size and item.block not in each.blocks]
    if not fits:
        raise DoesNotFit(
            f"no device has {size / 1e9:.1f} GB for the block {item.block}: expected more devices or fewer applications"
        )
    roomy = [number for number in fits if devices[number].budget >= size] or fits
    light = [number for number in roomy if devices[number].load + item.load <= _FULL or not devices[number].blocks]
    return light or [min(roomy, key=lambda each: (devices[each].load, each))]


def _most_local(
    left: Sequence[ProvisionedBlock],
    catalog: BlockCatalog,
    topology: BlockTopology,
    devices: Sequence[_Planned],
    copies: Counter[str],
    traffic: TrafficCounter,
) -> tuple[ProvisionedBlock, int]:
    """The instance and device with the most traffic between them; first of all the heaviest, on the emptiest server."""
    best: tuple[tuple[float, ...], ProvisionedBlock, int] | None = None
    for item in {each.block: each for each in left}.values():
        partners = [
            (other, traffic.between(item.block, other) / copies[other])
            for other in traffic.blocks
            if other in copies and traffic.between(item.block, other) > 0
        ]
        own = traffic.total(item.block) / copies[item.block]
        for number in _open_devices(item, catalog, devices):
            here = Counter(devices[number].blocks)
            near = Counter(
                block for other, each in enumerate(devices) if topology.is_local(number, other) for block in each.blocks
            )
            wanted = sum(share * near[other] for other, share in partners) - own * near[item.block]
            same = sum(share * here[other] for other, share in partners)
            score = (min(max(0.0, wanted), own) + 0.25 * min(same, own), own * item.load, -devices[number].load, -float(number))
            if best is None or score > best[0]:
                best = score, item, number
    assert best is not None
    return best[1], best[2]
