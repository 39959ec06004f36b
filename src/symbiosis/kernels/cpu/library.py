"""What was compiled, and its way to torch's threads."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_NUMBERS = {torch.float32: "float", torch.bfloat16: "bfloat16"}


def function(name: str, dtype: torch.dtype) -> Any:
    """The kernel of this name for numbers of this kind; None if there is none."""
    library = _library()
    return getattr(library, f"symbiosis_{name}_{_NUMBERS[dtype]}") if library is not None and dtype in _NUMBERS else None


def is_compiled() -> bool:
    """Whether there are any."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    found = find_spec("symbiosis.kernels.cpu._compiled")
    if found is None or found.origin is None or _is_stale(Path(found.origin)):
        return None
    try:
        _share_threads()
        return ctypes.CDLL(found.origin)
    except (OSError, AttributeError):  # made for another machine, or torch has no such threads
        return None


def _is_stale(library: Path) -> bool:
    """Whether it was made from other sources than those beside it: what we hand it may lie elsewhere now."""
    return any(source.stat().st_mtime > library.stat().st_mtime for source in library.parent.glob("*.[ch]"))


class _Place(ctypes.Structure):
    """What the linker says of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _share_threads() -> None:
    """Let the kernels find the OpenMP that torch uses: a second one would put as many threads again on the same cores."""
    place = _Place()
    # torch is loaded already, so its name is enough; a symbol is looked for in what it was linked with too
    if not ctypes.CDLL(None).dladdr(ctypes.CDLL("libtorch_cpu.so").GOMP_parallel, ctypes.byref(place)):
        raise OSError("the linker does not know where torch's threads are")
    ctypes.CDLL(os.fsdecode(place.file), mode=ctypes.RTLD_GLOBAL)
