"""The tensors of an untrusted adapter folder.

Every name, dtype, shape and offset in the safetensors file is checked against the file's size before a byte of a tensor is
read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symbiosis.adapters.files import CONFIG, PICKLE, TENSORS, FileLimits, open_plain_file, parse_strict_json, quote
from symbiosis.errors import BadAdapter, UnsupportedAdapter

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_DTYPES = {"F64", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}
_MAX_DIMS = 4
_MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header declares it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """An open safetensors file whose header has been checked."""

    def __init__(self, file: BufferedReader, entries: dict[str, Entry]) -> None:
        self._file = file
        self.entries = entries

    def read(self, name: str) -> Tensor:
        """A tensor, all of its values finite. Raises `BadAdapter`."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._file.seek(entry.offset)
        if self._file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != entry.size:
            raise BadAdapter(f"{TENSORS} ended within {name}; it was changed while it was read")
        return _check_finite(tensor, f"{TENSORS}: {name}")


class InMemoryTensors:
    """Tensors in memory, behind the interface of `TensorFile`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises `BadAdapter` or `UnsupportedAdapter`."""
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES.values():
                raise UnsupportedAdapter(f"{name} has dtype {tensor.dtype}; served are {', '.join(_DTYPES)}")
        self._tensors = tensors
        self.entries = {name: Entry(name, tensor.dtype, tuple(tensor.shape), 0) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return _check_finite(self._tensors[name], name)


def _check_finite(tensor: Tensor, what: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise BadAdapter(f"{what} has values that are not finite (NaN or infinite); was the training stable?")
    return tensor


@contextmanager
def open_adapter_folder(folder: Path, limits: FileLimits) -> Iterator[tuple[dict[str, Any], TensorFile]]:
    """The config and the tensors of a folder. Raises `BadAdapter` or `UnsupportedAdapter`."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadAdapter(f"the adapter's folder {quote(folder.name)} cannot be opened: {error.strerror}") from None
    try:
        with open_plain_file(folder_fd, CONFIG, limits.max_config_bytes) as file:
            config = parse_strict_json(file.read(limits.max_config_bytes + 1), CONFIG)
        names = os.listdir(folder_fd)
        if TENSORS not in names and PICKLE in names:
            raise UnsupportedAdapter(
                f"{PICKLE} is a pickle, which can run code when it is read; only {TENSORS} is served. To convert it where you "
                "trust it: PeftModel.from_pretrained(model, folder).save_pretrained(new_folder)"
            )
        with open_plain_file(folder_fd, TENSORS, limits.max_bytes) as file:
            yield config, TensorFile(file, _read_header(file, limits))
    finally:
        os.close(folder_fd)


def _read_header(file: BufferedReader, limits: FileLimits) -> dict[str, Entry]:
    total = os.fstat(file.fileno()).st_size
    start = file.read(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > total - 8:
        raise BadAdapter(f"{TENSORS} is not a safetensors file, or truncated: {total} bytes with a declared header of {size}")
    if size > limits.max_header_bytes:
        raise BadAdapter(f"{TENSORS} has a header of {size} bytes, more than the {limits.max_header_bytes} allowed")
    header = parse_strict_json(file.read(size), f"the header of {TENSORS}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadAdapter(f"the header of {TENSORS} has metadata whose values are not texts")
    entries = {}
    spans = []
    for name, value in header.items():
        if not name or len(name) > _MAX_NAME or not name.isascii() or not name.isprintable():
            raise BadAdapter(f"{TENSORS} has a tensor named {quote(name)}: expected plain characters, {_MAX_NAME} at most")
        dtype, shape, begin, end = _parse_entry(name, value)
        entry = Entry(name, dtype, shape, 8 + size + begin)
        if entry.size != end - begin:
            raise BadAdapter(f"{TENSORS}: {name} of shape {shape} takes {entry.size} bytes, not the declared {end - begin}")
        entries[name] = entry
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise BadAdapter(f"{TENSORS} has tensors that overlap or leave a gap at byte {at} of the data")
        at = end
    if at != total - 8 - size:
        raise BadAdapter(f"{TENSORS} has {total - 8 - size} bytes of data, its header declares {at}; is the file complete?")
    if not entries:
        raise BadAdapter(f"{TENSORS} has no tensors; was the adapter saved on a process that holds its weights?")
    return entries


def _parse_entry(name: str, value: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise BadAdapter(f"{TENSORS}: {name} must be described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        known = isinstance(dtype, str) and dtype in _OTHER_DTYPES
        raise (UnsupportedAdapter if known else BadAdapter)(
            f"{TENSORS}: {name} has dtype {quote(dtype)}; served are {', '.join(_DTYPES)}: save the adapter in one of these"
        )
    if not _is_counts(shape) or len(shape) > _MAX_DIMS or any(dimension > 1 << 31 for dimension in shape):
        raise BadAdapter(f"{TENSORS}: {name} has the shape {quote(shape)}: expected up to {_MAX_DIMS} sizes")
    if 0 in shape:
        raise BadAdapter(
            f"{TENSORS}: {name} is empty (shape {shape}); under DeepSpeed ZeRO-3 or FSDP gather the weights before saving"
        )
    if not _is_counts(offsets) or len(offsets) != 2:
        raise BadAdapter(f"{TENSORS}: {name} has the data_offsets {quote(offsets)}: expected two numbers")
    return _DTYPES[dtype], tuple(shape), offsets[0], offsets[1]


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
