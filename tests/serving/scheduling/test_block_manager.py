"""Block tables, reference counts and the prefix cache; blocks are numbers here."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.serving.scheduling.block_manager import BlockManager
from tests.serving.scheduling.test_sequence import sequence
from tests.work import lines_run


def prefilled(blocks, prompt, parent=None, **changes):
    """A sequence whose prompt is computed and cached."""
    made = sequence(prompt, **changes)
    copies = blocks.allocate(made, len(prompt) + 1, parent=parent)
    assert copies is not None
    made.num_computed_tokens = len(prompt)
    blocks.cache_full_blocks(made)
    return made


def test_a_sequence_allocates_blocks_for_its_tokens_and_frees_them():
    blocks = BlockManager(4, 4)
    one = prefilled(blocks, range(7))
    assert (len(one.block_table), blocks.num_free_blocks) == (2, 2)
    assert blocks.grow(one, 8)
    assert len(one.block_table) == 2
    assert blocks.grow(one, 9)
    assert len(one.block_table) == 3
    blocks.check_integrity([one])
    blocks.free(one)
    assert (one.block_table, one.num_computed_tokens, blocks.num_free_blocks) == ([], 0, 4)
    blocks.check_integrity([])


def test_a_failed_allocation_changes_nothing():
    blocks = BlockManager(2, 4)
    one = prefilled(blocks, range(4))
    assert not blocks.grow(one, 9)
    assert len(one.block_table) == 2
    other = sequence(range(3))
    assert blocks.allocate(other, 4) is None
    assert other.block_table == []
    blocks.check_integrity([one, other])


def test_an_allocation_can_leave_blocks_reserved():
    blocks = BlockManager(4, 4)
    assert blocks.allocate(sequence(range(8)), 9, reserved=2) is None
    assert blocks.allocate(sequence(range(8)), 9, reserved=1) is not None


def test_full_blocks_of_an_equal_prefix_are_shared():
    blocks = BlockManager(10, 4)
    one = prefilled(blocks, range(11))
    two = sequence([*range(8), 99, 98, 97])
    assert blocks.find_prefix(two) == one.block_table[:2]
    assert blocks.allocate(two, 12) == []
    assert two.block_table[:2] == one.block_table[:2]
    assert two.block_table[2] != one.block_table[2]
    assert (two.num_computed_tokens, two.num_cached_tokens) == (8, 8)
    blocks.check_integrity([one, two])
    blocks.free(one)
    blocks.check_integrity([two])
    blocks.free(two)
    assert blocks.num_free_blocks == 10


def test_blocks_of_finished_sequences_stay_cached():
    blocks = BlockManager(10, 4)
    one = prefilled(blocks, range(9))
    cached = one.block_table[:2]
    blocks.free(one)
    two = sequence(range(9))
    assert blocks.allocate(two, 10) == []
    assert two.block_table[:2] == cached


@pytest.mark.parametrize(
    "change", [{"cache_salt": b"bob"}, {"adapter": "b" * 64}, {"prompt": [7, *range(1, 9)]}, {"adapter": "salt"}]
)
def test_another_salt_adapter_or_prompt_finds_no_prefix(change):
    blocks = BlockManager(10, 4)
    prefilled(blocks, range(9), cache_salt=b"salt", adapter="a")
    assert len(blocks.find_prefix(sequence(range(9), cache_salt=b"salt", adapter="a"))) == 2
    assert blocks.find_prefix(sequence(**{"prompt": range(9), "cache_salt": b"salt", "adapter": "a", **change})) == []


def test_salt_and_adapter_are_hashed_apart():
    blocks = BlockManager(10, 4)
    prefilled(blocks, range(9), cache_salt=b"ab", adapter="c")
    assert blocks.find_prefix(sequence(range(9), cache_salt=b"a", adapter="bc")) == []


def test_blocks_that_are_not_computed_are_not_cached():
    blocks = BlockManager(10, 4)
    one = sequence(range(9))
    blocks.allocate(one, 10)
    blocks.cache_full_blocks(one)
    assert blocks.find_prefix(sequence(range(9))) == []
    one.num_computed_tokens = 7
    blocks.cache_full_blocks(one)
    assert blocks.find_prefix(sequence(range(9))) == one.block_table[:1]


def test_the_last_token_is_recomputed_in_a_copy_of_the_shared_block():
    blocks = BlockManager(10, 4)
    one = prefilled(blocks, range(8))
    two = sequence(range(8))
    copies = blocks.allocate(two, 9)
    assert two.num_computed_tokens == 7
    assert two.block_table[0] == one.block_table[0]
    assert copies == [(one.block_table[1], two.block_table[1])]
    blocks.check_integrity([one, two])


def test_a_copy_needs_no_more_blocks_than_the_sequence_itself():
    blocks = BlockManager(3, 4)
    blocks.free(prefilled(blocks, range(8)))
    two = sequence(range(8))
    copies = blocks.allocate(two, 9)
    assert two.num_computed_tokens == 7
    assert copies == []  # no block was free for a copy: the sequence takes the block itself
    blocks.check_integrity([two])


def test_forks_copy_the_partial_block():
    blocks = BlockManager(10, 4)
    parent, child = sequence(range(6)).fork(2)
    blocks.allocate(parent, 7)
    parent.num_computed_tokens = 6
    blocks.cache_full_blocks(parent)
    parent.tokens.append(50)
    copies = blocks.allocate(child, 7, parent=parent)
    assert copies == [(parent.block_table[1], child.block_table[1])]
    assert child.block_table[0] == parent.block_table[0]
    assert child.num_computed_tokens == 5
    blocks.check_integrity([parent, child])


def test_the_partial_block_of_a_parent_with_other_tokens_is_not_copied():
    blocks = BlockManager(10, 4)
    parent = prefilled(blocks, range(6))
    for other in (sequence([*range(5), 9, 9]), sequence(range(6), cache_salt=b"x"), sequence(range(6), adapter="x")):
        assert blocks.allocate(other, 7, parent=parent) == []
        assert other.num_computed_tokens in (0, 4)
        blocks.check_integrity([parent, other])
        blocks.free(other)


def test_eviction_is_lru_and_takes_ends_of_prefixes_before_beginnings():
    blocks = BlockManager(5, 4)
    old, new = prefilled(blocks, range(8)), prefilled(blocks, range(50, 54))
    blocks.free(old)
    blocks.free(new)
    assert blocks.num_cached_blocks == 3
    other = sequence(range(100, 111))
    blocks.allocate(other, 12)  # two blocks were free, one is evicted
    assert len(blocks.find_prefix(sequence(range(9)))) == 1
    assert len(blocks.find_prefix(sequence(range(50, 55)))) == 1


def test_equal_tokens_computed_twice_are_cached_once():
    blocks = BlockManager(10, 4)
    one, two = sequence(range(5)), sequence(range(5))
    for each in (one, two):
        blocks.allocate(each, 6)
    for each in (one, two):
        each.num_computed_tokens = 5
        blocks.cache_full_blocks(each)
    blocks.check_integrity([one, two])
    assert blocks.find_prefix(sequence(range(5))) == one.block_table[:1]
    blocks.free(two)
    blocks.free(one)
    blocks.check_integrity([])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(4, 24))
def test_blocks_hold_the_tokens_of_their_sequences_under_random_traffic(seed, block_size, count):
    """The tensors are simulated: each slot of a block holds the prefix that was written there."""
    rng = random.Random(seed)
    blocks, alive = BlockManager(count, block_size), []
    slots = {}

    def write(one, upto):
        for position in range(one.num_computed_tokens, upto):
            block = one.block_table[position // block_size]
            slots[block, position % block_size] = (one.cache_salt, one.adapter, bytes(one.tokens[: position + 1]))
        one.num_computed_tokens = upto
        blocks.cache_full_blocks(one)

    for step in range(150):
        action = rng.random()
        if action < 0.35:
            family = rng.choice(alive) if alive and rng.random() < 0.3 else None
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * block_size))]
            one = sequence(prompt, id=str(step), cache_salt=rng.choice([b"a", b"b"]), adapter=rng.choice(["", "x"]))
            if family is not None:
                one = family.fork(2)[1]
            copies = blocks.allocate(one, len(one.tokens) + 1, parent=family)
            if copies is None:
                continue
            alive.append(one)
            before = dict(slots)
            for source, target in copies:
                for offset in range(block_size):
                    slots[target, offset] = before.get((source, offset))
            write(one, rng.randrange(one.num_computed_tokens, len(one.tokens)) + 1)
        elif alive and action < 0.8:
            one = rng.choice(alive)
            if one.num_computed_tokens < len(one.tokens):
                write(one, len(one.tokens))
            one.tokens.append(rng.randrange(2))
            if blocks.grow(one, len(one.tokens)):
                write(one, len(one.tokens))
            else:
                one.tokens.pop()
        elif alive:
            blocks.free(alive.pop(rng.randrange(len(alive))))
        blocks.check_integrity(alive)
        for one in alive:
            for position in range(one.num_computed_tokens):
                block = one.block_table[position // block_size]
                assert slots[block, position % block_size] == (one.cache_salt, one.adapter, bytes(one.tokens[: position + 1]))


@pytest.mark.parametrize("length", [10, 1000])
def test_the_work_of_a_step_does_not_depend_on_the_length(length):
    blocks = BlockManager(40_000, 16)
    sequences = [prefilled(blocks, [i, *range(length)], id=str(i)) for i in range(512)]

    def step() -> None:
        for one in sequences:
            one.tokens.append(5)
            assert blocks.grow(one, len(one.tokens))
            one.num_computed_tokens += 1
            blocks.cache_full_blocks(one)

    assert max(lines_run(step) for _ in range(20)) < 60 * len(sequences)
