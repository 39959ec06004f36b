"""The only place that wires objects together: an executor with its links, and a tenant's connection to one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from symbiosis.app.http_host import HttpHost
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.errors import BadAddress, Closed, SymbiosisError
from symbiosis.models.client_part import load_weights, store_bytes, store_weights, unpack_tokenizer
from symbiosis.models.device_dtype import device_of, dtype_of
from symbiosis.models.fuse_projections import join
from symbiosis.models.loading import ModelSource, load, shared_copy
from symbiosis.models.split import Progress, Split, split
from symbiosis.split.client.assemble import MODES, assemble
from symbiosis.split.executor.layers import make_layer
from symbiosis.split.executor.loop import ExecutorLoop
from symbiosis.split.executor.policies import POLICIES, Policy
from symbiosis.split.executor.service import Service
from symbiosis.transport.base import Link, Port
from symbiosis.transport.inproc import InprocLink, InprocPort
from symbiosis.transport.messages import Kind, Message
from symbiosis.transport.shm import ShmLink, ShmPort
from symbiosis.transport.tcp import TcpLink, TcpPort
from symbiosis.types import BlobRef, Limits, Manifest

_PORTS: dict[str, type[TcpPort] | type[ShmPort]] = {"tcp": TcpPort, "shm": ShmPort}
_LINKS: dict[str, type[TcpLink] | type[ShmLink]] = {"tcp": TcpLink, "shm": ShmLink}


class Executor:
    """Holds the base layers of one model once and serves them to tenants. A context manager.

    `model_or_path` is a `PreTrainedModel` (its weights are used as they are:
    do not train it afterwards), a folder, a hub id, or None for the default
    model. `tokens` maps tenants' names to their secrets; without any, only
    this machine may connect. `direct` lets tenants of this user on the
    executor's GPU map its memory, which they could then write to as well.
    `hosting` keeps the whole model at hand for `host`.
    """

    def __init__(
        self,
        model_or_path: ModelSource = None,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        policy: str | Policy = "opportunistic",
        *,
        tokens: Mapping[str, str] | None = None,
        tokenizer: Any = None,
        host_head: bool = False,
        host_embeddings: bool = False,
        weights: bool = True,
        direct: bool = True,
        max_wait_ms: float | None = None,
        training_share: float | None = None,
        training_slowdown: float | None = None,
        hosting: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.tokens = _check_tokens(tokens or {})
        place = device_of(device)
        self._policy_settings = (max_wait_ms, training_share)
        chosen = _policy(policy, max_wait_ms, training_share)
        if training_slowdown is not None and not hosting:
            raise SymbiosisError("training_slowdown is for answers beside hosted training: expected hosting (--http) too")
        turns = create_device_share(place, training_share, training_slowdown)
        source = load(model_or_path, device=place, dtype=dtype_of(dtype), tokenizer=tokenizer)
        if hosting:
            join(source.model)
        self.split: Split = split(source.model, host_head=host_head, host_embeddings=host_embeddings, progress=progress)
        self.model_class = type(source.model)
        self.limits = Limits(weights=weights, direct=direct and weights)
        self._client_weights: BlobRef | None = None
        self._tokenizer = store_bytes(source.tokenizer) if source.tokenizer else None
        self._about = _about(source.model, source.name)
        if not source.borrowed:
            # What tenants hold need not stay here, it lies in a file; unless they share it on the GPU.
            self._store_client_part()
            if not hosting and (place.type != "cuda" or not self.limits.direct):
                self.split.client_tensors.clear()
        self._model = source.model if hosting else None
        del source
        self._service = Service(
            model=self._model_hash(),
            name=self._about["name"],
            layers=[make_layer(layer.spec, layer.weights, layer.bias, layer.module) for layer in self.split.layers],
            manifest=self.manifest,
            policy=chosen,
            limits=self.limits,
            client_tensors=self.split.client_tensors,
            device_share=turns,
        )
        self._service.calibrate()
        self._inproc = InprocPort()
        self._loop = ExecutorLoop(self._service)
        self._loop.start()
        self._loop.add(self._inproc)
        self._closed = False

    def listen(self, address: str = "tcp://127.0.0.1:0") -> str:
        """Accept tenants at `tcp://HOST:PORT` (port 0: any) or `shm://NAME` (no name: any). The address to connect to."""
        if self._closed:
            raise Closed("the executor was closed")
        self._store_client_part()
        port = _port(address, self.tokens, self.limits)
        self._loop.add(port)
        return port.address

    def host(self, address: str = "127.0.0.1:0", **options: Any) -> HttpHost:
        """Serve whole answers over HTTP with the very weights the tenants share; `options` are `HttpHost`'s.

        The model must have been kept (`hosting=True`). Close what this returns before the executor.
        """
        if self._model is None:
            raise SymbiosisError("this executor let go of what tenants hold themselves: make it with hosting=True")
        folder = unpack_tokenizer(self._tokenizer) if self._tokenizer else None
        return HttpHost(
            shared_copy(self._model), self._about["name"], folder, address, turns=self._service.device_share, **options
        )

    def stats(self) -> dict[str, Any]:
        """Calls, batches, mean batch, tokens, bytes held, and figures per tenant."""
        return self._service.stats()

    def use_policy(self, policy: str | Policy) -> None:
        """Batch calls by another policy from the next batch on."""
        max_wait_ms, training_share = self._policy_settings
        self._service.batcher.policy = _policy(policy, max_wait_ms, training_share if policy == "opportunistic" else None)

    def manifest(self) -> Manifest:
        """The model as tenants see it."""
        return Manifest(
            **self._about,
            layers=tuple(layer.spec for layer in self.split.layers),
            ties=self.split.ties,
            client_weights=self._client_weights,
            tokenizer=self._tokenizer,
        )

    def is_serving(self) -> bool:
        """False once it was closed, or its loop has failed (the log says why)."""
        return self._loop.is_alive()

    def close(self) -> None:
        """Stop serving. Waiting calls get an error; tenants may find the next executor within their grace period."""
        if not self._closed:
            self._closed = True
            self._loop.stop()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def link(self, hello: dict[str, Any]) -> Link:
        """A link for a tenant in this process."""
        return InprocLink(
            self._inproc,
            hello=hello,
            model_class=self.model_class,
            client_tensors=self._own_tensors,
            base_tensors=self._base_tensors,
        )

    def _base_tensors(self) -> dict[tuple[int, str], torch.Tensor]:
        return {(layer.spec.handle, name): weight for layer in self.split.layers for name, weight in layer.weights.items()}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        if self.split.client_tensors:
            return {name: tensor.detach().cpu().clone() for name, tensor in self.split.client_tensors.items()}
        assert self._client_weights is not None, "stored before the tensors were let go"
        return load_weights(self._client_weights)

    def _store_client_part(self) -> None:
        if self._client_weights is None:
            self._client_weights = store_weights(self.split.client_tensors)

    def _model_hash(self) -> str:
        about = json.dumps(self._about, sort_keys=True, default=str)
        digest = hashlib.sha256(about.encode())
        for layer in self.split.layers:
            digest.update(layer.spec.identity.encode())
            if layer.bias is not None:  # tenants have it too, and count on its being the same
                digest.update(layer.bias.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()


def check_address(address: str, tokens: Mapping[str, str]) -> None:
    """Raise what `Executor.listen` would raise for this address now."""
    _port(address, tokens, Limits()).close()


def _port(address: str, tokens: Mapping[str, str], limits: Limits) -> Port:
    kind = _PORTS.get(_scheme(address))
    if kind is None:
        raise BadAddress(f"{address!r} is no address: expected tcp://HOST:PORT or shm://NAME")
    return kind(address, tokens=tokens, max_bytes=limits.max_bytes)


def connect(
    address: str | Executor,
    *,
    token: str | None = None,
    device: str | torch.device | None = None,
    privacy: str | None = None,
    mode: str = "auto",
    name: str | None = None,
    grace_s: float = 60.0,
) -> PreTrainedModel:
    """A model whose base layers are in the executor; plain transformers and PEFT from here on.

    `address` is what `listen` returned, or an `Executor` of this process.
    `name` is how this tenant shows in the figures where no token says who it
    is. An executor that is away for up to `grace_s` seconds is waited for.
    `mode` says who computes the base layers: the "executor", in batches with
    other tenants' rows, or this process itself with the executor's weights
    ("direct", on the executor's GPU or in its process). "auto" is direct on the
    executor's GPU where the provider allows it.
    """
    if privacy is not None:
        raise SymbiosisError(f"privacy={privacy!r}: this version has no privacy modes; activations travel as they are")
    if mode not in MODES:
        raise SymbiosisError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    hello, place = {"name": name or ""}, device_of(device or "cpu")
    link: Link
    if isinstance(address, Executor):
        link = address.link(hello)
        welcome: dict[str, Any] = {"limits": address.limits.to_json()}
    else:
        kind = _LINKS.get(_scheme(address))
        if kind is None:
            raise BadAddress(f"{address!r} is no address: expected tcp://HOST:PORT, shm://NAME or an Executor of this process")
        wire = kind(address, token=token, hello=hello, grace_s=grace_s)
        link, welcome = wire, wire.welcome
    try:
        return assemble(link, welcome, place, mode)
    except BaseException:
        link.close()
        raise


def fetch_stats(address: str, *, token: str | None = None) -> dict[str, Any]:
    """An executor's figures without building a model: what `symbiosis top` shows."""
    kind = _LINKS.get(_scheme(address))
    if kind is None:
        raise BadAddress(f"{address!r} is no address: expected tcp://HOST:PORT or shm://NAME")
    link = kind(address, token=token, hello={"name": "top"}, grace_s=10.0)
    try:
        return link.request(Message(Kind.STATS)).body
    finally:
        link.close()


def _scheme(address: str) -> str:
    return address.partition("://")[0] if isinstance(address, str) and "://" in address else ""


def _policy(policy: str | Policy, max_wait_ms: float | None, training_share: float | None) -> Policy:
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise SymbiosisError(f"unknown policy {policy!r}: expected one of {', '.join(POLICIES)}")
    settings: dict[str, Any] = {}
    if max_wait_ms is not None:
        if not 0 <= max_wait_ms <= 60_000:
            raise SymbiosisError(f"max_wait_ms={max_wait_ms}: expected 0 to 60000")
        settings["max_wait_s"] = max_wait_ms / 1e3
    if training_share is not None:
        if not 0 < training_share <= 1:
            raise SymbiosisError(f"training_share={training_share}: expected more than 0, at most 1")
        if policy != "opportunistic":
            raise SymbiosisError(f"training_share is for the policy 'opportunistic', not for {policy!r}")
        settings["training_share"] = training_share
    return POLICIES[policy](**settings)


def _check_tokens(tokens: Mapping[str, str]) -> dict[str, str]:
    if any(not name or not secret for name, secret in tokens.items()):
        raise SymbiosisError("a token needs a tenant's name and a secret, neither empty")
    if len(set(tokens.values())) != len(tokens):
        raise SymbiosisError("two tenants have the same token: the executor could not tell them apart")
    return dict(tokens)


def _about(model: PreTrainedModel, name: str) -> dict[str, Any]:
    config = model.config.to_dict()
    attention = getattr(model.config, "_attn_implementation", None)
    generation = getattr(model, "generation_config", None)
    return {
        "name": name,
        "model_class": type(model).__name__,
        "config": json.loads(json.dumps(config, default=str)),
        "generation_config": json.loads(json.dumps(generation.to_dict(), default=str)) if generation else None,
        "attention": attention if attention in ("eager", "sdpa") else None,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
