"""Layout of tensors packed into one buffer: serving moves an adapter in one copy, training updates it in one step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate


def align(size: int, alignment: int) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


def pack_offsets(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """The aligned offset of each item in one buffer, and the aligned size of that buffer."""
    *offsets, total = accumulate((align(size, alignment) for size in sizes), initial=0)
    return offsets, total
