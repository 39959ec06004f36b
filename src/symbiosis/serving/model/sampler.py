"""Samples the next token of each sequence from its row of logits.

A row's token depends only on the row and its sequence, not on the other rows, their number or their order. Every operation
is therefore either exact in any order (maxima, sums of integers) or elementwise. Float sums are neither: a GPU adds one row in
another order than sixty-four.

Random tokens are drawn by `kernels.token_draw`, with random numbers that are functions of seed, completion number, position
and token id: equal on every machine and after every preemption. Ties go to the lower token id.

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

from symbiosis import kernels
from symbiosis.kernels import token_draw_reference
from symbiosis.serving.scheduling.sequence import Logprobs, Sampling, Sequence

_MAX_LOGITS = 1 << 23
"""Most logits processed at once: bounds the memory of copies."""


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
    best = logits_BV.max(dim=-1)  # NaN counts as the largest
    tokens_B = _finite(best)
    special = [row for row, sequence in enumerate(sequences) if not sequence.is_plain]
    adjusted = [row for row in special if _is_adjusted(sequences[row])]
    random = [row for row in special if not (sequences[row].sampling.is_greedy or _is_adjusted(sequences[row]))]
    if random:
        _draw(random, logits_BV, best.values, sequences, tokens_B)
    max_rows = max(1, _MAX_LOGITS // logits_BV.shape[1])
    for start in range(0, len(adjusted), max_rows):
        rows = adjusted[start : start + max_rows]
        some = [sequences[row] for row in rows]
        rows_b = _to_device(rows, torch.int64, logits_BV.device)
        x_bV = logits_BV.index_select(0, rows_b).float()
        _apply_penalties_and_bias(x_bV, some)
        best = x_bV.max(dim=-1)
        tokens_b = _finite(best)
        random = [row for row, sequence in enumerate(some) if not sequence.sampling.is_greedy]
        if random:
            _draw(random, x_bV, best.values, some, tokens_b)
        tokens_B.index_copy_(0, rows_b, tokens_b)
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


def _finite(best: torch.return_types.max) -> Tensor:
    """The argmax of each row, the first of equals; -1 where the maximum is not finite."""
    return torch.where(best.values.isfinite(), best.indices, -1)


def _is_adjusted(sequence: Sequence) -> bool:
    """Whether its logits are changed before a token is selected."""
    sampling = sequence.sampling
    return sampling.is_penalised or bool(sampling.logit_bias) or sequence.output_length < sampling.min_tokens


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


def _draw(rows: Seq[int], x_RV: Tensor, best_R: Tensor, sequences: Seq[Sequence], tokens_R: Tensor) -> None:
    """Set the tokens of these rows to random ones."""
    device, some = x_RV.device, [sequences[row] for row in rows]
    rows_b = _to_device(rows, torch.int64, device)
    floats_b3 = _to_device([_floats(each.sampling) for each in some], torch.float64, device)
    integers = [(*noise_keys(each.seed, each.number, each.output_length), each.sampling.top_k) for each in some]
    integers_b3 = _to_device(integers, torch.int32, device)
    if kernels.run_on(device) and x_RV.is_cuda:
        from symbiosis.kernels.token_draw import draw

        tokens_R.index_copy_(0, rows_b, draw(x_RV, rows_b, best_R, floats_b3, integers_b3))
        return
    max_rows = max(1, _MAX_LOGITS // x_RV.shape[1])
    for part in (slice(start, start + max_rows) for start in range(0, len(rows), max_rows)):
        drawn_b = token_draw_reference.draw(x_RV, rows_b[part], best_R, floats_b3[part], integers_b3[part])
        tokens_R.index_copy_(0, rows_b[part], drawn_b)


def _floats(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.temperature, math.log(sampling.min_p) if sampling.min_p else -math.inf, sampling.top_p


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
