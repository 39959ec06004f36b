from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from symbiosis.app.statistics.memory import account_memory, count_storages, read_total


def test_a_shared_storage_counts_once_and_whole():
    whole, alone = torch.zeros(100, 10), torch.zeros(7)
    assert count_storages([whole[:20], whole[30:], whole.t(), alone]) == {"cpu": 4000 + 28}
    assert not count_storages([])


@pytest.mark.parametrize(("total", "other"), [(1000, 700), (300, 0), (100, 0)])
def test_the_parts_add_up_to_the_total(total, other):
    owners = {"base_weights": {"cpu": 200}, "kv_cache": {"cpu": 100}, "training": {"cuda:0": 5}}
    found = account_memory(["cpu"], owners, {"cpu": total})["cpu"]
    assert found.pop("total") == sum(found.values()) == max(total, 300)
    assert found == {"base_weights": 200, "kv_cache": 100, "training": 0, "other": other}


def test_devices_are_accounted_separately():
    owners = {"adapters": {"cuda:0": 10, "cpu": 20}}
    found = account_memory(["cuda:0", "cpu"], owners, {"cuda:0": 50, "cpu": 60})
    assert found["cuda:0"] == {"adapters": 10, "other": 40, "total": 50}
    assert found["cpu"] == {"adapters": 20, "other": 40, "total": 60}


def test_the_total_of_a_process_is_its_resident_set():
    (resident_kb,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert abs(read_total("cpu") - 1024 * int(resident_kb)) < 64 << 20  # other threads allocate, and idle pages move out
