"""Samples the next token of each sequence from its row of logits.

A row's token depends only on the row and its sequence, not on the other rows, their number or their order. Every operation
is therefore either exact in any order (maxima, integer sums) or elementwise. Float sums are neither: a GPU adds one row in
another order than sixty-four. So top-p sums integers (2**40 for the most likely token).

A token is drawn as the winner of an exponential race: each token has a random number of its own, a hash of seed, completion
number, position and token id, and the largest `logit / temperature - log(exponential)` wins (Gumbel-max). The numbers are
equal on every machine and after every preemption. Logits that differ by rounding, as those of another device or of a prompt
in place of single steps do, change the token only where two tokens are that close. A number that selects from cumulative
probabilities would not do: rounding of all tokens before the selected one adds up.

Ties go to the lower token id.

Logprobs are those of the model: log softmax of the raw logits, before penalties, bias, temperature and top-k/top-p/min-p
(as in OpenAI's API and vLLM's `raw_logprobs`). The sampled token is reported even if it is not among the most likely.
"""
# B = rows that sample a token; b, c = some of them; V = vocabulary; n = most likely tokens

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from symbiosis.serving.scheduling.sequence import Logprobs, Sequence

_ONE = float(1 << 40)
"""The weight of the most likely token. 2**40 times 2**22 tokens still fits an int64."""
_MAX_LOGITS = 1 << 23
"""Most logits processed at once: bounds the memory of copies."""
_NUM_LIKELY = 512
"""Top-k and top-p sort this many tokens first, and all only if these do not suffice."""
_UNIT = 2.0**-31
_BELOW_1 = 1 - 2.0**-24


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Tokens and logprobs of a batch's rows, on the host."""

    tokens: list[int]
    """-1 where the row holds NaN, +inf or nothing finite: no token can be sampled."""
    logprobs: list[Logprobs | None]
    """None where not requested, and where there is no token."""


def noise_keys(seed: int, number: int, position: int) -> tuple[int, int]:
    """Two int32, a function of the arguments alone; the second is odd."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, number, position), digest_size=8, person=b"symbiosis").digest()
    key, factor = struct.unpack("<ii", digest)
    return key, factor | 1


def sample(logits_BV: Tensor, sequences: Seq[Sequence]) -> SampledBatch:
    """Sample a token for each row; row i belongs to `sequences[i]`. The logits are not changed."""
    return report(logits_BV, sequences, sample_tokens(logits_BV, sequences))


@torch.inference_mode()
def sample_tokens(logits_BV: Tensor, sequences: Seq[Sequence]) -> SampledTokens:
    """The tokens, on their way to the host; -1 where none can be sampled."""
    if logits_BV.dim() != 2 or logits_BV.shape[0] != len(sequences):
        raise ValueError(f"logits of shape {tuple(logits_BV.shape)} for {len(sequences)} sequences")
    tokens_B = _argmax(logits_BV)
    special = [row for row, sequence in enumerate(sequences) if not sequence.is_plain]
    max_rows = max(1, _MAX_LOGITS // logits_BV.shape[1])
    for start in range(0, len(special), max_rows):
        rows = special[start : start + max_rows]
        some = [sequences[row] for row in rows]
        rows_b = _to_device(rows, torch.int64, logits_BV.device)
        x_bV = logits_BV.index_select(0, rows_b).float()
        _apply_penalties_and_bias(x_bV, some)
        tokens_B.index_copy_(0, rows_b, _select(x_bV, some))
    return SampledTokens(tokens_B)


class SampledTokens:
    """Tokens that are copied to the host asynchronously: later kernel launches do not delay them."""

    def __init__(self, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B
        self._copied: torch.cuda.Event | None = None
        self._copy = tokens_B
        if tokens_B.is_cuda and len(tokens_B):
            self._copy = torch.empty(tokens_B.shape, dtype=tokens_B.dtype, pin_memory=True)
            self._copy.copy_(tokens_B, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tokens_B.device))

    def tolist(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._copy.tolist()
        return tokens


@torch.inference_mode()
def report(logits_BV: Tensor, sequences: Seq[Sequence], sampled: SampledTokens) -> SampledBatch:
    """Wait for the tokens of `sample_tokens`, and compute logprobs."""
    tokens = sampled.tolist()
    return SampledBatch(tokens, _logprobs(logits_BV, sequences, tokens))


def has_logprobs(sequences: Seq[Sequence]) -> bool:
    """Whether a sequence requests logprobs: then `report` reads the logits."""
    return any(sequence.sampling.logprobs is not None for sequence in sequences)


def _to_device(values: Seq[float] | Seq[Seq[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _argmax(x_bV: Tensor) -> Tensor:
    """The argmax of each row, the first of equals; -1 where the maximum is not finite."""
    best = x_bV.max(dim=-1)  # NaN counts as the largest
    return torch.where(best.values.isfinite(), best.indices, -1)


def _apply_penalties_and_bias(x_bV: Tensor, sequences: Seq[Sequence]) -> None:
    """In place, with the ban on stop tokens before `min_tokens`."""
    penalised = [row for row, sequence in enumerate(sequences) if sequence.sampling.is_penalised]
    if penalised:
        _penalize(x_bV, penalised, sequences)
    biases = [
        (row, token, bias) for row, sequence in enumerate(sequences) for token, bias in sequence.sampling.logit_bias.items()
    ]
    biases += [
        (row, token, -math.inf)
        for row, sequence in enumerate(sequences)
        if sequence.output_length < sequence.sampling.min_tokens
        for token in sequence.end_ids
    ]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        indices = _to_device(rows, torch.int64, x_bV.device), _to_device(tokens, torch.int64, x_bV.device)
        x_bV.index_put_(indices, _to_device(values, torch.float32, x_bV.device), accumulate=True)


def _penalize(x_bV: Tensor, rows: list[int], sequences: Seq[Sequence]) -> None:
    """Repetition penalty over prompt and completion, then frequency and presence penalties over the completion."""
    device, vocabulary = x_bV.device, x_bV.shape[1]
    some = [sequences[row] for row in rows]
    rows_b = _to_device(rows, torch.int64, device)
    prompts = _count_tokens(some, vocabulary, device, prompt=True)
    outputs = _count_tokens(some, vocabulary, device, prompt=False)

    def each(name: str) -> Tensor:
        return _to_device([getattr(one.sampling, name) for one in some], torch.float32, device).unsqueeze(1)

    y_bV = x_bV.index_select(0, rows_b)
    repetition = each("repetition_penalty")
    repeated = torch.where(y_bV > 0, y_bV / repetition, y_bV * repetition)
    y_bV = torch.where((prompts > 0) | (outputs > 0), repeated, y_bV)
    y_bV = y_bV - each("frequency_penalty") * outputs - each("presence_penalty") * (outputs > 0)
    x_bV.index_copy_(0, rows_b, y_bV)


def _count_tokens(sequences: Seq[Sequence], vocabulary: int, device: torch.device, *, prompt: bool) -> Tensor:
    """Occurrences of each token in each prompt, or in each completion."""
    indices = []
    for row, one in enumerate(sequences):
        tokens = np.frombuffer(one.tokens, dtype=np.int64)
        part = tokens[: one.prompt_length] if prompt else tokens[one.prompt_length :]
        indices.append(part + row * vocabulary)
    flat = torch.from_numpy(np.concatenate(indices)).to(device)
    counts = torch.zeros(len(sequences) * vocabulary, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts.view(len(sequences), vocabulary)


def _select(x_bV: Tensor, sequences: Seq[Sequence]) -> Tensor:
    tokens_b = _argmax(x_bV)
    random = [row for row, one in enumerate(sequences) if not one.sampling.is_greedy]
    for truncated in (False, True):
        rows = [row for row in random if _is_truncated(sequences[row]) == truncated]
        if rows:
            rows_c = _to_device(rows, torch.int64, x_bV.device)
            x_cV = x_bV if len(rows) == len(sequences) else x_bV.index_select(0, rows_c)
            tokens_b.index_copy_(0, rows_c, _draw(x_cV, [sequences[row] for row in rows], truncated=truncated))
    return tokens_b


def _is_truncated(sequence: Sequence) -> bool:
    return sequence.sampling.top_k > 0 or sequence.sampling.top_p < 1


def _draw(x_bV: Tensor, sequences: Seq[Sequence], *, truncated: bool) -> Tensor:
    """A random token of each row, by weight; if `truncated`, of those that `top_k` and `top_p` leave."""
    values = [(one.sampling.temperature, one.sampling.min_p, one.sampling.top_p) for one in sequences]
    temperature_b1, min_p_b1, top_p_b1 = _to_device(values, torch.float64, x_bV.device).unsqueeze(-1).unbind(1)
    integers = [(*noise_keys(one.seed, one.number, one.output_length), one.sampling.top_k) for one in sequences]
    key_b1, factor_b1, top_k_b1 = _to_device(integers, torch.int32, x_bV.device).unsqueeze(-1).unbind(1)

    best_b1 = x_bV.amax(dim=-1, keepdim=True)
    valid_b1 = best_b1.isfinite()
    x_bV = torch.where(valid_b1, x_bV - best_b1, 0.0).div_(temperature_b1.float())
    x_bV.masked_fill_(x_bV < min_p_b1.log().float(), -math.inf)
    if not truncated:
        tokens_V = torch.arange(x_bV.shape[1], dtype=torch.int32, device=x_bV.device)
        score_bV = x_bV.sub_(_race_times(tokens_V, key_b1, factor_b1))
        return torch.where(valid_b1, score_bV.argmax(dim=-1, keepdim=True), -1).squeeze(1)
    top_k_b1 = torch.where(top_k_b1 == 0, x_bV.shape[1], top_k_b1)
    arguments = (x_bV, top_k_b1, top_p_b1, key_b1, factor_b1)
    chosen_b1, exact_b1 = _draw_truncated(_NUM_LIKELY, *arguments)
    inexact_c = (valid_b1 & ~exact_b1).squeeze(1).nonzero().squeeze(1)
    if inexact_c.numel():
        again = (each.index_select(0, inexact_c) for each in arguments)
        chosen_b1.index_copy_(0, inexact_c, _draw_truncated(x_bV.shape[1], *again)[0])
    return torch.where(valid_b1, chosen_b1, -1).squeeze(1)


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


def _draw_truncated(
    n: int, x_bV: Tensor, top_k_b1: Tensor, top_p_b1: Tensor, key_b1: Tensor, factor_b1: Tensor
) -> tuple[Tensor, Tensor]:
    """A token of the `top_k` most likely, and of these of the most likely that sum to `top_p`; `x_bV` is at most 0.

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
    index_n = torch.arange(x_bn.shape[1], device=x_bV.device)
    weight_bn = torch.where(index_n < top_k_b1, _weights(x_bn), 0)
    sums_bn = weight_bn.cumsum(dim=-1)
    total_b1 = torch.where(top_k_b1 < vocabulary, sums_bn[:, -1:], _weights(x_bV).sum(dim=-1, keepdim=True))
    enough_b1 = (top_p_b1 * total_b1.double()).long().clamp_(min=1)
    # The token that reaches top_p is the last: the sum before it is smaller.
    nucleus_bn = (sums_bn - weight_bn < enough_b1) & (weight_bn > 0)
    if n < vocabulary:  # a token with the last one's logit may tie with one that was not sorted
        exact_b1 = ~(nucleus_bn & (x_bn == x_bn[:, -1:])).any(dim=-1, keepdim=True) & (
            (top_k_b1 < n) | (top_k_b1 >= vocabulary)
        )
    else:
        exact_b1 = torch.ones_like(top_k_b1, dtype=torch.bool)
    score_bn = x_bn - _race_times(tokens_bn.int(), key_b1, factor_b1)
    index_b1 = score_bn.masked_fill_(~nucleus_bn, -math.inf).argmax(dim=-1, keepdim=True)
    return tokens_bn.gather(1, index_b1), exact_b1


def _weights(x: Tensor) -> Tensor:
    """Probabilities as integers, up to a factor."""
    return x.exp().mul_(_ONE).long()


def _logprobs(logits_BV: Tensor, sequences: Seq[Sequence], tokens: Seq[int]) -> list[Logprobs | None]:
    result: list[Logprobs | None] = [None] * len(sequences)
    if not has_logprobs(sequences):
        return result
    requested = [row for row, one in enumerate(sequences) if one.sampling.logprobs is not None and tokens[row] >= 0]
    max_rows = max(1, _MAX_LOGITS // logits_BV.shape[1])
    for start in range(0, len(requested), max_rows):
        rows = requested[start : start + max_rows]
        counts = [sequences[row].sampling.logprobs or 0 for row in rows]
        x_bV = logits_BV.index_select(0, _to_device(rows, torch.int64, logits_BV.device)).float()
        logprob_bV = x_bV.log_softmax(dim=-1)
        chosen_b1 = _to_device([tokens[row] for row in rows], torch.int64, x_bV.device).unsqueeze(1)
        chosen = logprob_bV.gather(1, chosen_b1).squeeze(1).tolist()
        top_bn = _top(x_bV, min(max(counts), x_bV.shape[1]))
        top, values = top_bn.tolist(), logprob_bV.gather(1, top_bn).tolist()
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            result[row] = Logprobs(chosen[index], tuple(zip(top[index], values[index], strict=True))[:count])
    return result


def _top(x_bV: Tensor, n: int) -> Tensor:
    """The `n` largest of each row. Ties are broken by token id: all keys differ, so the result is unique."""
    bits_bV = (x_bV + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    ordered_bV = torch.where(bits_bV < 0, -(bits_bV & 0x7FFFFFFF), bits_bV)
    keys_bV = (ordered_bV << 31) - torch.arange(x_bV.shape[1], device=x_bV.device)
    return keys_bV.topk(n, dim=-1).indices
