"""The loss of packed rows: of each example the sum over its labels, over what its call says.

N = rows with a label, V = vocabulary.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis import kernels


def takes_items(model: PreTrainedModel) -> bool:
    """Whether Trainer tells this model how many labels all batches of a step have; else the mean of their means is taken."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())


def token_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The loss of each row in float32, [N]."""
    if kernels.run_on(logits_NV.device) and logits_NV.is_cuda:
        from symbiosis.kernels.cross_entropy import cross_entropy

        return cross_entropy(logits_NV, labels_N)
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="none")


def piece_losses(losses_N: Tensor, counts: list[int], items: list[float]) -> list[float]:
    """By piece: the sum of its losses, divided. 0 where nothing is to be learned."""
    sums = [part.sum() for part in torch.split(losses_N, counts)]
    return [float(total / divisor) for total, divisor in zip(sums, items, strict=True)]
