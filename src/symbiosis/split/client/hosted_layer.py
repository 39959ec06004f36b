"""A layer whose weights are in the executor: they are fetched, mapped or made local on demand."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.errors import BadCall, WeightsWithheld
from symbiosis.split.client.session import ClientSession
from symbiosis.split.client.shared_params import version_of
from symbiosis.types import LayerSpec

_log = logging.getLogger("symbiosis")


class HostedLayer(nn.Module):
    """The weights of a virtual layer. It becomes local, with weights of its own, when the tenant writes to or trains them."""

    spec: LayerSpec
    session: ClientSession
    multiply: Any
    multiply_transposed: Any
    """Of matrices: products with the weight and with its transpose."""

    def _init_hosted(self, spec: LayerSpec, session: ClientSession) -> None:
        self.spec, self.session = spec, session
        self._hosted = {name for name, _ in spec.weights}
        # An empty parameter that follows the model through .to() and has its dtype and device. Code that reads a
        # module's first parameter finds one, though there are no weights.
        like = torch.empty(0, dtype=getattr(torch, session.manifest.dtype), device="cpu")
        self._parameters["like"] = nn.Parameter(like, requires_grad=False)
        self._fetched: dict[str, Tensor] = {}
        self._versions: dict[str, int | None] = {}
        self._changed: dict[str, Tensor] = {}
        self._read: set[str] = set()
        self._copies: list[weakref.ref[Any]] = []  # casts and sums of its virtual weights that are still referenced
        self._mapped: dict[str, Tensor] = {}

    def map_weights(self, weights: dict[str, Tensor]) -> None:
        """Compute here from now on, with the executor's weights in place (direct mode)."""
        self._mapped = weights

    @property
    def dtype(self) -> torch.dtype:
        return self._reference().dtype

    @property
    def device(self) -> torch.device:
        return self._reference().device

    def _reference(self) -> Tensor:
        like = self._parameters.get("like")
        if like is not None:
            return like
        return next(p for p in (self._parameters[name] for name in self._hosted) if p is not None)

    @property
    def is_local(self) -> bool:
        if self._fetched:
            self.adopt_written()
        return bool(self._changed) or any([self._parameters.get(name) is not None for name in self._hosted])

    def adopt_written(self, exported: str | None = None) -> None:
        """Make the layer local if a fetched weight was written to, or if the memory of one was `exported`."""
        for name, weight in list(self._fetched.items()):
            if name == exported or version_of(weight) != self._versions.get(name):
                self.set_weight(name, weight)
                return

    def get_weight(self, name: str) -> Tensor:
        """A weight's values: the tenant's own if it has any, else the executor's, fetched."""
        own = self._parameters.get(name)
        if own is not None:
            return own
        if name in self._changed:
            return self._changed[name]
        self._read.add(name)
        if name not in self._fetched:
            _log.info("fetching %s.%s: a method needs its values", self.spec.paths[0], name)
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
            raise WeightsWithheld(f"{_name_calling_method()}: {error}") from None

    def has_fetched(self, name: str) -> bool:
        return name in self._fetched

    def set_weight(self, name: str, value: Tensor) -> None:
        """Use the tenant's own values from now on. The executor's stay unchanged."""
        if tuple(value.shape) != dict(self.spec.weights)[name]:
            raise BadCall(f"{self.spec.paths[0]}.{name} has shape {dict(self.spec.weights)[name]}, got {tuple(value.shape)}")
        for other in self._hosted:
            self._changed[other] = value if other == name else self.get_weight(other)
        self._fetched.clear()
        self.map_weights({})

    def make_parameters(self, *, trainable: bool) -> None:
        """Make the hosted weights real parameters of the tenant."""
        for name in self._hosted:
            if self._parameters.get(name) is None:
                self._parameters[name] = nn.Parameter(self.get_weight(name), requires_grad=trainable)
        self._fetched.clear()
        self._changed.clear()
        self.map_weights({})
        self._parameters.pop("like", None)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            self.make_parameters(trainable=True)
        return nn.Module.requires_grad_(self, requires_grad)

    def _prepare_forward(self) -> None:
        """Check that the layer can run, and drop fetched weights that were not read since the last call.

        Raises `BadCall` if the whole model was made trainable: the weight is not here.
        """
        like = self._parameters.get("like")
        if like is not None and like.requires_grad and torch.is_grad_enabled():
            raise BadCall(
                f"{self.spec.paths[0]} should be trained, but its weight is in the executor, which never changes it. Train an "
                "adapter (PEFT) and freeze the base, or call requires_grad_(True) on this very layer before you make the "
                "optimizer: then it becomes your own"
            )
        if self._fetched:
            self.adopt_written()
            self._fetched = {name: weight for name, weight in self._fetched.items() if name in self._read}
            self._read.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.adopt_written()
        self._fetched = {name: fn(weight) for name, weight in self._fetched.items()}
        self._versions = {name: version_of(weight) for name, weight in self._fetched.items()}
        self._changed = {name: fn(weight) for name, weight in self._changed.items()}
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str], *more: Any
    ) -> None:
        """Weights in the checkpoint become the tenant's own. Weights missing from it stay the executor's."""
        hosted = {prefix + name: name for name in self._hosted if self._parameters.get(name) is None}
        others = {key: value for key, value in state_dict.items() if key.startswith(prefix) and key not in hosted}
        if "like" in self._parameters:
            others.setdefault(f"{prefix}like", self._parameters["like"])
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, *more)
        for key, name in hosted.items():
            if key in state_dict:
                self.set_weight(name, state_dict[key].detach().to(self.device, self.dtype, copy=True))

    def extra_repr(self) -> str:
        place = "local" if self.is_local else f"layer {self.spec.handle} of the executor"
        return f"{self.spec.in_width} -> {self.spec.out_width}, {place}"


def _name_calling_method() -> str:
    """The PEFT method whose code is running, for an error message."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        parts = frame.f_code.co_filename.replace("\\", "/").split("/")
        if "tuners" in parts[:-1]:
            return f"PEFT's {parts[parts.index('tuners') + 1].removesuffix('.py')} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "this computation"
