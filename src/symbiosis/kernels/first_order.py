"""A backward that cannot be differentiated again, and says so.

torch's `once_differentiable` says it only to some: `autograd.grad` with inputs
goes around its error, and what depends on saved tensors alone is lost in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from symbiosis.errors import BadCall


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Of an autograd function, under `@staticmethod`."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise BadCall(
                "second derivatives (create_graph=True) cannot be computed through this layer: expected first ones only. "
                "Compute them with a full copy of the model"
            )
        return backward(ctx, *grads)

    return checked
