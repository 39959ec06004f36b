"""The client part of a model on the CPU for a while, and back.

Decode of a long context runs where its KV cache is. The parameters stay the same objects: they are exchanged for copies in
host memory, and put back. Mapped weights (direct mode) are put aside, so that base layers are called on the executor.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.split.client.deferred.norm import DeferredNorm, enable_deferral
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.virtual_layers import VirtualLayer, VirtualMatrix

_CPU = torch.device("cpu")


class HostPlacement:
    """A context: inside, the model computes on the CPU. No other thread may use the model meanwhile."""

    def __init__(self, model: PreTrainedModel, session: ClientSession) -> None:
        self._model, self._session = model, session
        self._undo = ExitStack()

    def __enter__(self) -> HostPlacement:
        if self._model.dtype is getattr(torch, self._session.manifest.dtype):
            enable_deferral(self._model, self._session)
        copies: dict[int, Tensor] = {}
        module: Any
        for module in self._model.modules():
            hosted = isinstance(module, VirtualLayer)
            bias_is_shared = isinstance(module, VirtualMatrix) and module._shared_bias.is_unchanged(module.bias)
            norm_is_hosted = isinstance(module, DeferredNorm) and module.is_hosted()
            if hosted:
                self._put_weights_aside(module)
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None and tensor.device != _CPU:
                        self._undo.callback(store.__setitem__, name, tensor)
                        store[name] = _copy(tensor, copies)
            if bias_is_shared:
                self._undo.callback(setattr, module, "_shared_bias", module._shared_bias)
                module.remember_bias()
            if norm_is_hosted:
                self._undo.callback(object.__setattr__, module, "_symbiosis_hosted", module._symbiosis_hosted)
                module.follow_parameters()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _put_weights_aside(self, layer: Any) -> None:
        """Mapped, fetched and changed weights: the first are not used, the others are copied."""
        self._undo.callback(layer.map_weights, layer._mapped)
        layer.map_weights({})
        for name in ("_fetched", "_versions", "_changed"):
            self._undo.callback(setattr, layer, name, getattr(layer, name))
        layer._fetched, layer._versions = {}, {}  # fetched again if a method reads them
        layer._changed = {name: tensor.to(_CPU) for name, tensor in layer._changed.items()}


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Any:
    """The copy on the CPU; tied tensors have one."""
    if id(tensor) not in copies:
        with torch.inference_mode(False):
            moved = tensor.detach().to(_CPU)
            copies[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
    return copies[id(tensor)]
