"""LRFU scores: as LRU with a short half-life, as LFU with a long one."""

from __future__ import annotations

import math
import random

import pytest

from symbiosis.common.lrfu_scores import LrfuScores


def count_misses(half_life: float, uses: list[str], capacity: int) -> int:
    scores, cached, misses = LrfuScores(half_life), set[str](), 0
    for key in uses:
        scores.use(key, len(cached))
        if key not in cached:
            misses += 1
            if len(cached) == capacity:
                cached.discard(min(cached, key=scores.get))
            cached.add(key)
    return misses


def test_scores_are_sums_of_uses_that_halve_with_every_half_life():
    scores, plain, half_life = LrfuScores(4), dict[str, float](), 4 * 3
    chance = random.Random(0)
    for _ in range(100):
        used = chance.choice("abcd")
        plain = {key: value * 0.5 ** (1 / half_life) for key, value in plain.items()}
        plain[used] = plain.get(used, 0.0) + 1
        scores.use(used, 3)
    for key, value in plain.items():
        assert scores.get(key) - scores.get("a") == pytest.approx(math.log2(value / plain["a"]), abs=1e-9)
    scores.discard("a")
    assert scores.get("a") == -math.inf


def test_of_equal_counts_the_latest_is_the_highest():
    scores = LrfuScores()
    for key in "abc":
        scores.use(key, 8)
    assert scores.get("a") < scores.get("b") < scores.get("c")


def test_frequency_keeps_more_of_a_zipf_popularity_than_recency():
    chance, names = random.Random(0), [f"a{number}" for number in range(200)]
    uses = chance.choices(names, [1 / rank for rank in range(1, 201)], k=4000)
    assert count_misses(16, uses, 16) < 0.85 * count_misses(1e-3, uses, 16)


def test_a_former_favourite_leaves_after_popularity_changes():
    before, after = [f"a{number % 4}" for number in range(400)], [f"b{number % 4}" for number in range(400)]
    assert count_misses(16, before + after, 4) < 4 + 4 + 4 * 16 * 4
