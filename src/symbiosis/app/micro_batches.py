"""Micro-batches in flight at once: while one waits for the network, the others compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import SymbiosisError


def accumulate_gradients(model: Any, micro_batches: Sequence[Mapping[str, Any]], *, in_flight: int = 4) -> Tensor:
    """Add the gradients of the mean loss over the micro-batches to `.grad` of the trained parameters. Returns that loss.

    Plain reference: `for batch in micro_batches: (model(**batch).loss / len(micro_batches)).backward()`. Gradients are
    added in the same order, whichever micro-batch ends first. Up to `in_flight` of them run in threads of their own, each
    with a connection of its own. If one fails, `.grad` stays as it was. Random numbers (dropout) are drawn in the order of
    the threads: a run with dropout does not repeat.
    """
    if not micro_batches or in_flight < 1:
        raise SymbiosisError(f"expected one micro-batch or more and in_flight >= 1, got {len(micro_batches)} and {in_flight}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise SymbiosisError("no parameter of the model requires a gradient: wrap it with PEFT (get_peft_model) first")
    device = trained[0].device.type
    is_autocast, autocast_dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def run(batch: Mapping[str, Any]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        with torch.enable_grad(), torch.autocast(device, autocast_dtype, is_autocast):  # both belong to a thread
            loss = model(**batch).loss / len(micro_batches)
        return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True)

    with ThreadPoolExecutor(min(in_flight, len(micro_batches)), thread_name_prefix="symbiosis-micro-batch") as threads:
        results = list(threads.map(run, micro_batches))
    for _, gradients in results:
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return torch.stack([loss for loss, _ in results]).sum()
