"""A random token of each row of logits by torch's own operations: the reference of `token_draw`, used without Triton.

A token is the winner of an exponential race: each has a random number of its own, a hash of the row's keys and its id, and the
largest `logit / temperature - log(exponential)` wins (Gumbel-max). Rounding of logits changes the winner only where two tokens
are that close. A number that selects from cumulative probabilities would not do: rounding of all tokens before the selected
one adds up. Every operation is elementwise, a maximum or a sum of integers, which are exact in any order: a row's token does
not depend on the other rows. Ties go to the lower token id.
"""
# R = rows of logits, V = vocabulary, b = rows to draw from, n = most likely tokens

from __future__ import annotations

import math

import torch
from torch import Tensor

_ONE = float(1 << 40)
"""The weight of the most likely token. 2**40 times 2**22 tokens still fits an int64."""
NUM_LIKELY = 512
"""Top-k and top-p sort this many tokens first, and all only if these do not suffice."""
_UNIT = 2.0**-31
_BELOW_1 = 1 - 2.0**-24


def draw(logits_RV: Tensor, rows_b: Tensor, best_R: Tensor, floats_b3: Tensor, integers_b3: Tensor) -> Tensor:
    """Token ids, [b]; -1 where the row's largest logit is not finite.

    `best_R` are the maxima of the rows; the columns of `floats_b3` (float64) are temperature, log(min_p) and top_p; those of
    `integers_b3` (int32) two keys of the row's random numbers, of which the second is odd, and top_k (0: all).
    """
    best_b1 = best_R.index_select(0, rows_b).float().unsqueeze(1)
    temperature_b1, log_min_p_b1, top_p_b1 = floats_b3.unsqueeze(-1).unbind(1)
    valid_b1 = best_b1.isfinite()
    x_bV = logits_RV.index_select(0, rows_b).float()
    x_bV = torch.where(valid_b1, x_bV - best_b1, 0.0).div_(temperature_b1.float())
    x_bV.masked_fill_(x_bV < log_min_p_b1.float(), -math.inf)
    vocabulary = x_bV.shape[1]
    truncated_b = (top_p_b1 < 1).squeeze(1) | ((integers_b3[:, 2] > 0) & (integers_b3[:, 2] < vocabulary))
    tokens_b = torch.full_like(rows_b, -1)
    free_c, truncated_c = (~truncated_b).nonzero().squeeze(1), truncated_b.nonzero().squeeze(1)
    if free_c.numel():
        times_cV = _race_times(_ids(x_bV), *_keys(integers_b3.index_select(0, free_c)))
        tokens_b.index_copy_(0, free_c, x_bV.index_select(0, free_c).sub_(times_cV).argmax(dim=-1))
    if truncated_c.numel():
        arguments = x_bV, top_p_b1, integers_b3
        tokens_b.index_copy_(0, truncated_c, _draw_truncated(*(each.index_select(0, truncated_c) for each in arguments)))
    return torch.where(valid_b1.squeeze(1), tokens_b, -1)


def _draw_truncated(x_bV: Tensor, top_p_b1: Tensor, integers_b3: Tensor) -> Tensor:
    """A token of those that top-k and top-p leave."""
    arguments = x_bV, top_p_b1, integers_b3
    chosen_b1, exact_b1 = _draw_likely(NUM_LIKELY, *arguments)
    inexact_c = (~exact_b1).squeeze(1).nonzero().squeeze(1)
    if inexact_c.numel():
        again = (each.index_select(0, inexact_c) for each in arguments)
        chosen_b1.index_copy_(0, inexact_c, _draw_likely(x_bV.shape[1], *again)[0])
    return chosen_b1.squeeze(1)


def _draw_likely(n: int, x_bV: Tensor, top_p_b1: Tensor, integers_b3: Tensor) -> tuple[Tensor, Tensor]:
    """A token of the `top_k` most likely, and of these of the most likely that sum to `top_p`.

    Only the `n` most likely tokens are sorted. The second result says whether the token is exact, that is, no other token
    could have been in the selection.
    """
    vocabulary = x_bV.shape[1]
    if n < vocabulary:
        tokens_bn = x_bV.topk(n, dim=-1).indices.sort(dim=-1).values  # by id first: ties go to the lower id
        x_bn, order_bn = x_bV.gather(1, tokens_bn).sort(dim=-1, descending=True, stable=True)
        tokens_bn = tokens_bn.gather(1, order_bn)
    else:
        x_bn, tokens_bn = x_bV.sort(dim=-1, descending=True, stable=True)
    top_k_b1 = integers_b3[:, 2:]
    top_k_b1 = torch.where(top_k_b1 == 0, vocabulary, top_k_b1)
    index_n = torch.arange(x_bn.shape[1], device=x_bV.device)
    likely_bn = index_n < top_k_b1
    weight_bn = torch.where(likely_bn, _weights(x_bn), 0)
    sums_bn = weight_bn.cumsum(dim=-1)
    total_b1 = torch.where(top_k_b1 < vocabulary, sums_bn[:, -1:], _weights(x_bV).sum(dim=-1, keepdim=True))
    enough_b1 = (top_p_b1 * total_b1.double()).long().clamp_(min=1)
    # The token that reaches top_p is the last: the sum before it is smaller.
    nucleus_bn = likely_bn & ((sums_bn - weight_bn < enough_b1) | (top_p_b1 >= 1))
    if n < vocabulary:  # a token with the last one's logit may tie with one that was not sorted
        exact_b1 = ~(nucleus_bn & (x_bn == x_bn[:, -1:])).any(dim=-1, keepdim=True) & (
            (top_k_b1 < n) | (top_k_b1 >= vocabulary)
        )
    else:
        exact_b1 = torch.ones_like(top_k_b1, dtype=torch.bool)
    score_bn = x_bn - _race_times(tokens_bn.int(), *_keys(integers_b3))
    index_b1 = score_bn.masked_fill_(~nucleus_bn, -math.inf).argmax(dim=-1, keepdim=True)
    return tokens_bn.gather(1, index_b1), exact_b1


def _ids(x_bV: Tensor) -> Tensor:
    return torch.arange(x_bV.shape[1], dtype=torch.int32, device=x_bV.device)


def _keys(integers_b3: Tensor) -> tuple[Tensor, Tensor]:
    return integers_b3[:, :1], integers_b3[:, 1:2]


def _race_times(tokens_n: Tensor, key_b1: Tensor, factor_b1: Tensor) -> Tensor:
    """Logarithms of exponential numbers, one of each token id and row: independent, as far as a hash of 32 bits is."""
    hash_bn = _mix(_mix(tokens_n.clone()) * factor_b1 ^ key_b1)
    # Small numbers win, so these are the precise ones: 31 bits, scaled, and below 1, where the logarithm is finite.
    uniform_bn = (hash_bn & 0x7FFFFFFF).float().add_(0.5).mul_(_UNIT).clamp_(max=_BELOW_1)
    return uniform_bn.neg_().log1p_().neg_().log_()


def _mix(x: Tensor) -> Tensor:
    """In place: every bit of an int32 depends on all its bits (the last step of MurmurHash3). Shifts are logical."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(-0x7A143595)
    x.bitwise_xor_((x >> 13) & 0x7FFFF).mul_(-0x3D4D51CB)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _weights(x: Tensor) -> Tensor:
    """Probabilities as integers, up to a factor."""
    return x.exp().mul_(_ONE).long()
