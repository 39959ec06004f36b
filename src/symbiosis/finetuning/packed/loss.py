"""The loss of rows with a label. N = rows with a label, V = vocabulary."""

from __future__ import annotations

import inspect

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from symbiosis import kernels


def accepts_loss_kwargs(model: PreTrainedModel) -> bool:
    """Whether `transformers.Trainer` passes `num_items_in_batch` to this model; else it averages the batches' means."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())


def token_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The loss of each row in float32, [N]."""
    if kernels.run_on(logits_NV.device) and logits_NV.is_cuda:
        from symbiosis.kernels.cross_entropy import cross_entropy

        return cross_entropy(logits_NV, labels_N)
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="none")
