"""Best-fit allocation and cost-aware eviction."""

from __future__ import annotations

import random

import pytest

from symbiosis.serving.lora.byte_allocator import ByteAllocator


def test_allocation_is_best_fit():
    allocator = ByteAllocator(100)
    assert [allocator.allocate(owner, 20) for owner in "abcde"] == [0, 20, 40, 60, 80]
    assert allocator.allocate("f", 1) is None
    allocator.free("b")
    allocator.free("c")
    allocator.free("e")
    assert allocator.allocate("f", 15) == 80  # not in the gap of 40
    assert allocator.allocate("g", 40) == 20
    assert "b" not in allocator
    allocator.check_integrity()


def test_eviction_of_equal_sizes_is_lru():
    allocator = ByteAllocator(30)
    for owner in "abc":
        allocator.allocate(owner, 10)
    ages = {"a": 2, "b": 0, "c": 1}
    assert allocator.select_victims(10, lambda owner: (0, ages[owner])) == ["b"]
    assert allocator.select_victims(20, lambda owner: (0, ages[owner])) == ["b", "c"]  # a is the newest
    assert allocator.select_victims(30, lambda owner: (0, ages[owner])) == ["a", "b", "c"]
    assert allocator.select_victims(31, lambda owner: (0, ages[owner])) is None


def test_owners_without_a_cost_stay_and_free_bytes_cost_nothing():
    allocator = ByteAllocator(50)
    for owner in "abcde":
        allocator.allocate(owner, 10)
    assert allocator.select_victims(20, lambda owner: None if owner in "bd" else (0, 0)) is None
    assert allocator.select_victims(10, lambda owner: None if owner in "bd" else (0, ord(owner))) == ["a"]
    allocator.free("d")
    assert allocator.select_victims(10, lambda owner: None) == []
    assert allocator.select_victims(20, lambda owner: (1, 0) if owner == "e" else (2, 0)) == ["e"]


@pytest.mark.parametrize("seed", range(20))
def test_random_allocations_stay_consistent(seed):
    rng, allocator, owners = random.Random(seed), ByteAllocator(1000), []
    for number in range(300):
        if owners and rng.random() < 0.4:
            allocator.free(owners.pop(rng.randrange(len(owners))))
        else:
            size, kept = rng.randint(1, 300), set(rng.sample(owners, len(owners) // 3))
            costs = {owner: None if owner in kept else (rng.randint(0, 2), rng.random()) for owner in owners}
            victims = allocator.select_victims(size, costs.get)
            if victims is not None:
                assert kept.isdisjoint(victims)
                for owner in victims:
                    allocator.free(owner)
                    owners.remove(owner)
                assert allocator.allocate(f"{number}", size) is not None, "the evictions freed the bytes"
                owners.append(f"{number}")
        allocator.check_integrity()
