"""Numbers too small for their format's usual form: a CPU takes up to a hundred times as long for them, so whoever sent them
would keep everybody else waiting.
"""

from __future__ import annotations

import torch


def flush_to_zero() -> None:
    """On this thread, and on those that it will start for its products. First thing a thread does that computes for several."""
    torch.set_flush_denormal(True)
