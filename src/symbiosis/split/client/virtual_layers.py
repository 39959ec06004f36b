"""Virtual layers: real layers to PEFT and transformers, without a weight.

`VirtualLinear` is an `nn.Linear`, `VirtualConv1D` a `Conv1D`, and so on. The
bias, if any, is a real parameter: it stays with the tenant. A layer turns
local, with a weight of its own, only if the tenant writes to its weight or
trains it; then nothing of that reaches the executor.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import BadCall, WeightsWithheld
from symbiosis.split.client.autograd import call_embedding, call_matrices, call_transposed
from symbiosis.split.client.call_grouping import CallGroups
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.shared_params import SharedParam
from symbiosis.split.client.tensor_version import version_of
from symbiosis.split.client.virtual_weight import VirtualWeight
from symbiosis.types import LayerSpec

_log = logging.getLogger("symbiosis")


class VirtualLayer(nn.Module):
    """What all virtual layers share: hosted weights that are looked at, fetched or made local on demand."""

    spec: LayerSpec
    session: ClientSession

    def _become(self, spec: LayerSpec, session: ClientSession, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.session = spec, session
        self._hosted = {name for name, _ in spec.weights}
        # An empty parameter that follows the model through .to() and carries dtype and device; so code that
        # asks for a module's first parameter finds one, though there are no weights.
        self._parameters["like"] = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
        self._fetched: dict[str, Tensor] = {}
        self._versions: dict[str, int | None] = {}
        self._changed: dict[str, Tensor] = {}
        self._read: set[str] = set()
        self._copies: list[weakref.ref[VirtualWeight]] = []  # casts and sums that somebody holds
        self._mapped: dict[str, Tensor] = {}

    def map(self, weights: dict[str, Tensor]) -> None:
        """Compute here from now on, with the executor's weights in place (direct mode)."""
        self._mapped = weights

    @property
    def dtype(self) -> torch.dtype:
        return self._carrier().dtype

    @property
    def device(self) -> torch.device:
        return self._carrier().device

    def _carrier(self) -> Tensor:
        like = self._parameters.get("like")
        if like is not None:
            return like
        return next(p for p in (self._parameters[name] for name in self._hosted) if p is not None)

    @property
    def is_local(self) -> bool:
        if self._fetched:
            self._notice_changes()
        return bool(self._changed) or any([self._parameters.get(name) is not None for name in self._hosted])

    def _notice_changes(self) -> None:
        """Fetched numbers may be written to at any time, through whatever shares their memory."""
        for name, weight in list(self._fetched.items()):
            if version_of(weight) != self._versions.get(name):
                self.change(name, weight)
                return

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_hosted", ()) and self._parameters.get(name) is None:
            return VirtualWeight(self, name, alias=False)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_hosted", ()) and name not in self._parameters:
            if isinstance(value, VirtualWeight) and value.layer.spec.identity == self.spec.identity:
                return  # tying a hosted weight to itself
            self._parameters[name] = None  # nn.Module takes only names it does not know otherwise
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._hosted and name not in self._parameters:
            raise AttributeError(f"the weight of {self.spec.paths[0]} lives in the executor and cannot be deleted")
        super().__delattr__(name)

    # -- weights ----------------------------------------------------------------------------

    def fetched(self, name: str) -> Tensor:
        """The numbers of a hosted weight, the tenant's own if it has changed them."""
        own = self._parameters.get(name)
        if own is not None:
            return own
        if name in self._changed:
            return self._changed[name]
        self._read.add(name)
        if name not in self._fetched:
            _log.info("fetching %s.%s: a method needs its numbers", self.spec.paths[0], name)
            with torch.inference_mode(False):
                self._fetched[name] = self._fetch(name).to(self.device, self.dtype)
            self._versions[name] = version_of(self._fetched[name])
        return self._fetched[name]

    def _fetch(self, name: str) -> Tensor:
        if name in self._mapped:
            return self._mapped[name].clone()
        try:
            return self.session.fetch_weight(self.spec, name)
        except WeightsWithheld as error:
            raise WeightsWithheld(f"{_asking_method()}: {error}") from None

    def has_fetched(self, name: str) -> bool:
        return name in self._fetched

    def keep_if_changed(self, name: str, before: int | None, *, always: bool = False) -> None:
        """After somebody computed with a fetched weight: if it was written to, or can be unseen, it is the tenant's now."""
        weight = self._fetched.get(name)
        if weight is not None and (always or version_of(weight) != before):
            self.change(name, weight)

    def change(self, name: str, value: Tensor) -> None:
        """The tenant's own numbers for a weight, from now on; the executor's stay as they are."""
        if tuple(value.shape) != dict(self.spec.weights)[name]:
            raise BadCall(f"{self.spec.paths[0]}.{name} has shape {dict(self.spec.weights)[name]}, got {tuple(value.shape)}")
        for other in self._hosted:
            self._changed[other] = value if other == name else self.fetched(other)
        self._fetched.clear()
        self.map({})

    def make_parameters(self, *, trainable: bool) -> None:
        """Turn the hosted weights into real parameters of the tenant's."""
        for name in self._hosted:
            if self._parameters.get(name) is None:
                self._parameters[name] = nn.Parameter(self.fetched(name), requires_grad=trainable)
        self._fetched.clear()
        self._changed.clear()
        self.map({})
        self._parameters.pop("like", None)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            self.make_parameters(trainable=True)
        return nn.Module.requires_grad_(self, requires_grad)

    def check_frozen(self) -> None:
        """Raise `BadCall` if somebody means to train this layer among all others: its weight is not here."""
        like = self._parameters.get("like")
        if like is not None and like.requires_grad and torch.is_grad_enabled():
            raise BadCall(
                f"{self.spec.paths[0]} should be trained, but its weight is in the executor, which never changes it. Train an "
                "adapter (PEFT) and freeze the base, or call requires_grad_(True) on this very layer before you make the "
                "optimizer: then it becomes your own"
            )

    def _drop_unread(self) -> None:
        """Forget fetched numbers that were read before, but not since the last call (initialisation reads once)."""
        self._notice_changes()
        for name in list(self._fetched):
            if name in self._read:
                self._read.discard(name)
            else:
                del self._fetched[name]

    # -- nn.Module --------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._notice_changes()
        self._fetched = {name: fn(weight) for name, weight in self._fetched.items()}
        self._versions = {name: version_of(weight) for name, weight in self._fetched.items()}
        self._changed = {name: fn(weight) for name, weight in self._changed.items()}
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str], *more: Any
    ) -> None:
        """A checkpoint that has this layer's weights makes them the tenant's own; one that has not leaves the executor's."""
        hosted = {prefix + name: name for name in self._hosted if self._parameters.get(name) is None}
        others = {key: value for key, value in state_dict.items() if key.startswith(prefix) and key not in hosted}
        if "like" in self._parameters:
            others.setdefault(f"{prefix}like", self._parameters["like"])
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, *more)
        for key, name in hosted.items():
            if key in state_dict:
                self.change(name, state_dict[key].detach().to(self.device, self.dtype, copy=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        memo.update({id(weight): weight for weight in self._mapped.values()})  # a copy maps the same memory
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        if not any(type(part) is self.session.model_class for part in memo.values()):
            # A copy of one layer is made to train it (PEFT's modules_to_save): it needs weights of its own.
            made.make_parameters(trainable=False)
        return made

    def extra_repr(self) -> str:
        place = "local" if self.is_local else f"layer {self.spec.handle} of the executor"
        return f"{self.spec.in_width} -> {self.spec.out_width}, {place}"

    def _cast(self, x: Tensor) -> Tensor:
        """Rows as the plain layer would see them. Raises `BadCall` where it would fail."""
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


class VirtualMatrix(VirtualLayer):
    """A product with a matrix in the executor, and a bias that is with both sides."""

    groups: CallGroups
    bias: Any
    _direct: Tensor | None = None
    """The mapped weight, [O, I]."""

    def __init__(
        self, spec: LayerSpec, groups: CallGroups, session: ClientSession, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self._become(spec, session, dtype, torch.device("cpu"))
        self.groups = groups
        self.bias = bias
        self.note_bias()

    def map(self, weights: dict[str, Tensor]) -> None:
        super().map(weights)
        weight = weights.get("weight")
        self.__dict__["_direct"] = weight.t() if weight is not None and isinstance(self, Conv1D) else weight

    def note_bias(self) -> None:
        """Remember the bias as it is now: the executor's."""
        self._shared_bias = SharedParam.of(self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unchanged = self._shared_bias.is_unchanged(self.bias)
        super()._apply(fn, recurse)
        if unchanged:
            self.note_bias()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        unchanged, made = self._shared_bias.is_unchanged(self.bias), super().__deepcopy__(memo)
        if unchanged:
            made.note_bias()
        return made

    def bias_is_shared(self) -> bool:
        """Whether the executor's bias is this layer's bias, and nobody trains it right now."""
        bias = self.bias
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return False
        return self._shared_bias.is_unchanged(bias)

    def pristine(self) -> bool:
        """Whether the executor would compute exactly this layer, bias included, if nobody watches it."""
        like = self._parameters.get("like")
        if self.is_local or (like is not None and like.requires_grad):
            return False
        return self.bias_is_shared()

    def product(self, x: Tensor) -> Tensor:
        """x @ Wᵀ and nothing else."""
        if self._direct is not None:
            return F.linear(x.to(self._direct), self._direct).to(x)
        return call_matrices(self.session, (self.spec,), x)[0]

    def transposed_product(self, x: Tensor) -> Tensor:
        """x @ W."""
        if self._direct is not None:
            return (x.to(self._direct) @ self._direct).to(x)
        return call_transposed(self.session, self.spec, x)

    def forward(self, x: Tensor) -> Tensor:
        self.check_frozen()
        if self._fetched:
            self._drop_unread()
        direct = self._direct
        if direct is not None and x.dtype is direct.dtype and x.device == direct.device:
            return F.linear(x, direct, self.bias)
        if self.is_local:
            weight = self.fetched("weight")
            return F.linear(x, weight if isinstance(self, nn.Linear) else weight.T, self.bias)
        rows, shared = self._cast(x), self.bias_is_shared()
        result = self.groups.call(self.spec, rows, x, with_bias=shared and self.bias is not None)
        return result if shared or self.bias is None else result + self.bias.to(result.dtype)


class VirtualLinear(VirtualMatrix, nn.Linear):
    """An `nn.Linear` whose weight is in the executor."""

    def __init__(
        self, spec: LayerSpec, groups: CallGroups, session: ClientSession, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, groups, session, bias, dtype)
        self.in_features, self.out_features = spec.in_width, spec.out_width


class VirtualConv1D(VirtualMatrix, Conv1D):  # type: ignore[misc]
    """A `Conv1D` whose weight is in the executor."""

    def __init__(
        self, spec: LayerSpec, groups: CallGroups, session: ClientSession, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, groups, session, bias, dtype)
        self.nx, self.nf = spec.in_width, spec.out_width


class VirtualEmbedding(VirtualLayer, nn.Embedding):
    """Word embeddings in the executor, where the provider moved them there."""

    def __init__(self, spec: LayerSpec, session: ClientSession, padding_idx: int | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self._become(spec, session, dtype, torch.device("cpu"))
        self.num_embeddings, self.embedding_dim, self.padding_idx = spec.experts, spec.out_width, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    def forward(self, ids: Tensor) -> Tensor:
        self.check_frozen()
        if self._fetched:
            self._drop_unread()
        if self.is_local or self._mapped:
            weight = self._mapped["weight"] if self._mapped else self.fetched("weight")
            return F.embedding(ids, weight, self.padding_idx)
        return call_embedding(self.session, self.spec, ids).to(self.dtype)


def _asking_method() -> str:
    """The PEFT method whose code is running right now, for an error that names it."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        parts = frame.f_code.co_filename.replace("\\", "/").split("/")
        if "tuners" in parts[:-1]:
            return f"PEFT's {parts[parts.index('tuners') + 1].removesuffix('.py')} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "this computation"
