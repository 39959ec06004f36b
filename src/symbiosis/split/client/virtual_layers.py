"""Virtual layers: real layers to PEFT and transformers, without a weight.

`VirtualLinear` is an `nn.Linear`, `VirtualConv1D` a `Conv1D`, and so on. The
bias, if any, is a real parameter and belongs to the tenant. A layer becomes local,
with a weight of its own, only if the tenant writes to its weight or trains it.
The executor never sees such a change.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import BadCall
from symbiosis.split.client.autograd import call_embedding, call_matrices, call_transposed
from symbiosis.split.client.call_grouping import CallGroups
from symbiosis.split.client.hosted_layer import HostedLayer
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.shared_params import SharedParam
from symbiosis.split.client.virtual_weight import VirtualWeight
from symbiosis.types import LayerSpec


class VirtualLayer(HostedLayer):
    """A hosted layer whose weights look like parameters (`VirtualWeight`)."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_hosted", ()) and self._parameters.get(name) is None:
            return VirtualWeight(self, name, alias=False)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_hosted", ()) and name not in self._parameters:
            if isinstance(value, VirtualWeight) and value.layer.spec.identity == self.spec.identity:
                return  # tying a hosted weight to itself
            self._parameters[name] = None  # nn.Module registers a parameter only under a free or known name
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._hosted and name not in self._parameters:
            raise AttributeError(f"the weight of {self.spec.paths[0]} is in the executor and cannot be deleted")
        super().__delattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        memo.update({id(weight): weight for weight in self._mapped.values()})  # a copy maps the same memory
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        if not any(type(part) is self.session.model_class for part in memo.values()):
            # A copy of a single layer is made to be trained (PEFT's modules_to_save) and needs weights of its own.
            made.make_parameters(trainable=False)
        return made


class VirtualMatrix(VirtualLayer):
    """A product with a matrix in the executor, and a bias that both sides have."""

    groups: CallGroups
    bias: Any
    _direct: Tensor | None = None
    """The mapped weight, [O, I]."""
    _width_names: ClassVar[tuple[str, str]]

    def __init__(self, spec: LayerSpec, groups: CallGroups, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self._init_hosted(spec, groups.session)
        self.groups = groups
        self.bias = bias
        self.remember_bias()
        for name, width in zip(self._width_names, (spec.in_width, spec.out_width), strict=True):
            setattr(self, name, width)

    def map_weights(self, weights: dict[str, Tensor]) -> None:
        super().map_weights(weights)
        weight = weights.get("weight")
        self.__dict__["_direct"] = weight.t() if weight is not None and isinstance(self, Conv1D) else weight

    def remember_bias(self) -> None:
        """Record the current bias as the executor's."""
        self._shared_bias = SharedParam.of(self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unchanged = self._shared_bias.is_unchanged(self.bias)
        super()._apply(fn, recurse)
        if unchanged:
            self.remember_bias()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unchanged, made = self._shared_bias.is_unchanged(self.bias), super().__deepcopy__(memo)
        if unchanged:
            made.remember_bias()
        return made

    def has_shared_bias(self) -> bool:
        """Whether the executor's bias is this layer's bias, and takes no gradient now."""
        bias = self.bias
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return False
        return self._shared_bias.is_unchanged(bias)

    def is_pristine(self) -> bool:
        """Whether the executor computes exactly this layer, bias included."""
        like = self._parameters.get("like")
        if self.is_local or (like is not None and like.requires_grad):
            return False
        return self.has_shared_bias()

    def multiply(self, x: Tensor) -> Tensor:
        """x @ Wᵀ, without the bias."""
        if self._direct is not None:
            return F.linear(x.to(self._direct), self._direct).to(x)
        return call_matrices(self.session, (self.spec,), x)[0]

    def multiply_transposed(self, x: Tensor) -> Tensor:
        """x @ W."""
        if self._direct is not None:
            return (x.to(self._direct) @ self._direct).to(x)
        return call_transposed(self.session, self.spec, x)

    def forward(self, x: Tensor) -> Tensor:
        self._prepare_forward()
        direct = self._direct
        if direct is not None and x.dtype is direct.dtype and x.device == direct.device:
            return F.linear(x, direct, self.bias)
        if self.is_local:
            weight = self.get_weight("weight")
            return F.linear(x, weight if isinstance(self, nn.Linear) else weight.T, self.bias)
        rows, shared = self._cast(x), self.has_shared_bias()
        result = self.groups.call(self.spec, rows, x, with_bias=shared and self.bias is not None)
        return result if shared or self.bias is None else result + self.bias.to(result.dtype)

    def _cast(self, x: Tensor) -> Tensor:
        """Rows in the dtype that the plain layer computes in. Raises `BadCall` where the plain layer fails."""
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype is not self.dtype:
            raise BadCall(
                f"{self.spec.paths[0]} computes in {self.dtype}, got {x.dtype}: cast the input, or the model with .to()"
            )
        shape = x.shape
        if not shape or shape[-1] != self.spec.in_width:
            raise BadCall(f"{self.spec.paths[0]} takes inputs of width {self.spec.in_width}, got shape {tuple(shape)}")
        return x


class VirtualLinear(VirtualMatrix, nn.Linear):
    """An `nn.Linear` whose weight is in the executor."""

    _width_names = "in_features", "out_features"


class VirtualConv1D(VirtualMatrix, Conv1D):  # type: ignore[misc]
    """A `Conv1D` whose weight is in the executor."""

    _width_names = "nx", "nf"


class VirtualEmbedding(VirtualLayer, nn.Embedding):
    """Token embeddings in the executor, where the provider hosts them."""

    def __init__(self, spec: LayerSpec, session: ClientSession, padding_idx: int | None) -> None:
        nn.Module.__init__(self)
        self._init_hosted(spec, session)
        self.num_embeddings, self.embedding_dim, self.padding_idx = spec.experts, spec.out_width, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    def forward(self, ids: Tensor) -> Tensor:
        self._prepare_forward()
        if self.is_local or self._mapped:
            weight = self._mapped["weight"] if self._mapped else self.get_weight("weight")
            return F.embedding(ids, weight, self.padding_idx)
        return call_embedding(self.session, self.spec, ids).to(self.dtype)
