"""Draws a random token of each row of logits, in one launch and without a copy of the logits.

Plain reference: `token_draw_reference`, which sorts. Here the token with the largest score (see there) is found in one pass
over the row. If it is within top-k and top-p, it is also the winner of these tokens alone; whether it is needs one more pass,
which counts what is more likely. If not, no token as unlikely as it is within them, and the next pass looks among the rest.

R = rows of logits, V = vocabulary, b = rows to draw from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _race_times(token, key, factor):  # type: ignore[no-untyped-def]
    hash = _mix((_mix(token.to(tl.uint32)) * factor) ^ key) & 0x7FFFFFFF
    u = tl.minimum((hash.to(tl.float32) + 0.5) * (2.0**-31), 1 - 2.0**-24)
    # log1p(-u): a series where 1 - u would round
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return tl.log(tl.where(u < 0.1, series, -tl.log(1 - u)))


@triton.jit  # type: ignore[untyped-decorator]
def _load(row, column, best, temperature, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as the draw compares them: at most 0; -inf outside of the row."""
    x = tl.load(row + column, mask=column < WIDTH, other=float("-inf")).to(tl.float32)
    return (x - best) / temperature


@triton.jit
def _weight(y):  # type: ignore[no-untyped-def]
    """2**40 for the most likely token: sums of integers are exact in any order."""
    return (tl.exp(y) * 1099511627776.0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_likely(row, best, temperature, floor, top_k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the weights of the `top_k` most likely tokens (0: of all)."""
    column = tl.arange(0, BLOCK)
    low, high = 0, 0x7F800000  # the bits of -y grow with it: the least below which there are top_k tokens, by bisection
    while (low < high) & (top_k > 0):
        middle = low + (high - low) // 2
        count_n = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            y = _load(row, start + column, best, temperature, WIDTH)
            bits = tl.maximum(-y, 0.0).to(tl.int32, bitcast=True)
            count_n += ((bits <= middle) & (start + column < WIDTH)).to(tl.int32)
        if tl.sum(count_n, 0) >= top_k:
            high = middle
        else:
            low = middle + 1
    sum_n, count_n, last = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, WIDTH, BLOCK):
        y = _load(row, start + column, best, temperature, WIDTH)
        bits = tl.maximum(-y, 0.0).to(tl.int32, bitcast=True)
        weight = tl.where(y >= floor, _weight(y), 0)
        ahead = (bits < low) | (top_k == 0)
        count_n += (ahead & (start + column < WIDTH)).to(tl.int32)
        sum_n += tl.where(ahead, weight, 0)
        last = tl.maximum(last, tl.where(bits == low, weight, 0))
    total = tl.sum(sum_n, 0)
    if top_k > 0:  # of equals at the end, as many as there is room for
        total += (top_k - tl.sum(count_n, 0)).to(tl.int64) * tl.max(last, 0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, rows, bests, floats, integers, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + program)
    row, best = logits + source * stride, tl.load(bests + source).to(tl.float32)
    temperature = tl.load(floats + 3 * program).to(tl.float32)
    floor, top_p = tl.load(floats + 3 * program + 1).to(tl.float32), tl.load(floats + 3 * program + 2)
    key = tl.load(integers + 3 * program).to(tl.uint32, bitcast=True)
    factor = tl.load(integers + 3 * program + 1).to(tl.uint32, bitcast=True)
    top_k = tl.load(integers + 3 * program + 2)
    top_k = tl.where(top_k < WIDTH, top_k, 0)
    enough = tl.full((), 1, tl.int64)
    if top_p < 1:
        total = _sum_of_likely(row, best, temperature, floor, top_k, WIDTH, BLOCK)
        enough = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)

    column = tl.arange(0, BLOCK)
    searching = (best == best) & (tl.abs(best) != float("inf"))  # noqa: PLR0124 - NaN
    # only what is more likely than the token that was chosen last takes part
    chosen, limit = tl.where(searching, WIDTH, -1), tl.full((), float("-inf"), tl.float32)
    while searching:
        best_n, token_n = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        for start in range(0, WIDTH, BLOCK):
            token = start + column
            y = _load(row, token, best, temperature, WIDTH)
            takes_part = (y >= floor) & ((y > limit) | ((y == limit) & (token < chosen)))
            score = tl.where(takes_part, y - _race_times(token, key, factor), float("-inf"))
            better = score > best_n
            best_n, token_n = tl.where(better, score, best_n), tl.where(better, token, token_n)
        chosen = tl.min(tl.where(best_n == tl.max(best_n, 0), token_n, 0x7FFFFFFF), 0)
        limit = _load(row, chosen, best, temperature, WIDTH)
        searching = (top_p < 1) | (top_k > 0)
        if searching:
            sum_n, count_n = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int32)
            for start in range(0, WIDTH, BLOCK):
                token = start + column
                y = _load(row, token, best, temperature, WIDTH)
                ahead = (y > limit) | ((y == limit) & (token < chosen))
                count_n += ahead.to(tl.int32)
                sum_n += tl.where(ahead & (y >= floor), _weight(y), 0)
            searching = ((top_k > 0) & (tl.sum(count_n, 0) >= top_k)) | ((top_p < 1) & (tl.sum(sum_n, 0) >= enough))
    tl.store(out + program, chosen.to(tl.int64))


def draw(logits_RV: Tensor, rows_b: Tensor, best_R: Tensor, floats_b3: Tensor, integers_b3: Tensor) -> Tensor:
    """Computes what `token_draw_reference.draw` does."""
    out_b = torch.empty_like(rows_b)
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    if len(rows_b):
        with torch.cuda.device_of(logits_RV):  # type: ignore[no-untyped-call]
            _draw[(len(rows_b),)](
                logits_RV, rows_b, best_R.contiguous(), floats_b3.contiguous(), integers_b3.contiguous(), out_b,
                logits_RV.stride(0), WIDTH=logits_RV.shape[1], BLOCK=_BLOCK, num_warps=16,
            )  # fmt: skip
    return out_b
