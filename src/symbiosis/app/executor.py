"""The public `Executor`: loads a model, splits it, and serves its base layers on links."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from symbiosis.app.http_host import HttpHost
from symbiosis.app.statistics.source import StatisticsSource
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.operations import FirstShard, OperationFollower, OperationLeader
from symbiosis.distributed.parallel_model import ParallelModel
from symbiosis.errors import Closed, SymbiosisError
from symbiosis.finetuning.sharding.worker import TrainingWorker
from symbiosis.models.client_part import describe_model, load_weights, store_bytes, store_weights, unpack_tokenizer
from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import ModelSource, load, shared_copy
from symbiosis.models.split import Progress, Split, split
from symbiosis.serving.sharding.worker import EngineWorker
from symbiosis.split.executor.layers import BaseLayer, make_layer
from symbiosis.split.executor.loop import ExecutorLoop
from symbiosis.split.executor.policies import POLICIES, Policy
from symbiosis.split.executor.service import Service
from symbiosis.split.executor.sharding.layers import Shards
from symbiosis.split.executor.sharding.ways import Way
from symbiosis.transport.addresses import address_scheme, not_an_address
from symbiosis.transport.base import Link, Port
from symbiosis.transport.inproc import InprocLink, InprocPort
from symbiosis.transport.shm import ShmPort
from symbiosis.transport.tcp import TcpPort
from symbiosis.types import BlobRef, Limits, Manifest

_JOIN_S = 5.0
_PORTS: dict[str, type[TcpPort] | type[ShmPort]] = {"tcp": TcpPort, "shm": ShmPort}


class Executor:
    """Holds the base layers of one model once and serves them to tenants. A context manager.

    `model_or_path` is a `PreTrainedModel` (its weights are used in place: do not train it afterwards), a folder, a hub id,
    or None for the default model. `tokens` maps tenant names to secrets; without tokens only this machine can connect.
    `direct` lets tenants of this user on the executor's GPU map its memory, read and write. `hosting` keeps the whole model
    in memory for `host`. `shards` are the processes among which the base layers are divided: each creates an executor of the
    same model, and any of them serves tenants; the first one hosts, and the others `follow`. `sharding` is how they compute a
    tenant's call together: by `tensor` parts, by gathering `parameters`, or `auto`, whichever is faster.
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
        shards: ShardMesh | None = None,
        sharding: str = "auto",
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.tokens = _check_tokens(tokens or {})
        self._follower: OperationFollower | None = None
        place = resolve_device(device) if shards is None else shards.device
        way = check_sharding(sharding) if shards is not None else None
        self._policy_settings = (max_wait_ms, training_share)
        chosen = _policy(policy, max_wait_ms, training_share)
        if training_slowdown is not None and not hosting:
            raise SymbiosisError("training_slowdown applies to serving next to hosted training: it needs hosting=True (--http)")
        device_share = create_device_share(place, training_share, training_slowdown)
        hosting_mesh = shards.sibling("hosting") if shards is not None and hosting else None
        with nullcontext() if shards is None else shards.turn("load"):  # one whole model at a time in a host's memory
            # Each shard copies its parts from there: no device holds the whole model.
            loaded_on = place if shards is None else torch.device("cpu")
            source = load(model_or_path, device=loaded_on, dtype=resolve_dtype(dtype), tokenizer=tokenizer)
            if hosting and shards is None:
                fuse_projections(source.model)
            self.split: Split = split(source.model, host_head=host_head, host_embeddings=host_embeddings, progress=progress)
            self.model_class = type(source.model)
            self.limits = Limits(weights=weights, direct=direct and weights and shards is None)
            self._client_weights: BlobRef | None = None
            self._tokenizer = store_bytes(source.tokenizer) if source.tokenizer else None
            self._about = describe_model(source.model, source.name)
            model_hash = self._model_hash()
            if not source.borrowed:
                # The client part is in a file now. It stays in memory only where tenants map it on the GPU.
                self._store_client_part()
                if (not hosting or shards is not None) and (place.type != "cuda" or not self.limits.direct):
                    self.split.client_tensors.clear()
            self._model = source.model if hosting and shards is None else None
            self._parallel = None if hosting_mesh is None else ParallelModel.of(source.model, hosting_mesh)
            given = None if self._parallel is None else self._parallel.parts
            self._shards = None if shards is None else Shards(self.split.layers, shards, way, given)
            layers = self._make_layers()
            del source
        self._service = Service(
            model=model_hash,
            name=self._about["name"],
            layers=layers,
            manifest=self.manifest,
            policy=chosen,
            limits=self.limits,
            client_tensors=self.split.client_tensors,
            device_share=device_share,
        )
        if self._shards is None:
            self._service.calibrate()
        else:
            self._shards.start(model_hash, self._service.calibrate)
        self._statistics = StatisticsSource(self._about["name"], place, self._tensors(), self._service)
        self._service.collect = self._statistics.collect
        self._inproc = InprocPort()
        self._loop = ExecutorLoop(self._service)
        if self._shards is not None:
            self._shards.coordinator.on_lost = lambda error: self._loop.end()
        self._loop.start()
        self._loop.add(self._inproc)
        self._closed = False

    def _make_layers(self) -> list[BaseLayer]:
        if self._shards is None:
            return [make_layer(layer.spec, layer.weights, layer.bias, layer.module) for layer in self.split.layers]
        pairs = zip(self.split.layers, self._shards.layers, strict=True)
        # only this shard's part stays in memory
        self.split.layers = [replace(hosted, weights=layer.weights, module=layer.module) for hosted, layer in pairs]
        return self._shards.layers

    def listen(self, address: str = "tcp://127.0.0.1:0") -> str:
        """Accept tenants at `tcp://HOST:PORT` (port 0: any free port) or `shm://NAME` (no name: a new one).

        Returns the address to connect to.
        """
        if self._closed:
            raise Closed("the executor was closed")
        self._store_client_part()
        port = _port(address, self.tokens, self.limits)
        self._loop.add(port)
        return port.address

    def host(self, address: str = "127.0.0.1:0", **options: Any) -> HttpHost:
        """Serve OpenAI's API over HTTP on the same weights; `options` are those of `HttpHost`.

        Requires `hosting=True`. Close the returned host before the executor.
        """
        model: PreTrainedModel | FirstShard
        if self._parallel is not None:
            if not self._parallel.mesh.is_leader:
                raise SymbiosisError("the first shard hosts: call follow() on the others")
            model = FirstShard(self._parallel, OperationLeader(self._parallel.mesh))
        elif self._model is not None:
            model = shared_copy(self._model)
        else:
            raise SymbiosisError("the executor has released the client part of the model: create it with hosting=True")
        folder = unpack_tokenizer(self._tokenizer) if self._tokenizer else None
        return HttpHost(
            model,
            self._about["name"],
            folder,
            address,
            device_share=self._service.device_share,
            statistics=self._statistics,
            **options,
        )

    def follow(self) -> None:
        """Compute with the first shard, which hosts, until it ends."""
        if self._parallel is None or self._parallel.mesh.is_leader:
            raise SymbiosisError("follow() is for the other shards of a model that the first one hosts")
        self._follower = OperationFollower(self._parallel.mesh)
        self._follower.add(EngineWorker(self._parallel.copy()).handlers)
        self._follower.add(TrainingWorker(self._parallel.copy()).handlers)
        self._follower.start()

    def stats(self) -> dict[str, Any]:
        """Calls, batches, mean batch, tokens, bytes held, and the same per tenant; memory by owner and history.

        With a host, also of HTTP serving and hosted fine-tuning.
        """
        return self._statistics.snapshot()

    def use_policy(self, policy: str | Policy) -> None:
        """Switch the batching policy from the next batch on."""
        max_wait_ms, training_share = self._policy_settings
        self._service.batcher.policy = _policy(policy, max_wait_ms, training_share if policy == "opportunistic" else None)

    def manifest(self) -> Manifest:
        """What a client needs to build its part of the model."""
        return Manifest(
            **self._about,
            layers=tuple(layer.spec for layer in self.split.layers),
            ties=self.split.ties,
            client_weights=self._client_weights,
            tokenizer=self._tokenizer,
        )

    def is_serving(self) -> bool:
        """False after `close`, or after the loop has failed (the log has the reason)."""
        return self._loop.is_alive()

    def close(self) -> None:
        """Stop serving. Queued calls end in an error; clients reconnect to a new executor within their grace period."""
        if not self._closed:
            self._closed = True
            self._loop.stop()
            if self._shards is not None:
                self._shards.coordinator.stop()
            if self._follower is not None:
                self._follower.join(_JOIN_S)
            self._statistics.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
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

    def _tensors(self) -> list[torch.Tensor]:
        """All that this executor holds of the model."""
        whole = self._model if self._parallel is None else self._parallel.model
        model = [] if whole is None else [*whole.parameters(), *whole.buffers()]
        modules = [layer.module for layer in self.split.layers if layer.module is not None]
        layers = [*self._base_tensors().values(), *(parameter for module in modules for parameter in module.parameters())]
        return [*model, *layers, *self.split.client_tensors.values()]

    def _base_tensors(self) -> dict[tuple[int, str], torch.Tensor]:
        return {(layer.spec.handle, name): weight for layer in self.split.layers for name, weight in layer.weights.items()}

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        if self.split.client_tensors:
            return {name: tensor.detach().cpu().clone() for name, tensor in self.split.client_tensors.items()}
        assert self._client_weights is not None, "the client part is stored before its tensors are released"
        return load_weights(self._client_weights)

    def _store_client_part(self) -> None:
        if self._client_weights is None:
            self._client_weights = store_weights(self.split.client_tensors)

    def _model_hash(self) -> str:
        about = json.dumps(self._about, sort_keys=True, default=str)
        digest = hashlib.sha256(about.encode())
        for layer in self.split.layers:
            digest.update(layer.spec.identity.encode())
            if layer.bias is not None:  # clients hold a copy of the bias, which must be equal
                digest.update(layer.bias.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()


def check_sharding(sharding: str) -> Way | None:
    """The way of an `Executor` with shards; None: the faster one. Raises what the executor would raise."""
    ways = ["auto", *Way]
    if sharding not in ways:
        raise SymbiosisError(f"unknown sharding {sharding!r}: expected one of {', '.join(ways)}")
    return None if sharding == "auto" else Way(sharding)


def check_address(address: str, tokens: Mapping[str, str]) -> None:
    """Raise what `Executor.listen` would raise for this address."""
    _port(address, tokens, Limits()).close()


def _port(address: str, tokens: Mapping[str, str], limits: Limits) -> Port:
    kind = _PORTS.get(address_scheme(address))
    if kind is None:
        raise not_an_address(address)
    return kind(address, tokens=tokens, max_bytes=limits.max_bytes)


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
        raise SymbiosisError("two tenants have the same token: give each tenant its own")
    return dict(tokens)
