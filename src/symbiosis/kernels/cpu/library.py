"""What was compiled, and its way to torch's threads."""

from __future__ import annotations

import ctypes
import re
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
    if found is None or found.origin is None:
        return None
    try:
        _share_threads()
        return ctypes.CDLL(found.origin)
    except OSError:  # made for another machine, say
        return None


def _share_threads() -> None:
    """Let the kernels find the OpenMP that torch uses: a second one would put as many threads again on the same cores."""
    mapped = (line[line.find("/") :] for line in Path("/proc/self/maps").read_text().splitlines())
    found = {path for path in mapped if re.match(r"lib(g|i)?omp", Path(path).name)}
    for path in sorted(found, key=lambda path: not path.startswith(str(Path(torch.__file__).parent)))[:1]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
