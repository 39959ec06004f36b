"""A plugin that finds tests, and code, that hold only while every thread is quick: `make delays`.

In each test a few functions of the product, others in every test and for every seed, take a little longer where they begin or
return, on all threads but the test's own. What fails fails again with the same seed: `make delays SEED=7 ARGS=tests/links`.
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

SHARE = 0.04  # of all places where functions begin or return
SECONDS, TIMES = 0.04, 6  # each, in one test
_SOURCE = os.path.dirname(symbiosis.__file__) + os.sep


class Delays:
    def __init__(self, seed: str) -> None:
        self._seed, self._test = seed, ""
        self._left: dict[tuple[CodeType, str], int] = {}
        """How many times a place will still be late in this test."""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test, self._left = item.nodeid, {}

    def begins(self, frame: FrameType, event: str, arg: object) -> Any:
        """Whatever begins on a thread is traced by this."""
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        frame.f_trace_lines = False
        self._delay(frame.f_code, event)
        return self._returns

    def _returns(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._delay(frame.f_code, event)
        return self._returns

    def _delay(self, code: CodeType, event: str) -> None:
        left = self._left.get((code, event))
        if left is None:
            left = TIMES if self._is_chosen(code, event) else 0
        self._left[code, event] = max(0, left - 1)
        if left:
            time.sleep(SECONDS)

    def _is_chosen(self, code: CodeType, event: str) -> bool:
        place = f"{self._seed}|{self._test}|{code.co_filename.removeprefix(_SOURCE)}|{code.co_qualname}|{event}"
        return zlib.crc32(place.encode()) < SHARE * 2**32


def pytest_configure(config: pytest.Config) -> None:
    delays = Delays(os.environ.get("SYMBIOSIS_DELAYS_SEED", "1"))
    config.pluginmanager.register(delays)
    threading.settrace(delays.begins)
