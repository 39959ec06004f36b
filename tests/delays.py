"""A plugin that finds race conditions in tests and code: `make delays`.

In each test a few functions of the package sleep where they begin or return, on all threads but the test's own. The seed and
the test choose the functions. A failure repeats with the same seed: `make delays SEED=7 ARGS=tests/transport`.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from types import CodeType, FrameType
from typing import Any

import pytest

import symbiosis

DELAYED_FRACTION = 0.04  # of all places where functions begin or return
DELAY_S, MAX_DELAYS = 0.04, 6  # of each place, in one test
_SOURCE = os.path.dirname(symbiosis.__file__) + os.sep


class Delays:
    def __init__(self, seed: str) -> None:
        self._seed, self._test = seed, ""
        self._left: dict[tuple[CodeType, str], int] = {}
        """Delays of a place that are left in this test."""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test, self._left = item.nodeid, {}

    def trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        """The trace function of new threads."""
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        frame.f_trace_lines = False
        self._delay(frame.f_code, event)
        return self._trace_return

    def _trace_return(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._delay(frame.f_code, event)
        return self._trace_return

    def _delay(self, code: CodeType, event: str) -> None:
        left = self._left.get((code, event))
        if left is None:
            left = MAX_DELAYS if self._is_chosen(code, event) else 0
        self._left[code, event] = max(0, left - 1)
        if left:
            time.sleep(DELAY_S)

    def _is_chosen(self, code: CodeType, event: str) -> bool:
        place = f"{self._seed}|{self._test}|{code.co_filename.removeprefix(_SOURCE)}|{code.co_qualname}|{event}"
        return zlib.crc32(place.encode()) < DELAYED_FRACTION * 2**32


def pytest_configure(config: pytest.Config) -> None:
    delays = Delays(os.environ.get("SYMBIOSIS_DELAYS_SEED", "1"))
    config.pluginmanager.register(delays)
    threading.settrace(delays.trace_call)
