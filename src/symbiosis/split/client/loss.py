"""The causal language modeling loss of transformers, by a fused kernel on GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

_TRITON = find_spec("triton") is not None


def use_fused_loss(model: PreTrainedModel) -> None:
    """Let a causal model on a GPU use the kernel. The loss of any other model is unchanged."""
    if _TRITON and getattr(model, "loss_function", None) is ForCausalLMLoss:
        model.loss_function = causal_loss


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """`ForCausalLMLoss`, which is also the reference."""
    if not logits.is_cuda or logits.shape[-1] != vocab_size:
        plain: Tensor = ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more)
        return plain
    from symbiosis.kernels.cross_entropy import cross_entropy

    if shift_labels is None:
        assert labels is not None, "a loss needs labels"
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    total = cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index).sum()
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    count = num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    return total / count
