"""Hashes of a prompt's blocks: by them the director knows which engine has the keys and values of its beginning.

A hash covers tenant, adapter and all tokens up to the block's end, as those of an engine's prefix cache do: equal prompts of
two tenants have no hash in common. Only hashes leave the HTTP process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 128
MAX_BLOCKS = 256
"""Of one prompt: a longer one is known by its first 32,768 tokens."""
_DIGEST_BYTES = 8


def hash_blocks(prompt: Sequence[int], tenant: str, adapter: str | None) -> list[int]:
    """One number below 2^64 for each full block, in order."""
    count = min(len(prompt) // BLOCK_TOKENS, MAX_BLOCKS)
    if not count:
        return []
    names = [tenant.encode(), b"" if adapter is None else b"a" + adapter.encode()]
    before = b"%d,%d:" % (len(names[0]), len(names[1])) + b"".join(names)
    hashes: list[int] = []
    for index in range(count):
        tokens = array("q", prompt[BLOCK_TOKENS * index : BLOCK_TOKENS * (index + 1)]).tobytes()
        before = hashlib.blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes
