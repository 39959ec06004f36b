"""Recovery of a pruned block: its last layer in closed form, then all of its weights by training on its own inputs and outputs.

The error of a row counts relative to the norm of the residual stream, because a norm follows. With a sensitivity it also counts
by how much each direction matters to the next token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.zoo.errors import NoSurrogate
from symbiosis.zoo.surrogates.activations import Activations, added
from symbiosis.zoo.surrogates.block_modules import Piece, PieceKind, module_name
from symbiosis.zoo.surrogates.pruning import (
    head_shapes,
    is_prunable_attention,
    is_prunable_ffn,
    prune_attention,
    prune_ffn,
    smaller_copy,
)

# S = sequences, T = tokens of each, R = rows, C = inputs of the last layer, D = model width
Report = Callable[[str, int, int], None]
_RIDGE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    seconds: float = 120.0
    """At most; the learning rate falls to zero over it."""
    epochs: float = 20.0
    learning_rate: float = 1e-3
    rows: int = 2048
    """Of one step."""
    mixed: float = 0.5
    """Share of the inputs that are drawn towards another one, at most half of the way: the true block labels them."""
    sensitivity: float = 0.9
    """Share of the loss that counts directions by the sensitivity of the model's output."""
    seed: int = 0


def parts_of(piece: Piece) -> tuple[Piece, ...]:
    """The pieces whose activations `prune` needs."""
    if piece.kind is not PieceKind.LAYER:
        return (piece,)
    return Piece(PieceKind.ATTENTION, piece.layer), Piece(PieceKind.FFN, piece.layer), piece


def prune(piece: Piece, module: nn.Module, known: Mapping[Piece, Activations], keep: float) -> nn.Module:
    """A smaller module, its last layers fitted to what the true one returns. Raises `NoSurrogate`."""
    if piece.kind is PieceKind.FFN:
        return _prune_ffn(piece, module, known[piece], keep)
    if piece.kind is PieceKind.ATTENTION:
        return _prune_attention(piece, module, known[piece], keep)
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    for part in parts_of(piece)[:-1]:
        name = module_name(module, part)
        small = prune(part, module.get_submodule(name), known, keep)
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
        tensors |= {f"{name}.{key}": tensor.detach() for key, tensor in small.named_parameters()}
    made = smaller_copy(module, tensors)
    ffn: Any = made.get_submodule(module_name(made, Piece(PieceKind.FFN, piece.layer)))
    _fit(made, ffn.down_proj, piece, known[piece])  # it makes up for what the attention has lost
    return made


def _prune_ffn(piece: Piece, module: Any, known: Activations, keep: float) -> nn.Module:
    if not is_prunable_ffn(module):
        raise NoSurrogate(f"{piece} is a {type(module).__name__}: expected linear layers gate_proj, up_proj and down_proj")
    small: Any = prune_ffn(module, _inputs_of(module, module.down_proj, piece, known), keep)
    _fit(small, small.down_proj, piece, known)
    return small  # type: ignore[no-any-return]


def _prune_attention(piece: Piece, module: Any, known: Activations, keep: float) -> nn.Module:
    if not is_prunable_attention(module):
        raise NoSurrogate(f"{piece} is a {type(module).__name__}: expected linear layers q_proj, k_proj, v_proj and o_proj")
    shapes = head_shapes(module, keep)
    if not shapes:
        raise NoSurrogate(f"keep={keep:g} leaves no head of {piece}: expected a share that leaves some")
    activations_RC = _inputs_of(module, module.o_proj, piece, known)
    candidates: list[Any] = [prune_attention(module, activations_RC, shape) for shape in shapes]
    return min(candidates, key=lambda small: _fit(small, small.o_proj, piece, known))  # type: ignore[no-any-return]


def _inputs_of(module: nn.Module, last: nn.Module, piece: Piece, known: Activations) -> Tensor:
    """What the last layer of a module reads, [R, C]."""
    found: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().flatten(0, -2)))
    try:
        with torch.no_grad():
            for start in range(0, len(known.inputs_STD), known.batch):
                added(piece, module, known.inputs_STD[start : start + known.batch], known.arguments)
    finally:
        hook.remove()
    return torch.cat(found)


def _outputs_of(module: nn.Module, piece: Piece, known: Activations) -> Tensor:
    starts = range(0, len(known.inputs_STD), known.batch)
    parts = [added(piece, module, known.inputs_STD[start : start + known.batch], known.arguments) for start in starts]
    return torch.cat(parts).flatten(0, 1)


@torch.no_grad()
def _fit(small: Any, last: nn.Linear, piece: Piece, known: Activations) -> float:
    """Least squares of the last layer, with its bias; returns the relative error that is left."""
    x_RC, y_RD = _inputs_of(small, last, piece, known), known.outputs_STD.flatten(0, 1)
    if piece.kind is PieceKind.LAYER:  # the rest of the layer adds to the stream too
        y_RD = y_RD - (_outputs_of(small, piece, known) - last(x_RC))
    weight_R = known.stream_ST.flatten().square().reciprocal()[:, None]
    ones = torch.ones(len(x_RC), 1, dtype=x_RC.dtype, device=x_RC.device)
    x_RC = torch.cat([x_RC, ones], 1)
    gram = (x_RC.T @ (weight_R * x_RC)).double()
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    found = torch.linalg.solve(gram, (x_RC.T @ (weight_R * y_RD)).double()).to(x_RC.dtype)
    last.weight.copy_(found[:-1].T)
    last.bias.copy_(found[-1])
    error = (x_RC @ found - y_RD).square() * weight_R
    return float(error.sum() / (y_RD.square() * weight_R).sum())


def train(
    piece: Piece,
    small: nn.Module,
    true: nn.Module,
    known: Activations,
    training: Training,
    sensitivity_DD: Tensor | None = None,
    report: Report = lambda what, done, total: None,
) -> list[float]:
    """Train all weights of the small block; returns the mean error of each tenth of the steps, as a share of the output."""
    generator = torch.Generator().manual_seed(training.seed)
    metric = None
    width = known.outputs_STD.shape[-1]
    if sensitivity_DD is not None:
        share = training.sensitivity
        metric = torch.linalg.cholesky(
            (share * sensitivity_DD + (1 - share) * torch.eye(width, device=sensitivity_DD.device)).double()
        ).to(known.outputs_STD.dtype)
    by_row = piece.kind is PieceKind.FFN
    if by_row:
        inputs, outputs, norms = (t.flatten(0, 1) for t in (known.inputs_STD, known.outputs_STD, known.stream_ST))
        size = min(training.rows, len(inputs))
    else:
        inputs, outputs, norms = known.inputs_STD, known.outputs_STD, known.stream_ST
        size = known.batch
    steps = max(10, round(training.epochs * len(inputs) / size))
    small.requires_grad_(True)
    optimizer = torch.optim.Adam(small.parameters(), lr=training.learning_rate, betas=(0.9, 0.98))
    started, errors, recent = time.monotonic(), list[float](), list[Tensor]()
    order = torch.empty(0, dtype=torch.long)
    step, progress = 0, 0.0
    while progress < 1:
        if len(order) < size:
            order = torch.randperm(len(inputs), generator=generator)
        chosen, order = order[:size], order[size:]
        rate = training.learning_rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x, y, scale = inputs[chosen], outputs[chosen], norms[chosen].reciprocal()[..., None]
        mixed = int(training.mixed * size)
        if mixed:  # recorded rows are few: between them the true block itself says what is right
            with torch.no_grad():
                way = 0.5 * torch.rand(mixed, *[1] * (x.dim() - 1), generator=generator).to(x)
                others = inputs[torch.randint(len(inputs), (mixed,), generator=generator)]
                x = torch.cat([x[:mixed].lerp(others, way), x[mixed:]])
                y = added(piece, true, x, known.arguments)
        error, whole = (added(piece, small, x, known.arguments) - y) * scale, y * scale
        if metric is not None:
            error, whole = error @ metric, whole @ metric
        loss = error.square().sum() / whole.square().sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        recent.append(loss.detach())
        step += 1
        before, progress = progress, max(step / steps, (time.monotonic() - started) / training.seconds)
        if int(before * 10) < int(min(progress, 1.0) * 10):
            errors.append(float(torch.stack(recent).mean()))
            recent.clear()
        report("training", round(min(progress, 1.0) * 100), 100)
    small.requires_grad_(False)
    return errors
