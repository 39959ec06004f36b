"""Layer calls under autograd: forward and backward are one call each. The executor stores nothing in between.

Shapes: x is [..., I]; all leading dimensions are rows, and nothing is padded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from symbiosis.errors import BadCall
from symbiosis.kernels.first_order import first_order
from symbiosis.split.client.session import ClientSession, reply_widths
from symbiosis.types import WITH_BIAS, Direction, LayerKind, LayerSpec

_OPPOSITE = {Direction.FORWARD: Direction.BACKWARD, Direction.BACKWARD: Direction.FORWARD}


class LayerRef:
    """A layer as it is called: with the executor's bias or without. A session has one object for each of the two."""

    __slots__ = ("handle", "layer", "with_bias")

    def __init__(self, layer: LayerSpec, *, with_bias: bool) -> None:
        self.layer, self.with_bias = layer, with_bias
        self.handle = layer.handle | (WITH_BIAS * with_bias)


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _check_ordinary(tensor: Tensor) -> None:
    """Raise `BadCall` for dual tensors and tensors of a transform: the executor computes values only."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise BadCall("derivatives in forward mode (jvp, jacfwd) cannot be computed through the executor: use backward mode")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise BadCall(
            "torch.func's transforms cannot be computed through the executor: use torch.autograd, or a full copy of the model"
        )


def _call(
    session: ClientSession,
    layers: tuple[LayerSpec, ...],
    direction: Direction,
    tensors: tuple[Tensor, ...],
    *,
    training: bool,
    with_bias: tuple[bool, ...] = (),
) -> tuple[Tensor, ...]:
    for tensor in tensors:
        _check_ordinary(tensor)
    rows = tuple([t.detach() if t.requires_grad else t for t in tensors])
    if math.prod(rows[0].shape[:-1]) == 0:
        return tuple(rows[0].new_empty(*rows[0].shape[:-1], width) for width in reply_widths(layers, direction, rows))
    return session.call(layers, direction, rows, training=training, with_bias=with_bias)


class _MatrixCall(torch.autograd.Function):
    """One or several matrices over the same rows; in the backward direction exactly one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        session: ClientSession,
        layers: tuple[LayerSpec, ...],
        with_bias: tuple[bool, ...],
        direction: Direction,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.session, ctx.layers, ctx.direction, ctx.shape = session, layers, direction, x.shape
        return _call(session, layers, direction, (x,), training=ctx.needs_input_grad[0], with_bias=with_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        present = [(layer, grad) for layer, grad in zip(ctx.layers, grads, strict=True) if grad is not None]
        if not present or not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        back = _OPPOSITE[ctx.direction]
        if torch.is_grad_enabled():  # for second derivatives a differentiable product
            parts = [_MatrixCall.apply(grad, ctx.session, (layer,), (), back)[0] for layer, grad in present]  # type: ignore[no-untyped-call]
            return torch.stack(parts).sum(0).view(ctx.shape), None, None, None, None
        layers, tensors = tuple(layer for layer, _ in present), tuple(grad for _, grad in present)
        return _call(ctx.session, layers, back, tensors, training=True)[0], None, None, None, None


def call_matrices(
    session: ClientSession, layers: tuple[LayerSpec, ...], x: Tensor, with_bias: tuple[bool, ...] = ()
) -> tuple[Tensor, ...]:
    """x @ Wᵀ for each layer, plus its bias where `with_bias`, in one call."""
    if not _needs_grad(x):
        return _call(session, layers, Direction.FORWARD, (x,), training=False, with_bias=with_bias)
    return _MatrixCall.apply(x, session, layers, with_bias, Direction.FORWARD)  # type: ignore[no-untyped-call,no-any-return]


def call_layers(session: ClientSession, refs: tuple[LayerRef, ...], x: Tensor) -> tuple[Tensor, ...]:
    """One block, or one or several matrices, over the same rows."""
    if refs[0].layer.kind is LayerKind.BLOCK:
        return (call_block(session, refs[0].layer, x),)
    return call_matrices(session, tuple(ref.layer for ref in refs), x, tuple(ref.with_bias for ref in refs))


def call_transposed(session: ClientSession, layer: LayerSpec, x: Tensor) -> Tensor:
    """x @ W: the backward direction, used as a forward computation."""
    return _MatrixCall.apply(x, session, (layer,), (), Direction.BACKWARD)[0]  # type: ignore[no-untyped-call,no-any-return]


class _BlockCall(torch.autograd.Function):
    """A whole row-wise sub-module. Backward sends the rows again, and the executor recomputes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, session: ClientSession, layer: LayerSpec) -> Tensor:
        ctx.session, ctx.layer = session, layer
        ctx.save_for_backward(x)
        return _call(session, (layer,), Direction.FORWARD, (x,), training=ctx.needs_input_grad[0])[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _call(ctx.session, (ctx.layer,), Direction.BACKWARD, (x, grad), training=True)[0], None, None


def call_block(session: ClientSession, layer: LayerSpec, x: Tensor) -> Tensor:
    if not _needs_grad(x):
        return _call(session, (layer,), Direction.FORWARD, (x,), training=False)[0]
    return _BlockCall.apply(x, session, layer)  # type: ignore[no-untyped-call,no-any-return]


class _ProgramCall(torch.autograd.Function):
    """A layer program of a matrix, sums, a norm and a block: from the attention of a decoder layer to its end."""

    @staticmethod
    def forward(ctx: Any, session: ClientSession, program: tuple[int, ...], width: int, *rows: Tensor) -> Tensor:
        for tensor in rows:
            _check_ordinary(tensor)
        ctx.session, ctx.program, ctx.widths = session, program, [rows[0].shape[-1], width]
        ctx.dtypes = [tensor.dtype for tensor in rows]
        total, saved = session.run_program(program, [width, width], rows, training=any(ctx.needs_input_grad))
        ctx.save_for_backward(saved)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        _check_ordinary(grad)
        first, total = ctx.session.run_program_backward(ctx.program, ctx.widths, (*ctx.saved_tensors, grad))
        grads = first, *[total.to(dtype) for dtype in ctx.dtypes[1:]]
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *[grad if need else None for grad, need in zip(grads, needed, strict=True)]


def call_program(session: ClientSession, program: tuple[int, ...], rows: tuple[Tensor, ...], width: int) -> Tensor:
    """Run a program that contains one `SAVE`. `width` is that of its sums."""
    return _ProgramCall.apply(session, program, width, *rows)  # type: ignore[no-untyped-call,no-any-return]


class _ExpertsCall(torch.autograd.Function):
    """Experts of an MoE: gradients for the rows and for the router's weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weight: Tensor, session: ClientSession, layer: LayerSpec) -> Tensor:
        ctx.session, ctx.layer = session, layer
        ctx.save_for_backward(x, index, weight)
        training = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        return _call(session, (layer,), Direction.FORWARD, (x, index, weight), training=training)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, index, weight = ctx.saved_tensors
        dx, dweight = _call(ctx.session, (ctx.layer,), Direction.BACKWARD, (x, index, weight, grad), training=True)
        return dx, None, dweight.to(weight.dtype), None, None


def call_experts(session: ClientSession, layer: LayerSpec, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(0, layer.out_width)
    return _ExpertsCall.apply(x, index.long(), weight, session, layer)  # type: ignore[no-untyped-call,no-any-return]


def call_embedding(session: ClientSession, layer: LayerSpec, ids: Tensor) -> Tensor:
    """Embeddings of ids. They are frozen, so there is no gradient."""
    assert layer.kind is LayerKind.EMBEDDING, layer
    if ids.numel() == 0:
        return torch.empty(*ids.shape, layer.out_width, dtype=getattr(torch, session.manifest.dtype), device=ids.device)
    with torch.no_grad():
        rows = session.call((layer,), Direction.FORWARD, (ids.reshape(-1, 1).long(),), training=False)[0]
    return rows.view(*ids.shape, layer.out_width)
