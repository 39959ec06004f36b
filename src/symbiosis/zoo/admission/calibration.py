"""A calibration text, and how near a chain's predictions on it are to those of a model.

The windows of the text are two halves, every other window each: `predict` is for choosing a chain, `confirm` for measuring the
chosen one. N = windows, T = tokens of a window, V = vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis.zoo.errors import NotAdmitted

WINDOW = 256
MAX_WINDOWS = 24
"""6,144 tokens. What is left of a text is for recovery."""
_MIN_WINDOWS = 2
_ROWS = 1024
"""Tokens of one pass: their logits are in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Windows of a tokenised text."""

    name: str
    sha256: str
    windows_NT: Tensor
    rest_NT: Tensor
    """Other windows, for recovery."""

    @property
    def predict(self) -> Tensor:
        return self.windows_NT[0::2]

    @property
    def confirm(self) -> Tensor:
        return self.windows_NT[1::2]


def cut_windows(name: str, text: str, ids: list[int], window: int = WINDOW) -> CalibrationText:
    """Windows spread evenly over the text. Raises `NotAdmitted` if it is too short."""
    count = len(ids) // window
    if count < _MIN_WINDOWS:
        window, count = len(ids) // _MIN_WINDOWS, _MIN_WINDOWS
    if window < 32:
        raise NotAdmitted(f"the text {name} has {len(ids)} tokens: expected some thousands, at least 64")
    all_NT = torch.tensor(ids[: count * window]).view(count, window)
    chosen = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).round().long()
    is_rest = torch.ones(count, dtype=torch.bool)
    is_rest[chosen] = False
    return CalibrationText(name, hashlib.sha256(text.encode()).hexdigest(), all_NT[chosen], all_NT[is_rest])


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A chain against the model that it stands for, in means over the tokens of a text."""

    loss: float
    """Nats per token."""
    divergence: float
    """KL(model ‖ chain), nats per token: what the chain would lose on text that the model itself has written."""
    cosine: float
    """Of the probabilities of the vocabulary, the paper's measure."""
    top1: float
    """Share of positions at which both prefer the same token."""


class ReferenceModel:
    """A model's predictions on some windows, to measure chains against. Holds 2 · V bytes for each token."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, windows_NT: Tensor) -> None:
        self._windows_NT = windows_NT
        self._log_probs: list[Tensor] = []
        total = 0.0
        for x_BT in self._batches():
            log_p = _log_probs(model, {}, x_BT)
            total += float(_losses(log_p, x_BT).sum())
            self._log_probs.append(log_p.half())
        self.loss = total / self.tokens

    @property
    def tokens(self) -> int:
        """That are predicted."""
        count, window = self._windows_NT.shape
        return int(count * (window - 1))

    def _batches(self) -> tuple[Tensor, ...]:
        return torch.split(self._windows_NT, max(1, _ROWS // self._windows_NT.shape[1]))

    @torch.inference_mode()
    def measure(self, model: PreTrainedModel, weights: Mapping[str, Tensor] | None = None) -> Measurement:
        """A chain: a model, and weights in place of some of its own by name."""
        loss = divergence = cosine = top1 = 0.0
        for x_BT, stored in zip(self._batches(), self._log_probs, strict=True):
            log_q, log_p = _log_probs(model, weights or {}, x_BT), stored.float()
            loss += float(_losses(log_q, x_BT).sum())
            top1 += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            p = log_p.exp()
            divergence += float((p * (log_p - log_q)).sum())
            cosine += float(F.cosine_similarity(p, log_q.exp_(), dim=-1).sum())
        n = self.tokens
        return Measurement(loss=loss / n, divergence=max(divergence / n, 0.0), cosine=cosine / n, top1=top1 / n)


def _log_probs(model: PreTrainedModel, weights: Mapping[str, Tensor], x_BT: Tensor) -> Tensor:
    logits = functional_call(model, dict(weights), (), {"input_ids": x_BT, "use_cache": False}).logits
    found: Tensor = logits[:, :-1].float().log_softmax(-1)
    return found


def _losses(log_probs: Tensor, x_BT: Tensor) -> Tensor:
    return -log_probs.gather(-1, x_BT[:, 1:, None])[..., 0]
