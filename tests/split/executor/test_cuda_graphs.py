"""Repeated calls against `run_batch`. Without CUDA graphs: the recorded function is called instead."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor.batch import BatchCall, _joined
from symbiosis.split.executor.cuda_graphs import BatchGraphs
from symbiosis.split.executor.layers import make_layer
from symbiosis.split.executor.sessions import BatchKey
from symbiosis.types import Direction, LayerKind, LayerSpec

LAYERS = tuple(
    make_layer(
        LayerSpec(
            handle=i, kind=LayerKind.LINEAR, paths=(f"layer{i}",), in_width=8, out_width=6 + i, weights=(), identity=str(i)
        ),
        {"weight": torch.randn(6 + i, 8)},
        None,
        None,
    )
    for i in range(3)
)
FORWARD = BatchKey((0, 1, 2), Direction.FORWARD)
BACKWARD = BatchKey((0, 1, 2), Direction.BACKWARD)


def work(rows: int, key: BatchKey = FORWARD) -> BatchCall:
    back = key.direction is Direction.BACKWARD
    given = tuple(torch.randn(rows, 6 + i) for i in range(3)) if back else (torch.randn(rows, 8),)
    places = (torch.zeros(rows, 8),) if back else tuple(torch.zeros(rows, 6 + i) for i in range(3))
    return BatchCall(LAYERS, key, given, places, 0)


def members(works: list[BatchCall], tenant: str = "ann") -> list[tuple]:
    return [(tenant, each, each.places) for each in works]


@pytest.mark.parametrize("key", [FORWARD, BACKWARD])
@pytest.mark.parametrize("sizes", [(3,), (1, 2), (5, 60, 100), (400, 100)])
def test_a_replayed_batch_has_the_results_of_a_plain_one(key, sizes):
    graphs = BatchGraphs(torch.device("cpu"))
    works = [work(size, key) for size in sizes]
    known = []
    for number in range(70):
        if number % 2:
            works.reverse()  # the order of calls does not matter
        for each in works:
            for rows in each.rows:
                rows.normal_()  # a tenant's memory stays, its rows change
        results = graphs.run(members(works))
        known.append(results is not None)
        if results is not None:
            expected = _joined([BatchCall(w.layers, w.key, w.rows, None, 0) for w in works])
            for found, plain in zip(results, expected, strict=True):
                torch.testing.assert_close(found, plain)
            assert all(found is w.places for found, w in zip(results, works, strict=True))
    unknown = 3  # as one call, or by size; later as this set
    assert known == [False] * unknown + [True] * (70 - unknown)


def test_sets_of_a_size_share_a_graph_and_a_repeated_set_gets_its_own():
    graphs = BatchGraphs(torch.device("cpu"), capture_time_share=1.0)
    for number in range(20):
        calls = [work(2), work(9), work(1 + number % 3)]
        results = graphs.run(members(calls))
        assert (results is not None) == (number >= 3)
        if results is not None:
            expected = _joined([BatchCall(w.layers, w.key, w.rows, None, 0) for w in calls])
            torch.testing.assert_close(results, list(expected))
    assert (len(graphs._by_size), len(graphs._by_set)) == (1, 0)
    for _ in range(64):
        graphs.run(members(calls))
    assert (len(graphs._by_size), len(graphs._by_set)) == (1, 1)


def test_captures_of_sets_take_a_bounded_share_of_the_time():
    graphs = BatchGraphs(torch.device("cpu"), capture_time_share=1e-9)
    calls, other = [work(2), work(9)], [work(20), work(30)]
    for _ in range(20):
        first = graphs.run(members(calls))
    assert first is not None  # captured at once
    for _ in range(20):
        assert graphs.run(members(other)) is None  # the next capture is years away
    assert (len(graphs._by_size), len(graphs._by_set)) == (1, 0)


def test_large_calls_are_not_captured():
    graphs = BatchGraphs(torch.device("cpu"))
    one, other = work(300), work(300)
    for _ in range(12):
        assert graphs.run(members([one])) is None
        assert graphs.run(members([one, other])) is None


def test_rare_calls_are_not_captured():
    graphs = BatchGraphs(torch.device("cpu"), max_gap_s=0.0)
    one = work(1)
    for _ in range(12):
        assert graphs.run(members([one])) is None


def test_graphs_of_a_tenant_are_bounded():
    graphs = BatchGraphs(torch.device("cpu"), max_gap_s=3600.0)
    calls = [work(1) for _ in range(1030)]
    for _ in range(4):
        for each in calls:
            graphs.run(members([each]))
    assert sum(each.replay is not None for each in calls) == 1024
    other = work(1)
    for _ in range(4):
        graphs.run([("bob", other, other.places)])
    assert other.replay is not None


def test_calls_that_never_repeat_do_not_grow_memory():
    graphs = BatchGraphs(torch.device("cpu"), capture_time_share=1.0)
    for _ in range(9000):
        graphs.run(members([work(1), work(1)]))
    first, second = work(1), work(2)
    for _ in range(80):
        graphs.run(members([first, second]))
    assert len(graphs._by_set) == 1
    assert len(graphs._by_set._misses) <= 8192
    assert len(graphs._copies) <= 2048
