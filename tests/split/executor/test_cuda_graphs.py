"""Known calls run again, against the plain way. Here without CUDA graphs: what they record is called instead."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor.batch import BatchCall, _joined
from symbiosis.split.executor.cuda_graphs import BatchGraphs
from symbiosis.split.executor.layers import make_layer
from symbiosis.split.executor.policies import BatchKey
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


def known_as(works: list[BatchCall], tenant: str = "ann") -> list[tuple]:
    return [(tenant, each, each.places) for each in works]


@pytest.mark.parametrize("key", [FORWARD, BACKWARD])
@pytest.mark.parametrize("sizes", [(3,), (1, 2), (5, 60, 100), (400, 100)])
def test_a_batch_that_came_often_has_the_plain_results(key, sizes):
    replays = BatchGraphs(torch.device("cpu"))
    works = [work(size, key) for size in sizes]
    known = []
    for number in range(70):
        if number % 2:
            works.reverse()  # who came first does not matter
        for each in works:
            for rows in each.rows:
                rows.normal_()  # a tenant's memory stays, its rows change
        results = replays.run(known_as(works))
        known.append(results is not None)
        if results is not None:
            expected = _joined([BatchCall(w.layers, w.key, w.rows, None, 0) for w in works])
            for found, plain in zip(results, expected, strict=True):
                torch.testing.assert_close(found, plain)
            assert all(found is w.places for found, w in zip(results, works, strict=True))
    unknown = 3  # by themselves, or as so many rows; in the end as this company
    assert known == [False] * unknown + [True] * (70 - unknown)


def test_any_company_of_a_size_has_one_graph_and_one_that_stays_its_own():
    replays = BatchGraphs(torch.device("cpu"), capture_time_share=1.0)
    for number in range(20):
        company = [work(2), work(9), work(1 + number % 3)]
        results = replays.run(known_as(company))
        assert (results is not None) == (number >= 3)
        if results is not None:
            expected = _joined([BatchCall(w.layers, w.key, w.rows, None, 0) for w in company])
            torch.testing.assert_close(results, list(expected))
    assert (len(replays._by_size), len(replays._by_set)) == (1, 0)
    for _ in range(64):
        replays.run(known_as(company))
    assert (len(replays._by_size), len(replays._by_set)) == (1, 1)


def test_graphs_of_companies_take_a_share_of_the_time():
    replays = BatchGraphs(torch.device("cpu"), capture_time_share=1e-9)
    company, other = [work(2), work(9)], [work(20), work(30)]
    for _ in range(20):
        first = replays.run(known_as(company))
    assert first is not None  # made at once
    for _ in range(20):
        assert replays.run(known_as(other)) is None  # not before years have gone by
    assert (len(replays._by_size), len(replays._by_set)) == (1, 0)


def test_large_calls_are_not_kept():
    replays = BatchGraphs(torch.device("cpu"))
    one, other = work(300), work(300)
    for _ in range(12):
        assert replays.run(known_as([one])) is None
        assert replays.run(known_as([one, other])) is None


def test_what_comes_now_and_then_is_not_kept():
    replays = BatchGraphs(torch.device("cpu"), max_gap_s=0.0)
    one = work(1)
    for _ in range(12):
        assert replays.run(known_as([one])) is None


def test_one_tenant_keeps_a_bounded_number():
    replays = BatchGraphs(torch.device("cpu"), max_gap_s=3600.0)
    kept = [work(1) for _ in range(1030)]
    for _ in range(4):
        for each in kept:
            replays.run(known_as([each]))
    assert sum(each.replay is not None for each in kept) == 1024
    other = work(1)
    for _ in range(4):
        replays.run([("bob", other, other.places)])
    assert other.replay is not None


def test_calls_that_never_come_again_leave_no_room_taken():
    replays = BatchGraphs(torch.device("cpu"), capture_time_share=1.0)
    for _ in range(9000):
        replays.run(known_as([work(1), work(1)]))
    first, second = work(1), work(2)
    for _ in range(80):
        replays.run(known_as([first, second]))
    assert len(replays._by_set) == 1
    assert len(replays._by_set._misses) <= 8192
    assert len(replays._copies) <= 2048
