"""The examples of a job in a file: all tokens concatenated, and the end of each example.

They stay tensors; an `Example` is created on access, because Python's ints take ten times the memory.

T = tokens of all examples, E = examples.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symbiosis.errors import BadData, OutOfRange
from symbiosis.finetuning.examples import IGNORED, Example

MAX_BYTES = 4 << 30
_NAMES = ("ends", "ids", "labels")
_DTYPES = ("I32", "I64")


class Dataset(Sequence[Example]):
    """Created by `read_dataset`, which checks the shapes."""

    def __init__(self, ids_T: Tensor, labels_T: Tensor, ends_E: Tensor) -> None:
        self._ids_T, self._labels_T, self._ends_E = ids_T, labels_T, ends_E

    def __len__(self) -> int:
        return len(self._ends_E)

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        span = slice(int(self._ends_E[at - 1]) if at else 0, int(self._ends_E[at]))
        return Example(tuple(self._ids_T[span].tolist()), tuple(self._labels_T[span].tolist()))

    def check(self, *, vocabulary: int, longest: int) -> None:
        """As `check_examples`, without creating them."""
        lengths_E = torch.diff(self._ends_E, prepend=self._ends_E.new_zeros(1))
        if bool((lengths_E > longest).any()):
            number = int((lengths_E > longest).nonzero()[0])
            length = int(lengths_E[number])
            raise OutOfRange(f"example {number} has {length} tokens", field="data", expected=f"1 to {longest} tokens")
        invalid_T = (self._ids_T < 0) | (self._ids_T >= vocabulary)
        invalid_T |= ((self._labels_T < 0) & (self._labels_T != IGNORED)) | (self._labels_T >= vocabulary)
        if bool(invalid_T.any()):
            place = invalid_T.nonzero()[0]
            number = int(torch.searchsorted(self._ends_E, place, right=True))
            what = f"example {number} has the token {int(self._ids_T[place])} with the label {int(self._labels_T[place])}"
            raise OutOfRange(what, field="data", expected=f"0 to {vocabulary - 1}")


def read_dataset(path: Path) -> Dataset:
    """Raises `BadData`. Its message does not contain the path."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise BadData(f"the data is not a plain file of at most {MAX_BYTES} bytes")
        with safe_open(path, framework="pt") as file:
            if sorted(file.keys()) != list(_NAMES):
                raise BadData(f"the data must have the tensors {', '.join(_NAMES)} and no other")
            for name in _NAMES:
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _DTYPES or len(tensor.get_shape()) != 1:
                    raise BadData(f"{name} must be one-dimensional, of 32 or 64 bit integers")
            ends_E, ids_T, labels_T = (file.get_tensor(name) for name in _NAMES)
    except OSError as error:
        raise BadData(f"the data cannot be read: {error.strerror or type(error).__name__}") from None
    except SafetensorError as error:
        raise BadData(f"the data is not a safetensors file: {str(error)[:200]}") from None
    ends_E = ends_E.long()
    if len(ids_T) != len(labels_T):
        raise BadData(f"there are {len(ids_T)} ids and {len(labels_T)} labels")
    if not len(ends_E) or int(ends_E[-1]) != len(ids_T):
        raise BadData(f"ends must have at least one example, and the last must end at {len(ids_T)}, the number of tokens")
    if bool((torch.diff(ends_E, prepend=ends_E.new_zeros(1)) < 1).any()):
        raise BadData("ends must increase: every example has at least one token")
    return Dataset(ids_T, labels_T, ends_E)
