"""Which directions of a layer's input and output matter for what a model predicts.

An error E of a weight costs about ½ tr(G E C Eᵀ) nats per token, with C the second moment of the layer's input and G that of
the gradient of its output (K-FAC). Gradients are those of tokens that are drawn from the model's own predictions.

R = tokens, I, O = input and output width, V = vocabulary, D = width of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS = 512
"""Tokens of one pass: their activations are in memory."""
_RIDGE = 0.01
"""Of the mean second moment, added in all directions: what a short text does not show may matter too."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoments:
    """Cholesky factors of the second moments of one layer."""

    input_II: Tensor
    output_OO: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """Of a model on a text."""

    layers: dict[str, LayerMoments]
    """By path of the linear layer."""
    token_weights_V: Tensor
    """The root of how often each token is read or predicted."""
    head_input_DD: Tensor
    """The Cholesky factor of the second moment of what the head reads."""


def measure_statistics(model: PreTrainedModel, windows_NT: Tensor, paths: Collection[str]) -> LayerStatistics:
    """Of these linear layers. Holds I² + O² numbers for each."""
    recorder = _Recorder(model, paths)
    head, counts_V = model.get_output_embeddings(), torch.zeros(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    needed = {name: each.requires_grad for name, each in model.named_parameters()}
    hidden_DD: Any = 0.0

    def keep_hidden(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal hidden_DD
        x_RD = args[0].detach().flatten(0, -2)
        hidden_DD = hidden_DD + x_RD.T @ x_RD

    hooks = [*recorder.hooks(), head.register_forward_pre_hook(keep_hidden)]
    try:
        model.requires_grad_(False)
        embedding.requires_grad_(True)  # the gradient flows from the first layer on
        for x_BT in torch.split(windows_NT, max(1, _ROWS // windows_NT.shape[1])):
            recorder.start_pass()
            log_probs_RV = model(input_ids=x_BT, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
            probs_RV = log_probs_RV.detach().exp()
            drawn_R = torch.multinomial(probs_RV, 1, generator=generator)
            counts_V += probs_RV.sum(0) + torch.bincount(x_BT.flatten(), minlength=len(counts_V))
            (-log_probs_RV.gather(-1, drawn_R)).sum().backward()
            embedding.grad = None
    finally:
        for hook in hooks:
            hook.remove()
        for name, each in model.named_parameters():
            each.requires_grad_(needed[name])
    tokens = windows_NT.numel()
    return LayerStatistics(recorder.moments(tokens), (counts_V / tokens + 1e-6).sqrt().double(), _cholesky(hidden_DD / tokens))


class _Recorder:
    """Sums second moments in hooks. Layers that read the same tensor have one sum."""

    def __init__(self, model: PreTrainedModel, paths: Collection[str]) -> None:
        self._modules = {path: model.get_submodule(path) for path in paths}
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._same: dict[str, str] = {}
        """The layer that reads the same tensor, by path."""
        self._last: tuple[str, Tensor] | None = None

    def start_pass(self) -> None:
        self._last = None

    def hooks(self) -> list[Any]:
        return [module.register_forward_hook(self._hook(path)) for path, module in self._modules.items()]

    def _hook(self, path: str) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            x = args[0]
            if self._last is not None and self._last[1] is x:
                self._same[path] = self._last[0]
            else:
                x_RI = x.detach().flatten(0, -2)
                self._inputs[path] = self._inputs.get(path, 0.0) + x_RI.T @ x_RI
                self._last = (path, x)
            out.register_hook(keep_gradient)  # type: ignore[no-untyped-call]

        def keep_gradient(gradient: Tensor) -> None:
            y_RO = gradient.flatten(0, -2)
            self._outputs[path] = self._outputs.get(path, 0.0) + y_RO.T @ y_RO

        return keep

    def moments(self, tokens: int) -> dict[str, LayerMoments]:
        inputs = {path: _cholesky(each / tokens) for path, each in self._inputs.items()}
        return {
            path: LayerMoments(inputs[self._same.get(path, path)], _cholesky(outputs / tokens))
            for path, outputs in self._outputs.items()
        }


def _cholesky(moment: Tensor) -> Tensor:
    moment = moment.double()
    ridge = _RIDGE * moment.diagonal().mean().clamp(min=1e-30)
    factor: Tensor = torch.linalg.cholesky(moment + ridge * torch.eye(len(moment), dtype=moment.dtype))
    return factor
