"""The compiled kernels, which run on torch's threads."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

_TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


def function(name: str, dtype: torch.dtype) -> Any:
    """The kernel of this name for this dtype; None if there is none."""
    library = _library()
    return getattr(library, f"symbiosis_{name}_{_TYPES[dtype]}") if library is not None and dtype in _TYPES else None


def symbol(name: str) -> Any:
    """The kernel of this name for all dtypes; None if it is not compiled."""
    return getattr(_library(), f"symbiosis_{name}", None)


@cache
def panel_widths() -> tuple[int, ...]:
    """Outputs of a panel, for each packed product that is compiled for this processor. The fastest first."""
    width = symbol("panel_width")
    if width is None:
        return ()
    width.restype = ctypes.c_int64
    return tuple(takewhile(bool, (int(width(ctypes.c_int64(number))) for number in count())))


def is_compiled() -> bool:
    """Whether the kernels can be used."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    found = find_spec("symbiosis.kernels.cpu._compiled")
    if found is None or found.origin is None or _is_stale(Path(found.origin)):
        return None
    try:
        _share_threads()
        return ctypes.CDLL(found.origin)
    except (OSError, AttributeError):  # compiled for another machine, or torch runs without OpenMP
        return None


def _is_stale(library: Path) -> bool:
    """Whether a source is newer than the library: arguments may have changed."""
    return any(source.stat().st_mtime > library.stat().st_mtime for source in library.parent.glob("*.[ch]"))


class _DlInfo(ctypes.Structure):
    """The linker's description of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _share_threads() -> None:
    """Load torch's OpenMP for the kernels: a second one would start as many threads again on the same cores."""
    info = _DlInfo()
    # torch is loaded already, so its name suffices; symbols of its dependencies are found too
    if not ctypes.CDLL(None).dladdr(ctypes.CDLL("libtorch_cpu.so").GOMP_parallel, ctypes.byref(info)):
        raise OSError("the linker does not find torch's OpenMP library")
    ctypes.CDLL(os.fsdecode(info.file), mode=ctypes.RTLD_GLOBAL)
