"""Memory of this process by device and owner."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

CPU = "cpu"


def count_storages(tensors: Iterable[Tensor]) -> Counter[str]:
    """Bytes by device. Tensors that share a storage count once, with the whole storage."""
    storages: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    counts: Counter[str] = Counter()
    for (device, _), size in storages.items():
        counts[device] += size
    return counts


def read_total(device: str) -> int:
    """Bytes that this process holds: its resident set, or what torch's allocator has reserved on a GPU."""
    if device == CPU:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(torch.cuda.memory_reserved(device))


def account_memory(
    devices: Iterable[str], owners: Mapping[str, Mapping[str, int]], totals: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """For each device, bytes by owner, `other` (what no owner accounts for) and their `total`.

    `owners` are bytes by device of each. The total is that of `totals`, or the sum of the owners where it is larger: pages
    of a new KV cache on a CPU are allocated but not resident.
    """
    found: dict[str, dict[str, int]] = {}
    for device in devices:
        parts = {owner: int(sizes.get(device, 0)) for owner, sizes in owners.items()}
        parts["other"] = max(0, totals[device] - sum(parts.values()))
        found[device] = {**parts, "total": sum(parts.values())}
    return found
