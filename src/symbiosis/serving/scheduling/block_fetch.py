"""Meeting in the middle: a sequence computes its tokens from the front while blocks of the last ones are copied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvMove:
    """How the keys and values of some tokens come to an engine."""

    computed: int
    """Tokens from the front that it computes."""
    copied: int
    """Tokens from the back that it copies."""
    seconds: float


def meet_in_the_middle(tokens: int, *, compute_s: float, copy_s: float, start_s: float = 0.0) -> KvMove:
    """`compute_s` and `copy_s` are seconds per token; the first copied token arrives after `start_s`."""
    if tokens <= 0:
        return KvMove(0, 0, 0.0)
    if copy_s <= 0 and compute_s <= 0:
        return KvMove(0, tokens, start_s)
    # computed × compute_s = start_s + (tokens − computed) × copy_s
    computed = min(tokens, max(0, round((start_s + tokens * copy_s) / (compute_s + copy_s))))
    copied = tokens - computed
    return KvMove(computed, copied, max(computed * compute_s, start_s + copied * copy_s if copied else 0.0))
