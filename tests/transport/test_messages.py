"""Frames: an encoded message decodes to itself, and all other bytes are rejected."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from symbiosis.errors import BadMessage, SymbiosisError, TooLarge, VersionMismatch
from symbiosis.transport.messages import (
    _HEADER,
    _TENSOR,
    ALIGN,
    MAGIC,
    MAX_LAYERS,
    MAX_TENSORS,
    PROTOCOL,
    Kind,
    Message,
    decode,
    encode,
)
from symbiosis.types import Direction
from tests.transport.raw_peers import VALID_FRAMES

MAX_BYTES = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def decode_frame(frame, **options):
    return decode(memoryview(frame), **{"max_bytes": MAX_BYTES, **options})


def header(
    *, magic=MAGIC, version=PROTOCOL, kind=Kind.CALL, flags=0, tensors=0, request=1, layers=0, direction=0, zero=0, body=0
):
    return _HEADER.pack(magic, version, kind, flags, tensors, request, layers, direction, zero, body)


def tensor_frame(rows=1, width=1, offset=128, dtype=0, place=0, zero=0, size=256, count=1) -> bytes:
    descriptor = _TENSOR.pack(dtype, place, zero, 0, rows, width, offset)
    return (header(tensors=count) + descriptor * count).ljust(size, b"\0")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_arena", [False, True])
def test_decoding_inverts_encoding(dtype: torch.dtype, with_arena: bool):
    arena = torch.zeros(1 << 16, dtype=torch.uint8) if with_arena else None
    tensors = (torch.randn(3, 5).to(dtype), torch.randn(1, 7).to(dtype), torch.empty(0, 4, dtype=dtype))
    message = Message(Kind.CALL, 2**64 - 1, (0, 2**32 - 1), Direction.BACKWARD, True, tensors, {"a": [1, "é", None]})
    back = decode_frame(encode(message, arena), arena=arena)
    assert (back.kind, back.request, back.layers, back.direction) == (Kind.CALL, 2**64 - 1, (0, 2**32 - 1), Direction.BACKWARD)
    assert back.training
    assert back.body == message.body
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back.tensors, tensors, strict=True))


def test_nan_and_infinity_are_preserved_bit_for_bit():
    rows = torch.tensor([[float("nan"), float("inf"), -float("inf"), 3e38, -0.0]])
    back = decode_frame(encode(Message(Kind.CALL, tensors=(rows,)))).tensors[0]
    assert back.view(torch.int32).equal(rows.view(torch.int32))


def test_tensors_from_a_frame_are_copies():
    frame = encode(Message(Kind.CALL, tensors=(torch.ones(2, 2),)))
    back = decode_frame(frame).tensors[0]
    frame[:] = bytes(len(frame))
    assert torch.equal(back, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", BadMessage),
        (b"SYMB", BadMessage),
        (header()[:-1], BadMessage),
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n", BadMessage),
        (header(magic=b"BMYS"), BadMessage),
        (header(version=PROTOCOL + 1), VersionMismatch),
        (header(version=0), VersionMismatch),
        (header(kind=0), BadMessage),
        (header(kind=200), BadMessage),
        (header(direction=4), BadMessage),
        (header(flags=2), BadMessage),
        (header(zero=1), BadMessage),
        (header(tensors=MAX_TENSORS + 1).ljust(4096, b"\0"), BadMessage),
        (header(layers=MAX_LAYERS + 1).ljust(4096, b"\0"), BadMessage),
        (header(layers=3), BadMessage),
        (header(tensors=1), BadMessage),
        (header(body=10), BadMessage),
        (header(body=2**32 - 1), BadMessage),
        (header(body=3) + b"{}x", BadMessage),
        (header(body=2) + b"[]", BadMessage),
        (header(body=4) + b"null", BadMessage),
        (header(body=2) + b"\xff\xfe", BadMessage),
        (header(body=60000) + b'{"a":' + b"[" * 59995, BadMessage),
        (header(body=9005) + b'{"a":' + b"9" * 8999 + b"}", BadMessage),
        (tensor_frame(dtype=6), BadMessage),
        (tensor_frame(dtype=255), BadMessage),
        (tensor_frame(place=2), BadMessage),
        (tensor_frame(place=1), BadMessage),
        (tensor_frame(zero=1), BadMessage),
        (tensor_frame(offset=65), BadMessage),
        (tensor_frame(offset=256), BadMessage),
        (tensor_frame(offset=2**64 - 64), BadMessage),
        (tensor_frame(rows=2**64 - 1), TooLarge),
        (tensor_frame(rows=2**64 - 1, width=0), TooLarge),
        (tensor_frame(rows=0, width=2**63), TooLarge),
        (tensor_frame(rows=2**32, width=2**32), TooLarge),
        (tensor_frame(rows=2**31, width=2**31), TooLarge),
        (tensor_frame(rows=2**30, width=1), TooLarge),
        (tensor_frame(rows=33), BadMessage),
    ],
)
def test_invalid_frames_are_rejected(frame: bytes, error: type[SymbiosisError]):
    with pytest.raises(error):
        decode_frame(frame)


def test_a_body_beyond_the_limit_is_not_parsed():
    body = json.dumps({"a": "x" * 5000}).encode()
    with pytest.raises(BadMessage, match="beyond the bounds"):
        decode_frame(header(body=len(body)) + body, max_body=4096)


def test_many_tensors_over_the_same_bytes_do_not_exceed_the_limit():
    frame = bytearray(tensor_frame(rows=100_000, width=1, offset=2048, size=2048 + 400_000, count=32))
    with pytest.raises(TooLarge):
        decode_frame(frame)


def test_rows_without_width_take_no_memory():
    assert decode_frame(tensor_frame(rows=2**31, width=0)).tensors[0].shape == (2**31, 0)


@pytest.mark.parametrize("offset", [64, 1 << 16, 2**63, 2**64 - 64])
def test_a_tensor_beyond_the_arena_is_rejected(offset: int):
    with pytest.raises(BadMessage):
        decode_frame(tensor_frame(rows=16, place=1, offset=offset), arena=torch.zeros(64, dtype=torch.uint8))


def test_tensors_that_do_not_fit_the_arena_are_not_written():
    with pytest.raises(TooLarge):
        encode(Message(Kind.CALL, tensors=(torch.ones(100, 100),)), torch.zeros(ALIGN, dtype=torch.uint8))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    frame = bytearray(draw(st.sampled_from(VALID_FRAMES)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(frame) - 1)) if frame else 0
        match draw(st.integers(0, 4)):
            case 0:
                frame[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del frame[at:]
            case 2:
                frame[at:at] = draw(st.binary(max_size=16))
            case 3:
                frame[at : at + 8] = struct.pack("<Q", draw(st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])))
            case 4:
                del frame[at : at + draw(st.integers(1, 16))]
    return bytes(frame)


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(frame=mutated(), arena=st.booleans())
def test_mutated_frames_give_a_message_or_a_symbiosis_error(frame: bytes, arena: bool):
    try:
        message = decode_frame(frame, max_body=4096, arena=torch.zeros(4096, dtype=torch.uint8) if arena else None)
    except SymbiosisError:
        return
    assert isinstance(message, Message)
    assert sum(t.numel() * t.element_size() for t in message.tensors) <= MAX_BYTES


@settings(max_examples=500, deadline=None)
@given(frame=st.binary(max_size=400))
def test_random_bytes_give_a_symbiosis_error(frame: bytes):
    for start in (b"", MAGIC, MAGIC + bytes([PROTOCOL])):
        with contextlib.suppress(SymbiosisError):
            decode_frame(start + frame)


def test_no_two_errors_share_a_code():
    import importlib
    import pkgutil

    import symbiosis
    from symbiosis.errors import SymbiosisError

    for module in pkgutil.walk_packages(symbiosis.__path__, "symbiosis."):
        if not module.name.endswith(("__main__", "_compiled")):  # runs on import; no Python module
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
    kinds, codes = [SymbiosisError], {}
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if "code" in vars(kind):
            assert codes.setdefault(kind.code, kind) is kind, f"{kind} and {codes[kind.code]}"
