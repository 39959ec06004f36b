"""What blocks of a model read and return on a text: recorded from one pass of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.zoo.surrogates.block_modules import Piece, PieceKind, decoder_layers, first_tensor, module_path

# S = sequences, T = tokens of each, D = model width
_OF_CACHE = ("past_key_values", "past_key_value", "use_cache", "cache_position")


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one piece."""

    inputs_STD: Tensor
    outputs_STD: Tensor
    """What the piece adds to the residual stream."""
    stream_ST: Tensor
    """Norms of the residual stream after the layer: an error counts relative to them, because a norm follows."""
    arguments: dict[str, Any]
    """Others that the module is called with, for `batch` sequences: positions, mask."""
    batch: int


def added(piece: Piece, module: nn.Module, inputs: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What a module in the place of the piece adds to the residual stream."""
    if piece.kind is PieceKind.FFN:
        return first_tensor(module(inputs))
    output = first_tensor(module(hidden_states=inputs, **arguments))
    return output - inputs if piece.kind is PieceKind.LAYER else output


class _LastLayer(Exception):
    pass


@torch.no_grad()
def record(
    model: nn.Module,
    pieces: Sequence[Piece],
    ids_ST: Tensor,
    *,
    batch: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Piece, Activations]:
    """Of these pieces on these tokens. The number of sequences is a multiple of `batch`."""
    assert len(ids_ST) % batch == 0
    assert len(ids_ST) > 0
    layers, found = decoder_layers(model), {piece: _Recorder(piece) for piece in pieces}
    last = max(piece.layer for piece in pieces)

    def stop(*_: Any) -> None:
        raise _LastLayer

    hooks = []
    for piece, recorder in found.items():
        module = model.get_submodule(module_path(model, piece))
        hooks.append(module.register_forward_hook(recorder.block, with_kwargs=True))
        hooks.append(layers[piece.layer].register_forward_hook(recorder.layer))
    hooks.append(layers[last].register_forward_hook(stop))
    try:
        for start in range(0, len(ids_ST), batch):
            try:
                model(input_ids=ids_ST[start : start + batch], use_cache=False)
            except _LastLayer:
                progress(start + batch, len(ids_ST))
    finally:
        for hook in hooks:
            hook.remove()
    return {piece: recorder.result(batch) for piece, recorder in found.items()}


class _Recorder:
    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._arguments: dict[str, Any] = {}

    def block(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        named = dict(named)
        inputs = named.pop("hidden_states") if "hidden_states" in named else args[0]
        self._arguments = {name: value for name, value in named.items() if name not in _OF_CACHE}
        result = first_tensor(output)
        self._inputs.append(inputs.detach().clone())
        self._outputs.append((result - inputs if self._piece.kind is PieceKind.LAYER else result).detach().clone())

    def layer(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._norms.append(first_tensor(output).float().norm(dim=-1))

    def result(self, batch: int) -> Activations:
        return Activations(torch.cat(self._inputs), torch.cat(self._outputs), torch.cat(self._norms), self._arguments, batch)


def output_sensitivity(model: nn.Module, layer: int, ids_ST: Tensor, *, batch: int = 4) -> Tensor:
    """How much each direction of a layer's output matters to the model's next tokens, [D, D], with mean diagonal 1.

    The mean outer product of gradients of sampled tokens' log probabilities, each in units of the residual stream's norm.
    """
    total, rows = torch.zeros(0), 0
    held: list[Tensor] = []

    def cut(_: Any, __: Any, output: Any) -> Any:
        hidden = first_tensor(output).detach().requires_grad_()
        held.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hook = decoder_layers(model)[layer].register_forward_hook(cut)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator(device="cpu").manual_seed(0)
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for start in range(0, len(ids_ST), batch):
            with torch.enable_grad():
                logits = model(input_ids=ids_ST[start : start + batch], use_cache=False).logits.float().flatten(0, 1)
                scores = torch.log_softmax(logits, -1)
                tokens = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator).to(scores.device)
                scores.gather(1, tokens).sum().backward()  # type: ignore[no-untyped-call]
            hidden = held.pop()
            assert hidden.grad is not None
            scaled = (hidden.grad * hidden.detach().norm(dim=-1, keepdim=True)).flatten(0, 1).float()
            total = scaled.T @ scaled + (total if rows else 0)
            rows += len(scaled)
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
    return total / total.diagonal().mean()
