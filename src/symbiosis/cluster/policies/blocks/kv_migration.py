"""Moving the keys and values of a request to another instance of a block: recompute from the front, copy from the back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from symbiosis.cluster.policies.blocks.block_cost import BlockCost


@dataclass(frozen=True, slots=True)
class KvMove:
    """How many tokens are computed and how many copied, and the seconds until the keys and values are there."""

    computed: int
    copied: int
    seconds: float
    restarts: bool = False
    """Nothing can be copied, and inputs of the block are gone: the request computes its chain again from the first block."""


def plan_kv_move(
    cost: BlockCost, tokens: int, latency_s: float, bytes_s: float, *, can_compute: bool, can_copy: bool = True
) -> KvMove:
    """The fastest move of `tokens` tokens over a link.

    With `can_compute` the two meet: token ids are known, so the first block of a chain computes the front while the back is
    copied. Later blocks would need the outputs of all blocks before them.
    """
    if not can_copy:
        return KvMove(tokens, 0, 0.0, restarts=True)
    token_s = cost.kv_bytes / bytes_s
    if not can_compute or token_s == 0.0:
        return KvMove(0, tokens, latency_s + tokens * token_s)
    # prompt_s(n) = latency + (tokens - n) * token_s, with prompt_s(n) = p n + a n² / 2
    half, linear, constant = cost.attention_s / 2, cost.prefill_s + token_s, latency_s + tokens * token_s
    met = (math.sqrt(linear * linear + 4 * half * constant) - linear) / (2 * half) if half else constant / linear
    computed = min(tokens, math.floor(met))
    copy_s = latency_s + (tokens - computed) * token_s if computed < tokens else 0.0
    return KvMove(computed, tokens - computed, max(cost.prompt_s(computed), copy_s))
