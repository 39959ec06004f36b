"""A service without threads, sockets or time: tests send messages one by one, and run batches."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.split.executor.layers import BaseLayer, Block, Experts, Matrix, Norm
from symbiosis.split.executor.policies import Decision
from symbiosis.split.executor.service import Service
from symbiosis.transport.base import Peer, Port
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import Direction, LayerKind, LayerSpec, Limits, Manifest

WIDTH = 32
LINEAR, OTHER, WIDE, BLOCK, EXPERTS, NORM = range(6)  # handles


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class RunFirstKey:
    """A policy for tests: all calls with the first call's key run as one batch, at once."""

    name = "first key"

    def decide(self, pending, sessions, costs, now) -> Decision:
        return Decision(batch=tuple(call for call in pending if call.key == pending[0].key))


class MemoryPort(Port):
    address = "memory"

    def __init__(self) -> None:
        self.replies: dict[Peer, list[Message]] = {}
        self.unreachable: set[Peer] = set()
        self.forgotten: list[Peer] = []

    def waitable(self) -> Any:
        raise NotImplementedError

    def drain(self, limit: int) -> Any:
        return ()

    def reply(self, peer: Peer, message: Message) -> bool:
        if peer in self.unreachable:
            return False
        self.replies.setdefault(peer, []).append(message)
        return True

    def is_gone(self, peer: Peer) -> bool:
        return peer in self.unreachable

    def forget(self, peer: Peer) -> None:
        self.forgotten.append(peer)

    def close(self) -> None:
        pass


def make_layers() -> list[BaseLayer]:
    torch.manual_seed(0)

    def spec(handle: int, kind: LayerKind, out: int, **more: Any) -> LayerSpec:
        return LayerSpec(
            handle=handle, identity=str(handle), kind=kind, paths=(f"layer{handle}",), in_width=WIDTH, out_width=out, **more
        )

    mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).eval().requires_grad_(False)
    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    experts = MixtralExperts(config).eval().requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    weights = dict(experts.named_parameters())
    return [
        Matrix(spec(LINEAR, LayerKind.LINEAR, WIDTH), {"weight": torch.randn(WIDTH, WIDTH)}),
        Matrix(spec(OTHER, LayerKind.LINEAR, 48), {"weight": torch.randn(48, WIDTH)}),
        Matrix(spec(WIDE, LayerKind.CONV1D, 4096), {"weight": torch.randn(WIDTH, 4096)}),
        Block(spec(BLOCK, LayerKind.BLOCK, WIDTH), mlp),
        Experts(spec(EXPERTS, LayerKind.EXPERTS, WIDTH, experts=4), weights, experts),
        Norm(spec(NORM, LayerKind.NORM, WIDTH), nn.LayerNorm(WIDTH).eval().requires_grad_(False)),
    ]


class ServiceBench:
    """A service, its tenants and their replies."""

    def __init__(self, policy: Any = None, **limits: Any) -> None:
        self.clock, self.port = Clock(), MemoryPort()
        self.device_share = CpuTimeShare(clock=self.clock)
        self.layers = make_layers()
        manifest = Manifest(
            name="toy", model_class="", config={}, generation_config=None, attention=None, dtype="float32",
            layers=tuple(layer.spec for layer in self.layers), ties={}, client_weights=None, tokenizer=None,
        )  # fmt: skip
        self.service = Service(
            model="toy", name="toy", layers=self.layers, manifest=lambda: manifest, policy=policy or RunFirstKey(),
            limits=Limits(**limits), device_share=self.device_share, clock=self.clock,
        )  # fmt: skip
        self._requests = itertools.count(1)

    def new_peer(self, tenant: str | None = None) -> Peer:
        return Peer(self.port, b"", tenant)

    def connect(self, name: str = "ann") -> Peer:
        peer = self.new_peer()
        self.send(peer, Kind.HELLO, body={"name": name})
        assert self.reply_to(peer).kind is Kind.WELCOME
        return peer

    def send(self, peer: Peer, kind: Kind, **fields: Any) -> int:
        request = fields.pop("request", None) or next(self._requests)
        self.service.handle(peer, Message(kind, request, **fields))
        return request

    def call(self, peer: Peer, *tensors: torch.Tensor, layers: tuple[int, ...] = (LINEAR,), back: bool = False, **more) -> int:
        direction = Direction.BACKWARD if back else Direction.FORWARD
        return self.send(peer, Kind.CALL, layers=layers, direction=direction, tensors=tensors, **more)

    def run(self) -> int:
        """Run all that is due. Returns the number of batches and slices."""
        ran = 0
        while self.service.batcher.step() == 0.0:
            ran += 1
        return ran

    def run_engine_step(self, seconds: float = 0.1) -> None:
        """Run one step of the hosted engine."""
        with self.device_share:
            self.clock.now += seconds

    def reply_to(self, peer: Peer) -> Message:
        """The one reply to this peer since the last call."""
        replies = self.replies_to(peer)
        assert len(replies) == 1, replies
        return replies[0]

    def replies_to(self, peer: Peer) -> list[Message]:
        return self.port.replies.pop(peer, [])
