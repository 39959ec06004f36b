"""Batching policies for tests, in place of the executor's (`Executor.use_policy`)."""

from __future__ import annotations

import threading
from typing import Any

from symbiosis.split.executor.policies import Decision


class NeverPolicy:
    """Runs no call; `called` is set once a call is pending."""

    name = "never"

    def __init__(self) -> None:
        self.called = threading.Event()

    def decide(self, pending: Any, *_: Any) -> Decision:
        if pending:
            self.called.set()
        return Decision()


class PairPolicy:
    """Waits for two calls, then runs them as one batch."""

    name = "pair"

    def decide(self, pending: Any, *_: Any) -> Decision:
        return Decision(batch=tuple(pending)) if len(pending) == 2 else Decision()
