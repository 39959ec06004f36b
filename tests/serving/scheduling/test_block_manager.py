"""Pages are numbers here: who has which, and who finds which."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.serving.scheduling.block_manager import BlockManager
from tests.serving.scheduling.test_sequence import sequence
from tests.work import lines_run


def begun(pool, prompt, parent=None, **changes):
    """A sequence whose prompt is computed and can be found."""
    made = sequence(prompt, **changes)
    copies = pool.allocate(made, len(prompt) + 1, parent=parent)
    assert copies is not None
    made.computed = len(prompt)
    pool.commit(made)
    return made


def test_a_sequence_gets_pages_for_its_tokens_and_gives_them_back():
    pool = BlockManager(4, 4)
    one = begun(pool, range(7))
    assert (len(one.pages), pool.available) == (2, 2)
    assert pool.grow(one, 8)
    assert len(one.pages) == 2
    assert pool.grow(one, 9)
    assert len(one.pages) == 3
    pool.check_integrity([one])
    pool.free(one)
    assert (one.pages, one.computed, pool.available) == ([], 0, 4)
    pool.check_integrity([])


def test_what_does_not_fit_changes_nothing():
    pool = BlockManager(2, 4)
    one = begun(pool, range(4))
    assert not pool.grow(one, 9)
    assert len(one.pages) == 2
    other = sequence(range(3))
    assert pool.allocate(other, 4) is None
    assert other.pages == []
    pool.check_integrity([one, other])


def test_admission_can_leave_pages_to_others():
    pool = BlockManager(4, 4)
    assert pool.allocate(sequence(range(8)), 9, spare=2) is None
    assert pool.allocate(sequence(range(8)), 9, spare=1) is not None


def test_full_pages_are_shared_with_who_has_the_same_beginning():
    pool = BlockManager(10, 4)
    one = begun(pool, range(11))
    two = sequence([*range(8), 99, 98, 97])
    assert pool.match(two) == one.pages[:2]
    assert pool.allocate(two, 12) == []
    assert two.pages[:2] == one.pages[:2]
    assert two.pages[2] != one.pages[2]
    assert (two.computed, two.cached) == (8, 8)
    pool.check_integrity([one, two])
    pool.free(one)
    pool.check_integrity([two])
    pool.free(two)
    assert pool.available == 10


def test_pages_of_the_ended_are_found_again():
    pool = BlockManager(10, 4)
    one = begun(pool, range(9))
    kept = one.pages[:2]
    pool.free(one)
    two = sequence(range(9))
    assert pool.allocate(two, 10) == []
    assert two.pages[:2] == kept


@pytest.mark.parametrize(
    "change", [{"salt": b"bob"}, {"adapter": "b" * 64}, {"prompt": [7, *range(1, 9)]}, {"adapter": "salt"}]
)
def test_nothing_is_found_under_another_salt_adapter_or_tokens(change):
    pool = BlockManager(10, 4)
    begun(pool, range(9), salt=b"salt", adapter="a")
    assert len(pool.match(sequence(range(9), salt=b"salt", adapter="a"))) == 2
    assert pool.match(sequence(**{"prompt": range(9), "salt": b"salt", "adapter": "a", **change})) == []


def test_salt_and_adapter_do_not_run_into_each_other():
    pool = BlockManager(10, 4)
    begun(pool, range(9), salt=b"ab", adapter="c")
    assert pool.match(sequence(range(9), salt=b"a", adapter="bc")) == []


def test_pages_that_are_not_computed_are_not_found():
    pool = BlockManager(10, 4)
    one = sequence(range(9))
    pool.allocate(one, 10)
    pool.commit(one)
    assert pool.match(sequence(range(9))) == []
    one.computed = 7
    pool.commit(one)
    assert pool.match(sequence(range(9))) == one.pages[:1]


def test_the_last_token_is_always_computed_in_a_copy_of_the_shared_page():
    pool = BlockManager(10, 4)
    one = begun(pool, range(8))
    two = sequence(range(8))
    copies = pool.allocate(two, 9)
    assert two.computed == 7
    assert two.pages[0] == one.pages[0]
    assert copies == [(one.pages[1], two.pages[1])]
    pool.check_integrity([one, two])


def test_a_copy_needs_no_page_more_than_the_sequence_itself():
    pool = BlockManager(3, 4)
    pool.free(begun(pool, range(8)))
    two = sequence(range(8))
    copies = pool.allocate(two, 9)
    assert two.computed == 7
    assert copies == []  # there was no room for a copy: the page itself is its own now
    pool.check_integrity([two])


def test_siblings_take_a_copy_of_the_unfinished_page():
    pool = BlockManager(10, 4)
    parent, child = sequence(range(6)).siblings(2)
    pool.allocate(parent, 7)
    parent.computed = 6
    pool.commit(parent)
    parent.tokens.append(50)
    copies = pool.allocate(child, 7, parent=parent)
    assert copies == [(parent.pages[1], child.pages[1])]
    assert child.pages[0] == parent.pages[0]
    assert child.computed == 5
    pool.check_integrity([parent, child])


def test_nobody_borrows_from_a_parent_with_other_tokens():
    pool = BlockManager(10, 4)
    parent = begun(pool, range(6))
    for other in (sequence([*range(5), 9, 9]), sequence(range(6), salt=b"x"), sequence(range(6), adapter="x")):
        assert pool.allocate(other, 7, parent=parent) == []
        assert other.computed in (0, 4)
        pool.check_integrity([parent, other])
        pool.free(other)


def test_the_least_recently_used_goes_first_and_ends_of_prefixes_before_beginnings():
    pool = BlockManager(5, 4)
    old, new = begun(pool, range(8)), begun(pool, range(50, 54))
    pool.free(old)
    pool.free(new)
    assert pool.cached == 3
    other = sequence(range(100, 111))
    pool.allocate(other, 12)  # two pages were free, one had to be forgotten
    assert len(pool.match(sequence(range(9)))) == 1
    assert len(pool.match(sequence(range(50, 55)))) == 1


def test_the_same_tokens_computed_twice_have_one_name():
    pool = BlockManager(10, 4)
    one, two = sequence(range(5)), sequence(range(5))
    for each in (one, two):
        pool.allocate(each, 6)
    for each in (one, two):
        each.computed = 5
        pool.commit(each)
    pool.check_integrity([one, two])
    assert pool.match(sequence(range(5))) == one.pages[:1]
    pool.free(two)
    pool.free(one)
    pool.check_integrity([])


def test_forgetting_leaves_pages_in_use_alone():
    pool = BlockManager(10, 4)
    one = begun(pool, range(8))
    pool.free(begun(pool, range(50, 58)))
    pool.forget()
    assert (pool.cached, pool.match(sequence(range(9)))) == (0, [])
    pool.check_integrity([one])
    pool.free(one)
    assert pool.available == 10


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(4, 24))
def test_pages_hold_what_their_owners_think_whatever_happens(seed, page_size, count):
    """The tensors are simulated: each slot of a page holds the prefix that was written there."""
    rng = random.Random(seed)
    pool, alive = BlockManager(count, page_size), []
    slots = {}

    def write(one, upto):
        for position in range(one.computed, upto):
            page = one.pages[position // page_size]
            slots[page, position % page_size] = (one.salt, one.adapter, bytes(one.tokens[: position + 1]))
        one.computed = upto
        pool.commit(one)

    for step in range(150):
        action = rng.random()
        if action < 0.35:
            family = rng.choice(alive) if alive and rng.random() < 0.3 else None
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * page_size))]
            one = sequence(prompt, id=str(step), salt=rng.choice([b"a", b"b"]), adapter=rng.choice(["", "x"]))
            if family is not None:
                one = family.siblings(2)[1]
            copies = pool.allocate(one, len(one.tokens) + 1, parent=family)
            if copies is None:
                continue
            alive.append(one)
            before = dict(slots)
            for source, target in copies:
                for offset in range(page_size):
                    slots[target, offset] = before.get((source, offset))
            write(one, rng.randrange(one.computed, len(one.tokens)) + 1)
        elif alive and action < 0.8:
            one = rng.choice(alive)
            if one.computed < len(one.tokens):
                write(one, len(one.tokens))
            one.tokens.append(rng.randrange(2))
            if pool.grow(one, len(one.tokens)):
                write(one, len(one.tokens))
            else:
                one.tokens.pop()
        elif alive:
            pool.free(alive.pop(rng.randrange(len(alive))))
        pool.check_integrity(alive)
        for one in alive:
            for position in range(one.computed):
                page = one.pages[position // page_size]
                assert slots[page, position % page_size] == (one.salt, one.adapter, bytes(one.tokens[: position + 1]))


@pytest.mark.parametrize("length", [10, 1000])
def test_a_step_of_a_sequence_is_little_work_however_long_it_is(length):
    pool = BlockManager(40_000, 16)
    everybody = [begun(pool, [i, *range(length)], id=str(i)) for i in range(512)]

    def step() -> None:
        for one in everybody:
            one.tokens.append(5)
            assert pool.grow(one, len(one.tokens))
            one.computed += 1
            pool.commit(one)

    assert max(lines_run(step) for _ in range(20)) < 60 * len(everybody)
