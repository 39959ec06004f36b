"""The next token of each sequence, from its row of logits alone.

A row's token depends on the row, on its sequence and on nothing else: not on
the other rows, their number or their order. So every step is either exact
whatever its order (maxima, integer sums) or acts on single numbers. Sums of
floats are neither: a GPU adds one row in another order than sixty-four.
Probabilities are therefore integers here (2**40 is the likeliest token's), and
a token is drawn by one uniform number: a hash of seed, number of the answer
and position, so the same on every machine and after every preemption.

Ties go to the lower token id.

Logprobs are those of the model: log softmax of the logits as they come, before
penalties, bias, temperature and top-k/top-p/min-p (as OpenAI's API and vLLM's
`raw_logprobs` have it). The token that was chosen is reported even if it is
not among the likeliest.
"""
# B = rows of the pass that choose a token; b, c = some of them; V = vocabulary; n = likeliest tokens

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from symbiosis.serving.scheduling.sequence import Sequence

_ONE = float(1 << 40)
"""The weight of the likeliest token. 2**40 times 2**22 tokens still fits an int64."""
_AT_ONCE = 1 << 23
"""Most logits that are worked on at once: what is copied is at most a few times this."""
_LIKELY = 512
"""Top-k and top-p look at so many tokens first; all are sorted only if these do not suffice."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What the model thought of the token chosen, and of the likeliest ones."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token, logprob), likeliest first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: list[int]
    """-1 where the row held NaN, +inf or nothing finite: there is nothing to choose from."""
    logprobs: list[Logprobs | None]
    """None where not asked for, and where there is no token."""


def uniform(seed: int, number: int, position: int) -> float:
    """A number in [0, 1), always the same for the same three."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, number, position), digest_size=8, person=b"symbiosis").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits_BV: Tensor, sequences: Seq[Sequence]) -> Sampled:
    """Choose a token for each row; row i belongs to `sequences[i]`. The logits are not changed."""
    return report(logits_BV, sequences, choose(logits_BV, sequences))


@torch.inference_mode()
def choose(logits_BV: Tensor, sequences: Seq[Sequence]) -> SampledTokens:
    """The tokens; -1 where there is nothing to choose from."""
    if logits_BV.dim() != 2 or logits_BV.shape[0] != len(sequences):
        raise ValueError(f"logits of shape {tuple(logits_BV.shape)} for {len(sequences)} sequences")
    tokens_B = _likeliest(logits_BV)
    special = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_plain]
    at_once = max(1, _AT_ONCE // logits_BV.shape[1])
    for start in range(0, len(special), at_once):
        rows = special[start : start + at_once]
        some = [sequences[row] for row in rows]
        rows_b = _to_device(rows, torch.int64, logits_BV.device)
        x_bV = logits_BV.index_select(0, rows_b).float()
        _edit(x_bV, some)
        tokens_B.index_copy_(0, rows_b, _choose(x_bV, some))
    return SampledTokens(tokens_B)


class SampledTokens:
    """Tokens on their way to the host: whatever is launched after this does not hold them up."""

    def __init__(self, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B
        self._there: torch.cuda.Event | None = None
        self._copy = tokens_B
        if tokens_B.is_cuda and len(tokens_B):
            self._copy = torch.empty(tokens_B.shape, dtype=tokens_B.dtype, pin_memory=True)
            self._copy.copy_(tokens_B, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(tokens_B.device))

    def tolist(self) -> list[int]:
        if self._there is not None:
            self._there.synchronize()
        found: list[int] = self._copy.tolist()
        return found


@torch.inference_mode()
def report(logits_BV: Tensor, sequences: Seq[Sequence], chosen: SampledTokens) -> Sampled:
    """What `choose` chose, here."""
    tokens = chosen.tolist()
    return Sampled(tokens, _logprobs(logits_BV, sequences, tokens))


def is_reported(sequences: Seq[Sequence]) -> bool:
    """Whether anybody asks for more than the tokens: then `report` reads the logits."""
    return any(sequence.sampling.logprobs is not None for sequence in sequences)


def _to_device(values: Seq[float] | Seq[Seq[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _likeliest(x_bV: Tensor) -> Tensor:
    """The argmax of each row, the first of equals; -1 where the maximum is not a number to choose by."""
    best = x_bV.max(dim=-1)  # NaN counts as the largest
    return torch.where(best.values.isfinite(), best.indices, -1)


# Editing


def _edit(x_bV: Tensor, sequences: Seq[Sequence]) -> None:
    """Penalties, bias and bans, in place."""
    penalised = [row for row, sequence in enumerate(sequences) if sequence.sampling.is_penalised]
    if penalised:
        _penalise(x_bV, penalised, sequences)
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
        places = _to_device(rows, torch.int64, x_bV.device), _to_device(tokens, torch.int64, x_bV.device)
        x_bV.index_put_(places, _to_device(values, torch.float32, x_bV.device), accumulate=True)


def _penalise(x_bV: Tensor, rows: list[int], sequences: Seq[Sequence]) -> None:
    """Repetition over prompt and answer, then frequency and presence over the answer."""
    device, vocabulary = x_bV.device, x_bV.shape[1]
    some = [sequences[row] for row in rows]
    rows_b = _to_device(rows, torch.int64, device)
    prompts = _counts(some, vocabulary, device, prompt=True)
    answers = _counts(some, vocabulary, device, prompt=False)

    def each(name: str) -> Tensor:
        return _to_device([getattr(one.sampling, name) for one in some], torch.float32, device).unsqueeze(1)

    y_bV = x_bV.index_select(0, rows_b)
    repetition = each("repetition_penalty")
    repeated = torch.where(y_bV > 0, y_bV / repetition, y_bV * repetition)
    y_bV = torch.where((prompts > 0) | (answers > 0), repeated, y_bV)
    y_bV = y_bV - each("frequency_penalty") * answers - each("presence_penalty") * (answers > 0)
    x_bV.index_copy_(0, rows_b, y_bV)


def _counts(sequences: Seq[Sequence], vocabulary: int, device: torch.device, *, prompt: bool) -> Tensor:
    """How often each sequence has each token."""
    places = []
    for row, one in enumerate(sequences):
        tokens = np.frombuffer(one.tokens, dtype=np.int64)
        part = tokens[: one.prompt_length] if prompt else tokens[one.prompt_length :]
        places.append(part + row * vocabulary)
    flat = torch.from_numpy(np.concatenate(places)).to(device)
    counts = torch.zeros(len(sequences) * vocabulary, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts.view(len(sequences), vocabulary)


# Choosing


def _choose(x_bV: Tensor, sequences: Seq[Sequence]) -> Tensor:
    tokens_b = _likeliest(x_bV)
    drawn = [row for row, one in enumerate(sequences) if not one.sampling.is_greedy]
    # which way a row goes is its own affair: sorted or not, the same number draws another token
    for cut in (False, True):
        rows = [row for row in drawn if _is_cut(sequences[row]) == cut]
        if rows:
            rows_c = _to_device(rows, torch.int64, x_bV.device)
            x_cV = x_bV if len(rows) == len(sequences) else x_bV.index_select(0, rows_c)
            tokens_b.index_copy_(0, rows_c, _draw(x_cV, [sequences[row] for row in rows], cut=cut))
    return tokens_b


def _is_cut(sequence: Sequence) -> bool:
    return sequence.sampling.top_k > 0 or sequence.sampling.top_p < 1


def _draw(x_bV: Tensor, sequences: Seq[Sequence], *, cut: bool) -> Tensor:
    """A token of each row, as likely as its weight; if `cut`, of those that `top_k` and `top_p` leave."""
    asked = [(one.sampling.temperature, one.sampling.min_p, one.sampling.top_k, one.sampling.top_p) for one in sequences]
    numbers = [uniform(one.seed, one.number, one.output_length) for one in sequences]
    values = [(*each, number) for each, number in zip(asked, numbers, strict=True)]
    values_b51 = _to_device(values, torch.float64, x_bV.device).unsqueeze(-1)
    temperature_b1, min_p_b1, top_k_b1, top_p_b1, number_b1 = values_b51.unbind(1)

    best_b1 = x_bV.amax(dim=-1, keepdim=True)
    fit_b1 = best_b1.isfinite()
    x_bV = torch.where(fit_b1, x_bV - best_b1, 0.0)
    weight_bV = _weights(x_bV, temperature_b1, min_p_b1)
    if not cut:
        return torch.where(fit_b1, _place(weight_bV, number_b1), -1).squeeze(1)
    top_k_b1 = torch.where(top_k_b1 == 0, x_bV.shape[1], top_k_b1)
    chosen_b1, sure_b1 = _draw_of_the_likeliest(_LIKELY, x_bV, weight_bV, top_k_b1, top_p_b1, number_b1)
    unsure_c = (fit_b1 & ~sure_b1).squeeze(1).nonzero().squeeze(1)
    if unsure_c.numel():
        again = (each.index_select(0, unsure_c) for each in (x_bV, weight_bV, top_k_b1, top_p_b1, number_b1))
        chosen_b1.index_copy_(0, unsure_c, _draw_of_the_likeliest(x_bV.shape[1], *again)[0])
    return torch.where(fit_b1, chosen_b1, -1).squeeze(1)


def _weights(x_bV: Tensor, temperature_b1: Tensor, min_p_b1: Tensor) -> Tensor:
    """Probabilities as integers, up to a factor; `x_bV` is 0 for the likeliest token."""
    share_bV = (x_bV / temperature_b1.float()).exp_()
    return share_bV.mul_(share_bV >= min_p_b1.float()).mul_(_ONE).long()


def _place(weight_bV: Tensor, number_b1: Tensor) -> Tensor:
    """Where the number falls if each place is as wide as its weight."""
    sums_bV = weight_bV.cumsum(dim=-1)
    total_b1 = sums_bV[:, -1:]
    target_b1 = torch.minimum((number_b1 * total_b1.double()).long(), total_b1 - 1)
    return torch.searchsorted(sums_bV, target_b1, right=True)


def _draw_of_the_likeliest(
    n: int, x_bV: Tensor, weight_bV: Tensor, top_k_b1: Tensor, top_p_b1: Tensor, number_b1: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw of the first `top_k`, and of these of the first that have `top_p` of them together.

    Only the `n` likeliest are looked at. The second answer says whether that
    changed nothing: nobody who might have been kept was left out.
    """
    vocabulary = x_bV.shape[1]
    if n < vocabulary:
        tokens_bn = x_bV.topk(n, dim=-1).indices.sort(dim=-1).values  # by id first: ties go to the lower one
        x_bn, order_bn = x_bV.gather(1, tokens_bn).sort(dim=-1, descending=True, stable=True)
        tokens_bn = tokens_bn.gather(1, order_bn)
    else:
        x_bn, tokens_bn = x_bV.sort(dim=-1, descending=True, stable=True)
    weight_bn = weight_bV.gather(1, tokens_bn)
    place_n = torch.arange(x_bn.shape[1], device=x_bV.device)
    weight_bn = torch.where(place_n < top_k_b1, weight_bn, 0)
    sums_bn = weight_bn.cumsum(dim=-1)
    whole_b1 = torch.where(top_k_b1 < vocabulary, sums_bn[:, -1:], weight_bV.sum(dim=-1, keepdim=True))
    enough_b1 = (top_p_b1 * whole_b1.double()).long().clamp_(min=1)
    # the token that reaches top_p is the last: what comes before it has less
    kept_bn = (sums_bn - weight_bn < enough_b1) & (weight_bn > 0)
    if n < vocabulary:  # who has just as much as the last one looked at may have a twin that was left out
        sure_b1 = ~(kept_bn & (x_bn == x_bn[:, -1:])).any(dim=-1, keepdim=True) & ((top_k_b1 < n) | (top_k_b1 >= vocabulary))
    else:
        sure_b1 = torch.ones_like(top_k_b1, dtype=torch.bool)
    place_b1 = _place(torch.where(kept_bn, weight_bn, 0), number_b1)
    return tokens_bn.gather(1, place_b1.clamp(max=x_bn.shape[1] - 1)), sure_b1


# Reporting


def _logprobs(logits_BV: Tensor, sequences: Seq[Sequence], tokens: Seq[int]) -> list[Logprobs | None]:
    made: list[Logprobs | None] = [None] * len(sequences)
    asked = [row for row, one in enumerate(sequences) if one.sampling.logprobs is not None and tokens[row] >= 0]
    at_once = max(1, _AT_ONCE // logits_BV.shape[1])
    for start in range(0, len(asked), at_once):
        rows = asked[start : start + at_once]
        counts = [sequences[row].sampling.logprobs or 0 for row in rows]
        x_bV = logits_BV.index_select(0, _to_device(rows, torch.int64, logits_BV.device)).float()
        logprob_bV = x_bV.log_softmax(dim=-1)
        chosen_b1 = _to_device([tokens[row] for row in rows], torch.int64, x_bV.device).unsqueeze(1)
        chosen = logprob_bV.gather(1, chosen_b1).squeeze(1).tolist()
        top_bn = _top(x_bV, min(max(counts), x_bV.shape[1]))
        top, values = top_bn.tolist(), logprob_bV.gather(1, top_bn).tolist()
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            made[row] = Logprobs(chosen[place], tuple(zip(top[place], values[place], strict=True))[:count])
    return made


def _top(x_bV: Tensor, n: int) -> Tensor:
    """The `n` largest of each row, ties by token id: no two keys are equal, so there is one answer."""
    bits_bV = (x_bV + 0.0).view(torch.int32).long()  # + 0.0: there are two zeros, and they are equal
    ordered_bV = torch.where(bits_bV < 0, -(bits_bV & 0x7FFFFFFF), bits_bV)
    keys_bV = (ordered_bV << 31) - torch.arange(x_bV.shape[1], device=x_bV.device)
    return keys_bV.topk(n, dim=-1).indices
