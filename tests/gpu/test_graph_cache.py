"""Admission and eviction of graphs: pure, without a GPU."""

from __future__ import annotations

from symbiosis.gpu.graph_cache import FrequencyGraphCache, GraphCache


def captures(cache: GraphCache, keys: str) -> list[str]:
    """Captured keys in order; with a minus, the key that was evicted for it."""
    found: list[str] = []
    for key in keys:
        if cache.get(key) is None and cache.admits(key):
            before = set(cache)
            cache.put(key, key)
            found += [key, *(f"-{gone}" for gone in before - set(cache))]
    return found


def test_a_key_is_captured_at_its_nth_miss():
    assert captures(GraphCache(8), "abab") == ["a", "b"]
    assert captures(GraphCache(8, min_uses=3), "abaabcb") == ["a", "b"]


def test_a_full_cache_evicts_the_least_recently_used_graph():
    assert captures(GraphCache(2), "abacb") == ["a", "b", "c", "-b", "b", "-a"]


def test_uses_of_keys_without_a_graph_are_bounded():
    cache = GraphCache(8, min_uses=2)
    cache.admits(-1)
    for number in range(8192):
        assert not cache.admits(number)
    assert not cache.admits(-1), "its first use is no longer known"
    assert cache.admits(8191)
    assert len(cache._misses) <= 8192


def test_a_key_that_cannot_be_captured_is_not_tried_again():
    for cache in (GraphCache(2), FrequencyGraphCache(2)):
        for _ in range(3):
            cache.get("a")
        assert cache.admits("a")
        cache.put("a", None)
        assert cache.get("a") is None
        assert not cache.admits("a")
        assert list(cache.rejected) == ["a"]
    assert not cache.may_admit("a")


def test_rejected_keys_are_bounded():
    cache = GraphCache(2)
    for number in range(5000):
        cache.put(number, None)
    assert len(cache.rejected) == 4096


def test_obsolete_graphs_are_evicted():
    cache = GraphCache(8)
    captures(cache, "abc")
    cache.evict(lambda key: key < "c")
    assert list(cache) == ["c"]


def test_a_frequent_key_is_captured_at_its_third_use():
    assert captures(FrequencyGraphCache(2), "abaacbbcb") == ["a", "b"]


def test_alternating_keys_do_not_evict_each_other():
    assert captures(FrequencyGraphCache(2), "abc" * 500) == ["a", "b"]


def test_a_key_that_is_no_longer_used_is_evicted():
    assert captures(FrequencyGraphCache(2), "ab" * 200 + "cb" * 400) == ["a", "b", "c", "-a"]


def test_a_key_may_be_admitted_while_there_is_capacity():
    cache = FrequencyGraphCache(1)
    cache.get("a")
    assert cache.may_admit("a")
    assert captures(cache, "aa") == ["a"]
    for _ in range(3):
        cache.get("b")
        assert not cache.may_admit("b"), "the cache is full"


def test_dropped_graphs_are_captured_again_soon():
    cache = FrequencyGraphCache(2)
    assert captures(cache, "aabbaab") == ["a", "b"]
    cache.clear()
    assert captures(cache, "cab") == ["a", "b"]
