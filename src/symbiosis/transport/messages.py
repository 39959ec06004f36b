"""What crosses a link: a fixed header, a bounded JSON body, dense 2-D buffers. No pickle.

    header | layer handles | tensor descriptors | JSON body | padding | tensor bytes

A reader trusts nothing: every count, dimension and offset is checked against
its bound and against the size of the frame before any byte is used. Tensors
are matrices of rows; with an arena (shared memory) their bytes lie there and
the descriptor's offset points into it instead of into the frame. An arena is
a tensor of bytes, on whichever device the two ends share.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symbiosis.errors import BadMessage, TooLarge, VersionMismatch
from symbiosis.types import Direction

PROTOCOL = 4
MAGIC = b"SYMB"
MAX_LAYERS = 16
MAX_TENSORS = 32
MAX_BODY = 16 << 20
"""Most bytes of JSON an executor sends (its model's description)."""
MAX_DIM = 1 << 31
ALIGN = 64

_HEADER = struct.Struct("<4sBBBBQBBHI")  # magic, version, kind, flags, tensors, request, layers, direction, 0, body
_LAYER = struct.Struct("<I")
_TENSOR = struct.Struct("<BBHIQQQ")  # dtype, place, 0, 0, rows, width, offset

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_IN_FRAME, _IN_ARENA = 0, 1


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    MANIFEST = 3
    BLOB = 4
    CALL = 5
    FETCH = 6
    STATS = 7
    PING = 8
    BYE = 9
    REPLY = 10
    ERROR = 11
    MAP = 12
    CHANNEL = 13


class Flag(IntEnum):
    TRAINING = 1


@dataclass(slots=True)
class Message:
    """One message, either way. Only `kind` and `request` are always meaningful."""

    kind: Kind
    request: int = 0
    layers: tuple[int, ...] = ()
    direction: Direction = Direction.FORWARD
    training: bool = False
    tensors: tuple[Tensor, ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
    receiver_state: Any = field(default=None, compare=False, repr=False)
    """The receiver's own; it is there again where a link gives the same message again."""


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def lay_out(shapes: Iterable[tuple[int, int, torch.dtype]], start: int = 0) -> tuple[list[int], int]:
    """Where tensors of these rows, widths and dtypes lie one after the other, and where they end."""
    offsets = []
    for rows, width, dtype in shapes:
        offsets.append(start)
        start = _aligned(start + rows * width * dtype.itemsize)
    return offsets, start


def put(tensors: Sequence[Tensor], target: Tensor, start: int = 0) -> list[int]:
    """Copy tensors into bytes, laid out from `start` on; where each one lies."""
    offsets, end = lay_out(((t.shape[0], t.shape[1], t.dtype) for t in tensors), start)
    if end > len(target):
        raise TooLarge(f"{end} bytes do not fit the shared arena of {len(target)} bytes")
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor.numel():
            target[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return offsets


def encode(message: Message, arena: Tensor | None = None) -> bytearray:
    """The frame for a message. With an arena, tensor bytes are written there."""
    body = json.dumps(message.body, separators=(",", ":")).encode() if message.body else b""
    fixed = _HEADER.size + _LAYER.size * len(message.layers) + _TENSOR.size * len(message.tensors)
    payload = end = _aligned(fixed + len(body))
    if arena is None and message.tensors:
        end = lay_out(((t.shape[0], t.shape[1], t.dtype) for t in message.tensors), payload)[1]
    frame = bytearray(end)
    offsets: list[int] = []
    if message.tensors:
        offsets = (
            put(message.tensors, torch.frombuffer(frame, dtype=torch.uint8), payload)
            if arena is None
            else put(message.tensors, arena)
        )
    place = _IN_FRAME if arena is None else _IN_ARENA
    _HEADER.pack_into(
        frame,
        0,
        MAGIC,
        PROTOCOL,
        message.kind,
        Flag.TRAINING if message.training else 0,
        len(message.tensors),
        message.request,
        len(message.layers),
        message.direction,
        0,
        len(body),
    )
    at = _HEADER.size
    for handle in message.layers:
        _LAYER.pack_into(frame, at, handle)
        at += _LAYER.size
    for tensor, offset in zip(message.tensors, offsets, strict=True):
        rows, width = tensor.shape
        _TENSOR.pack_into(frame, at, _DTYPE_CODES[tensor.dtype], place, 0, 0, rows, width, offset)
        at += _TENSOR.size
    frame[at : at + len(body)] = body
    return frame


def decode(frame: memoryview, *, max_bytes: int, max_body: int = MAX_BODY, arena: Tensor | None = None) -> Message:
    """The message in a frame from outside. Raises `BadMessage`, `TooLarge` or `VersionMismatch`.

    Tensors from a frame are copies; tensors from an arena are views into it,
    which its other owner can change at any time. All tensors of a message
    together have at most `max_bytes`.
    """
    if len(frame) < _HEADER.size:
        raise BadMessage(f"a frame of {len(frame)} bytes is shorter than the header of {_HEADER.size}")
    magic, version, kind, flags, tensors, request, layers, direction, zero, body_size = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage("the frame does not start with this protocol's mark; is the other end Symbiosis?")
    if version != PROTOCOL:
        raise VersionMismatch(
            f"the other end speaks protocol {version}, this end {PROTOCOL}: install the same version of symbiosis"
        )
    if kind not in Kind._value2member_map_ or direction not in Direction._value2member_map_ or zero or flags > 1:
        raise BadMessage(f"unknown kind {kind}, direction {direction} or flags {flags} in the header")
    if tensors > MAX_TENSORS or layers > MAX_LAYERS or body_size > max_body:
        raise BadMessage(f"{tensors} tensors, {layers} layers or a body of {body_size} bytes is beyond the bounds")
    fixed = _HEADER.size + _LAYER.size * layers + _TENSOR.size * tensors
    if fixed + body_size > len(frame):
        raise BadMessage(f"the header announces {fixed + body_size} bytes, the frame has {len(frame)}")
    at = _HEADER.size
    handles = tuple(_LAYER.unpack_from(frame, at + i * _LAYER.size)[0] for i in range(layers))
    at += layers * _LAYER.size
    found: list[Tensor] = []
    for i in range(tensors):
        # what is left of the budget: many tensors over the same bytes must not add up to more than was sent
        found.append(_read_tensor(frame, at + i * _TENSOR.size, arena, max_bytes))
        max_bytes -= found[-1].nbytes
    at += tensors * _TENSOR.size
    body = _read_body(frame[at : at + body_size])
    return Message(
        kind=Kind(kind),
        request=request,
        layers=handles,
        direction=Direction(direction),
        training=bool(flags & Flag.TRAINING),
        tensors=tuple(found),
        body=body,
    )


def is_call(frame: memoryview) -> bool:
    """Whether a frame from outside claims to be a CALL; nothing else of it is looked at."""
    return len(frame) >= _HEADER.size and frame[5] == Kind.CALL


def _read_tensor(frame: memoryview, at: int, arena: Tensor | None, max_bytes: int) -> Tensor:
    code, place, zero, zero2, rows, width, offset = _TENSOR.unpack_from(frame, at)
    if code >= len(_DTYPES) or place not in (_IN_FRAME, _IN_ARENA) or zero or zero2:
        raise BadMessage(f"unknown dtype {code} or place {place} of a tensor")
    if rows > MAX_DIM or width > MAX_DIM:
        raise TooLarge(f"a tensor of {rows} x {width} is beyond what any message carries")
    dtype = _DTYPES[code]
    size = rows * width * dtype.itemsize  # Python integers: no overflow
    if size > max_bytes:
        raise TooLarge(f"a tensor of {rows} x {width} {dtype} is beyond the {max_bytes} bytes a message may carry")
    source = arena if place == _IN_ARENA else frame
    if source is None:
        raise BadMessage("a tensor in shared memory, on a link that shares none")
    if offset + size > len(source) or offset % ALIGN:
        raise BadMessage(f"a tensor of {size} bytes at {offset} lies outside its buffer of {len(source)}")
    if size == 0:
        return torch.empty(rows, width, dtype=dtype)
    if isinstance(source, Tensor):
        return source[offset : offset + size].view(dtype).view(rows, width)
    tensor = torch.empty(rows, width, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(source, dtype=np.uint8, count=size, offset=offset)
    return tensor


def _read_body(raw: memoryview) -> dict[str, Any]:
    if not raw:
        return {}
    try:
        body = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadMessage("the body is not a JSON object")
    return body
