"""The objective: what a request is promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Times that requests are to stay within."""

    ttft_s: float = 2.0
    """To the first token."""
    tpot_s: float = 0.1
    """Mean of each later token."""
