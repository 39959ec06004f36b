"""KV coordination: which engines have a prefix."""

from __future__ import annotations

from symbiosis.cluster.policies.kv_coordination import KvDirectory


def test_the_directory_finds_the_longest_prefix():
    directory = KvDirectory()
    directory.add(0, [1, 2, 3])
    directory.add(1, [1, 2])
    assert directory.find_owners((1, 2, 3, 4), 0b11) == (0b01, 3)
    assert directory.find_owners((1, 2, 9), 0b11) == (0b11, 2)
    assert directory.find_owners((1, 2, 3), 0b10) == (0b10, 2)
    directory.evict(0, [2])
    assert directory.find_owners((1, 2, 3), 0b11) == (0b10, 2)
    directory.drop_engine(1)
    assert directory.find_owners((1,), 0b11) == (0b01, 1)
    assert directory.find_owners((7,), 0b11) == (0, 0)


def test_the_directory_is_bounded():
    directory = KvDirectory(max_blocks=10)
    directory.add(0, range(100))
    assert directory.find_owners((0,), 1) == (0, 0)
    assert directory.find_owners((99,), 1) == (1, 1)
