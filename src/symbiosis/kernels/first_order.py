"""A backward pass that cannot be differentiated again, and raises if it is.

torch's `once_differentiable` does not always raise: `autograd.grad` with inputs bypasses its error, and gradients that
depend on saved tensors alone are lost silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from symbiosis.errors import BadCall


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `backward` of an autograd function, under `@staticmethod`."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise BadCall(
                "second derivatives (create_graph=True) are not supported by this layer: expected first derivatives only. "
                "Compute second ones with a full copy of the model"
            )
        return backward(ctx, *grads)

    return checked
