"""What was compiled, and its way to torch's threads."""

from __future__ import annotations

import ctypes
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


@cache
def _library() -> ctypes.CDLL | None:
    found = find_spec("symbiosis.kernels.cpu._compiled")
    if found is None or found.origin is None:
        return None
    try:
        _share_threads()
        return ctypes.CDLL(found.origin)
    except OSError:  # made for another machine, say
        return None


def _share_threads() -> None:
    """Let the kernels find the OpenMP that torch uses: a second one would put as many threads again on the same cores."""
    home = str(Path(torch.__file__).parents[1])
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if path.startswith(home) and "omp" in Path(path).name:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
