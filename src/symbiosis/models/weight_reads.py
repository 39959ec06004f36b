"""A trial run: which linear layers' weights does other code read when the model runs?

Code often reads a weight in a branch that is not taken: another parallelism, kernels that are not installed. Reading is
correct with a hosted layer too, as the tenant fetches the values, but slow, and refused where weights are withheld.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_TOKENS, _NEW_TOKENS = 4, 2


_T: Any = torch.Tensor
_METADATA = {
    getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "requires_grad")
} | {_T.size, _T.dim, _T.numel, _T.element_size, _T.is_floating_point}


class _WatchedWeight(torch.Tensor):
    """A weight that notices when its values are used."""

    layer: Any

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _METADATA:
            for watched in (arg for arg in args if isinstance(arg, _WatchedWeight)):
                watched.layer.was_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class _Watched:
    """Mixed into the class of a linear layer."""

    was_called: bool
    was_read: bool

    @property
    def weight(self: Any) -> Any:
        watched = self._parameters["weight"].as_subclass(_WatchedWeight)
        watched.layer = self
        return watched

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, self.was_called = self.was_read, True
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        self.was_read = before
        return result


def unread_weights(model: Any, layers: Collection[nn.Module]) -> set[nn.Module]:
    """Those of the layers that were called and whose weight nothing else read, in evaluation, training and generation."""
    if not layers or any(isinstance(module, _BatchNorm) for module in model.modules()):  # its state would change
        return set()
    with _watching(layers):
        try:
            _run(model)
        except Exception:  # noqa: BLE001 - a model of other inputs cannot be tried
            return set()
        return {layer for layer in layers if layer.was_called and not layer.was_read}


@contextmanager
def _watching(layers: Collection[nn.Module]) -> Iterator[None]:
    classes = {layer: type(layer) for layer in layers}
    for layer, own in classes.items():
        layer.__dict__["was_called"] = layer.__dict__["was_read"] = False
        layer.__class__ = type(own.__name__, (_Watched, own), {})
    try:
        yield
    finally:
        for layer, own in classes.items():
            layer.__class__ = own


@torch.no_grad()
def _run(model: Any) -> None:
    device: torch.device = model.get_input_embeddings().weight.device
    ids: Tensor = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    was_training, devices = model.training, [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for mode in (True, False):
                model.train(mode)(ids)
            if device.type == "meta":  # generation depends on values
                return
            lengths = {"min_new_tokens": _NEW_TOKENS, "max_new_tokens": _NEW_TOKENS}
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        finally:
            model.train(was_training)
