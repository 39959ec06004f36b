"""Pieces of a range: never overlapping, found again, and made room for at the least cost."""

from __future__ import annotations

import random

import pytest

from symbiosis.serving.lora.byte_allocator import ByteAllocator


def test_the_smallest_gap_that_fits_is_taken():
    arena = ByteAllocator(100)
    assert [arena.allocate(owner, 20) for owner in "abcde"] == [0, 20, 40, 60, 80]
    assert arena.allocate("f", 1) is None
    arena.free("b")
    arena.free("c")
    arena.free("e")
    assert arena.allocate("f", 15) == 80  # not in the gap of 40
    assert arena.allocate("g", 40) == 20
    assert "b" not in arena
    arena.check_integrity()


def test_pieces_of_one_size_leave_by_their_age():
    arena = ByteAllocator(30)
    for owner in "abc":
        arena.allocate(owner, 10)
    ages = {"a": 2, "b": 0, "c": 1}
    assert arena.select_victims(10, lambda owner: (0, ages[owner])) == ["b"]
    assert arena.select_victims(20, lambda owner: (0, ages[owner])) == ["b", "c"]  # a is the newest
    assert arena.select_victims(30, lambda owner: (0, ages[owner])) == ["a", "b", "c"]
    assert arena.select_victims(31, lambda owner: (0, ages[owner])) is None


def test_who_has_no_cost_stays_and_what_is_free_costs_nothing():
    arena = ByteAllocator(50)
    for owner in "abcde":
        arena.allocate(owner, 10)
    assert arena.select_victims(20, lambda owner: None if owner in "bd" else (0, 0)) is None
    assert arena.select_victims(10, lambda owner: None if owner in "bd" else (0, ord(owner))) == ["a"]
    arena.free("d")
    assert arena.select_victims(10, lambda owner: None) == []
    assert arena.select_victims(20, lambda owner: (1, 0) if owner == "e" else (2, 0)) == ["e"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_taken_and_given_adds_up(seed):
    rng, arena, owners = random.Random(seed), ByteAllocator(1000), []
    for number in range(300):
        if owners and rng.random() < 0.4:
            arena.free(owners.pop(rng.randrange(len(owners))))
        else:
            size, stay = rng.randint(1, 300), set(rng.sample(owners, len(owners) // 3))
            costs = {owner: None if owner in stay else (rng.randint(0, 2), rng.random()) for owner in owners}
            leaving = arena.select_victims(size, costs.get)
            if leaving is not None:
                assert stay.isdisjoint(leaving)
                for owner in leaving:
                    arena.free(owner)
                    owners.remove(owner)
                assert arena.allocate(f"{number}", size) is not None, "room was promised"
                owners.append(f"{number}")
        arena.check_integrity()
