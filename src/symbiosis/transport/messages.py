"""The messages of a link: a fixed header, a bounded JSON body, dense 2-D buffers. No pickle.

    header | layer handles | tensor descriptors | JSON body | padding | tensor bytes

`decode` trusts nothing: it checks every count, dimension and offset against its bound and the frame's size before it uses
a byte. Tensors are matrices of rows. With an arena (shared memory) the tensor bytes are in the arena, and the descriptor's
offset points into it instead of into the frame. An arena is a tensor of bytes on the device that both ends share.

torch is imported with the first tensor: a client of statistics alone starts without it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from symbiosis.errors import BadCall, BadMessage, SymbiosisError, TooLarge, VersionMismatch, from_code
from symbiosis.types import Direction

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROTOCOL = 5
MAGIC = b"SYMB"
MAX_LAYERS = 16
MAX_TENSORS = 32
MAX_BODY_BYTES = 16 << 20
"""Of the JSON that an executor sends (the model's manifest)."""
MAX_DIM = 1 << 31
ALIGN = 64

_HEADER = struct.Struct("<4sBBBBQBBHI")  # magic, version, kind, flags, tensors, request, layers, direction, 0, body
_LAYER = struct.Struct("<I")
_TENSOR = struct.Struct("<BBHIQQQ")  # dtype, place, 0, 0, rows, width, offset

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8")
"""The dtypes of tensors that a message can carry. The index is the code in a descriptor."""
_IN_FRAME, _IN_ARENA = 0, 1


@cache
def _dtypes() -> tuple[torch.dtype, ...]:
    import torch

    return tuple(getattr(torch, name) for name in DTYPE_NAMES)


@cache
def _dtype_codes() -> dict[torch.dtype, int]:
    return {dtype: code for code, dtype in enumerate(_dtypes())}


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
    """One message in either direction. Only `kind` and `request` always apply."""

    kind: Kind
    request: int = 0
    layers: tuple[int, ...] = ()
    direction: Direction = Direction.FORWARD
    training: bool = False
    tensors: tuple[Tensor, ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
    receiver_state: Any = field(default=None, compare=False, repr=False)
    """Owned by the receiver; preserved where a link delivers the same message object again."""

    @classmethod
    def from_error(cls, error: SymbiosisError, request: int = 0) -> Message:
        return cls(Kind.ERROR, request, body={"code": error.code, "message": str(error)})

    def to_error(self) -> SymbiosisError:
        """The error that an ERROR message carries."""
        return from_code(str(self.body.get("code")), str(self.body.get("message")))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def lay_out(shapes: Iterable[tuple[int, int, torch.dtype]], start: int = 0) -> tuple[list[int], int]:
    """Aligned offsets of consecutive tensors with these rows, widths and dtypes, and the end offset."""
    offsets = []
    for rows, width, dtype in shapes:
        offsets.append(start)
        start = _aligned(start + rows * width * dtype.itemsize)
    return offsets, start


def lay_out_tensors(tensors: Iterable[Tensor], start: int = 0) -> tuple[list[int], int]:
    """`lay_out` for the shapes of these matrices."""
    return lay_out(((tensor.shape[0], tensor.shape[1], tensor.dtype) for tensor in tensors), start)


def _write_tensors(tensors: Sequence[Tensor], target: Tensor, start: int = 0) -> list[int]:
    """Copy tensors into `target` from `start` on. Returns their offsets."""
    offsets, end = lay_out_tensors(tensors, start)
    if end > len(target):
        raise TooLarge(f"{end} bytes do not fit the shared arena of {len(target)} bytes")
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor.numel():
            target[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return offsets


def encode(message: Message, arena: Tensor | None = None) -> bytearray:
    """The frame of a message. With an arena, the tensor bytes are written there. Raises `TooLarge`, `BadCall`."""
    for tensor in message.tensors:
        if tensor.dtype not in _dtype_codes():
            raise BadCall(f"links carry {', '.join(DTYPE_NAMES)}, got rows of {tensor.dtype}: cast them")
    body = json.dumps(message.body, separators=(",", ":")).encode() if message.body else b""
    fixed = _HEADER.size + _LAYER.size * len(message.layers) + _TENSOR.size * len(message.tensors)
    payload = end = _aligned(fixed + len(body))
    if arena is None and message.tensors:
        end = lay_out_tensors(message.tensors, payload)[1]
    frame = bytearray(end)
    offsets: list[int] = []
    if message.tensors:
        import torch

        target = torch.frombuffer(frame, dtype=torch.uint8) if arena is None else arena
        offsets = _write_tensors(message.tensors, target, payload if arena is None else 0)
    place = _IN_FRAME if arena is None else _IN_ARENA
    flags, counts = Flag.TRAINING if message.training else 0, (len(message.tensors), len(message.layers))
    _HEADER.pack_into(
        frame, 0, MAGIC, PROTOCOL, message.kind, flags, counts[0], message.request, counts[1], message.direction, 0, len(body)
    )
    at = _HEADER.size
    for handle in message.layers:
        _LAYER.pack_into(frame, at, handle)
        at += _LAYER.size
    for tensor, offset in zip(message.tensors, offsets, strict=True):
        rows, width = tensor.shape
        _TENSOR.pack_into(frame, at, _dtype_codes()[tensor.dtype], place, 0, 0, rows, width, offset)
        at += _TENSOR.size
    frame[at : at + len(body)] = body
    return frame


def decode(frame: memoryview, *, max_bytes: int, max_body: int = MAX_BODY_BYTES, arena: Tensor | None = None) -> Message:
    """The message in an untrusted frame. Raises `BadMessage`, `TooLarge` or `VersionMismatch`.

    Tensors in the frame are copied. Tensors in the arena are views, which the other end can change at any time. All tensors
    of a message together have at most `max_bytes`.
    """
    if len(frame) < _HEADER.size:
        raise BadMessage(f"a frame of {len(frame)} bytes is shorter than the header of {_HEADER.size}")
    magic, version, kind, flags, tensors, request, layers, direction, zero, body_size = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage("the frame does not start with this protocol's magic bytes; is the other end Symbiosis?")
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
        # the remaining budget: many tensors over the same bytes must not add up to more than was sent
        found.append(_read_tensor(frame, at + i * _TENSOR.size, arena, max_bytes))
        max_bytes -= found[-1].nbytes
    at += tensors * _TENSOR.size
    body, training = _read_body(frame[at : at + body_size]), bool(flags & Flag.TRAINING)
    return Message(Kind(kind), request, handles, Direction(direction), training, tuple(found), body)


def is_call(frame: memoryview) -> bool:
    """Whether an untrusted frame claims to be a CALL; nothing else of it is read."""
    return len(frame) >= _HEADER.size and frame[5] == Kind.CALL


def _read_tensor(frame: memoryview, at: int, arena: Tensor | None, max_bytes: int) -> Tensor:
    import numpy as np
    import torch

    code, place, zero, zero2, rows, width, offset = _TENSOR.unpack_from(frame, at)
    if code >= len(DTYPE_NAMES) or place not in (_IN_FRAME, _IN_ARENA) or zero or zero2:
        raise BadMessage(f"unknown dtype {code} or place {place} of a tensor")
    if rows > MAX_DIM or width > MAX_DIM:
        raise TooLarge(f"a tensor of {rows} x {width} exceeds the largest dimension of {MAX_DIM}")
    dtype = _dtypes()[code]
    size = rows * width * dtype.itemsize  # Python integers: no overflow
    if size > max_bytes:
        raise TooLarge(f"a tensor of {rows} x {width} {dtype} exceeds the {max_bytes} bytes left for this message")
    source = arena if place == _IN_ARENA else frame
    if source is None:
        raise BadMessage("a tensor in shared memory, on a link without shared memory")
    if offset + size > len(source) or offset % ALIGN:
        raise BadMessage(f"a tensor of {size} bytes at {offset} lies outside its buffer of {len(source)}")
    if size == 0:
        return torch.empty(rows, width, dtype=dtype)
    if isinstance(source, torch.Tensor):
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
