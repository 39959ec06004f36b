"""A machine-independent measure of work: the lines of Python that run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(do: Callable[[], object]) -> int:
    """The lines that `do` runs on this thread, its callees included; a C function counts as the line that calls it."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return lines
