from __future__ import annotations

import re
from pathlib import Path

from symbiosis.common.available_memory import available_memory


def test_some_of_the_machines_memory_is_available():
    (total_kb,) = re.findall(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert 0 < available_memory() <= 1024 * int(total_kb)
