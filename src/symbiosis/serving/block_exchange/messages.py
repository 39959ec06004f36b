"""Messages of a block fetch: a target asks for the blocks of one sequence, from the last one to the first.

The target sends `fetch` with the layout of its blocks, their hashes and how many it takes at first; `credit` for so many more;
`end` when it needs no more. The source sends pieces: the position of the first block among the hashes, the number of blocks and
their bytes, in the order of the sequence; `end` when there are no more. Both check all that they receive. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from symbiosis.errors import BadMessage
from symbiosis.serving.engine_messages import int_field, text_field
from symbiosis.transport.engine_ipc import Body

HASH_BYTES = 32
MAX_BLOCKS = 1 << 16
"""Of one sequence: a million tokens in blocks of 16."""
WINDOW_BYTES = 64 << 20
"""Most bytes of one sequence that were sent and not written yet."""
PIECE_BYTES = 4 << 20
"""Most bytes that the source reads at once, between two of its steps; at least one block."""
MIN_PIECES = 32
"""Of one fetch: what arrives when the two have met is in vain."""


class FetchRequest(NamedTuple):
    layout: str
    hashes: list[bytes]
    """From the last block to the first."""
    credit: int
    """Blocks that may be sent."""


class Piece(NamedTuple):
    position: int
    """Of its last block, among the hashes."""
    blocks: int


def encode_fetch(layout: str, hashes: Sequence[bytes], credit: int) -> tuple[Body, bytes]:
    return {"op": "fetch", "layout": layout, "credit": credit}, b"".join(hashes)


def decode_fetch(body: Body, content: bytes) -> FetchRequest:
    """Raises `BadMessage`."""
    count, rest = divmod(len(content), HASH_BYTES)
    if rest or not 0 < count <= MAX_BLOCKS:
        raise BadMessage(f"{len(content)} bytes of hashes: expected 1 to {MAX_BLOCKS} hashes of {HASH_BYTES} bytes")
    hashes = [content[HASH_BYTES * index : HASH_BYTES * (index + 1)] for index in range(count)]
    return FetchRequest(text_field(body, "layout"), hashes, decode_credit(body))


def encode_credit(blocks: int) -> Body:
    return {"op": "credit", "credit": blocks}


def decode_credit(body: Body) -> int:
    """Raises `BadMessage`."""
    credit = int_field(body.get("credit"), "credit")
    if not 0 < credit <= MAX_BLOCKS:
        raise BadMessage(f"credit is {credit}: expected 1 to {MAX_BLOCKS} blocks")
    return credit


def encode_end() -> Body:
    return {"op": "end"}


def encode_piece(piece: Piece) -> Body:
    return {"op": "blocks", "position": piece.position, "blocks": piece.blocks}


def decode_piece(body: Body, content: bytes | memoryview, block_bytes: int) -> Piece:
    """Raises `BadMessage`."""
    piece = Piece(int_field(body.get("position"), "position"), int_field(body.get("blocks"), "blocks"))
    if piece.position < 0 or piece.blocks < 1 or len(content) != piece.blocks * block_bytes:
        raise BadMessage(f"{piece.blocks} blocks in {len(content)} bytes: expected {block_bytes} bytes of each")
    return piece


def piece_blocks(block_bytes: int, count: int) -> int:
    """Blocks of one piece, of a fetch of `count`."""
    return max(1, min(PIECE_BYTES // block_bytes, count // MIN_PIECES))


def window_blocks(block_bytes: int) -> int:
    """Blocks that may be sent and not written yet."""
    return min(MAX_BLOCKS, max(2, WINDOW_BYTES // block_bytes))
