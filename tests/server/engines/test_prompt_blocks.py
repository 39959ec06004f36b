"""Hashes of prompt blocks: equal for equal prefixes of one tenant and adapter, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from symbiosis.server.engines.prompt_blocks import BLOCK_TOKENS, MAX_BLOCKS, hash_blocks

TOKENS = st.integers(0, 200_000)
NAMES = st.text(max_size=3)


@given(st.lists(TOKENS, max_size=3 * BLOCK_TOKENS), st.lists(TOKENS, max_size=BLOCK_TOKENS))
def test_a_common_prefix_has_common_hashes(first, more):
    short, long = hash_blocks(first, "ann", None), hash_blocks(first + more, "ann", None)
    assert len(short) == len(first) // BLOCK_TOKENS
    assert long[: len(short)] == short


@given(st.tuples(NAMES, st.none() | NAMES), st.tuples(NAMES, st.none() | NAMES))
def test_tenants_and_adapters_share_nothing(one, other):
    prompt = list(range(2 * BLOCK_TOKENS))
    same = set(hash_blocks(prompt, *one)) & set(hash_blocks(prompt, *other))
    assert bool(same) == (one == other)


def test_another_first_token_changes_all_hashes():
    prompt = list(range(3 * BLOCK_TOKENS))
    assert not set(hash_blocks(prompt, "", None)) & set(hash_blocks([7, *prompt[1:]], "", None))


def test_a_prompt_has_a_bounded_number_of_hashes():
    assert len(hash_blocks([1] * BLOCK_TOKENS * (MAX_BLOCKS + 5), "", None)) == MAX_BLOCKS
