"""Deferral in decoding: from the attention of one layer to that of the next, all steps are one layer program.

Between two attentions each row is computed alone: o, its adapter's delta, a sum,
a norm, the MLP, a sum, a norm, q, k and v. A layer that is called without gradients
returns a `DeferredTensor`. Any other use of it makes the executor run the whole
path in one call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from symbiosis.split.client.autograd import LayerRef
from symbiosis.split.client.deferred.graph import MAX_RESOLVED, Deferral, Node
from symbiosis.split.client.deferred.tensor import DeferredTensor, is_ordinary, plain

_MAX_ROWS = 512  # with more, computing takes longer than the calls
_FEW_ROWS = 8  # shapes that repeat: a token, or a few drafts of one


class DecodeDeferral(Deferral):
    has_history = False

    def is_active(self) -> bool:
        return not torch.is_grad_enabled() and is_ordinary()

    def can_defer(self, x: Tensor) -> bool:
        """Whether steps from these rows may be deferred."""
        if torch.is_grad_enabled() or not is_ordinary():
            return False
        like = x.node.like if type(x) is DeferredTensor else x
        if like.dtype is not self.dtype:  # the executor rounds sums to its own dtype
            return False
        if isinstance(like, Node):
            return True  # its source passed this check, with the same rows
        return is_worth_deferring(like.shape, on_gpu=like.device.type == "cuda") and not like.is_inference()

    def defer_layer(self, me: LayerRef, x: Tensor) -> DeferredTensor | None:
        """The layer's deferred result, or None if it must be computed now."""
        if self.resolved.get(me, 0) >= MAX_RESOLVED or not self.can_defer(x):
            return None
        if not self.owns(x):
            return DeferredTensor(Node(self, me, plain(x).clone(), me.layer.out_width))
        return DeferredTensor(Node(self, me, x.node, me.layer.out_width)) if x.node.fits(1) else None


def is_worth_deferring(shape: torch.Size, *, on_gpu: bool) -> bool:
    """Whether one call for a long program beats several calls for rows of this shape.

    On a GPU a program that repeats becomes one CUDA graph, as with one token for each sequence.
    The kernels of a program that runs once, such as a prefill, delay the tenant's own.
    """
    rows = math.prod(shape[:-1])
    if not 0 < rows <= _MAX_ROWS or shape[-1] == 0:
        return False
    return not on_gpu or rows <= _FEW_ROWS or (len(shape) > 2 and shape[-2] == 1)
