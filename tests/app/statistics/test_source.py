from __future__ import annotations

from queue import SimpleQueue

import torch

from symbiosis.app.statistics.source import StatisticsSource
from symbiosis.errors import Closed


def test_a_source_without_tenants_has_memory_and_history():
    source, delivered = StatisticsSource("tiny", torch.device("cpu"), [torch.zeros(1000)]), SimpleQueue()
    try:
        source.collect(delivered.put)
        found = delivered.get(timeout=60)
        assert found["memory"]["cpu"]["base_weights"] == 4000
        assert (found["model"], found["device"], found["tenants"], found["jobs"]) == ("tiny", "cpu", {}, {})
        while not source.snapshot()["history"]["uptime_s"]:
            pass
    finally:
        source.close()


def test_every_request_has_a_reply_also_at_the_end():
    source, delivered = StatisticsSource("tiny", torch.device("cpu"), []), SimpleQueue()
    for _ in range(100):
        source.collect(delivered.put)
    source.close()
    source.collect(delivered.put)
    replies = [delivered.get(timeout=60) for _ in range(101)]
    assert all(isinstance(reply, dict | Closed) for reply in replies)
    assert isinstance(replies[-1], Closed)
