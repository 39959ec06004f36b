"""Step times from a roofline: a step takes as long as its operations, or as the bytes it reads, whichever is longer.

The figures are lower bounds for a tenant alone; Python between the calls and other processes come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from symbiosis.planning.devices import Device
from symbiosis.planning.model_size import ModelSize


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """What carries layer calls."""

    name: str
    bandwidth: float
    """Bytes per second."""
    call_s: float
    """Fixed seconds of a call, both ways."""


SHARED_MEMORY = LinkFigures(name="shm", bandwidth=6e9, call_s=1.5e-4)
LOCAL_TCP = LinkFigures(name="tcp", bandwidth=1.5e9, call_s=2.5e-4)
GPU_CHANNEL = LinkFigures(name="gpu", bandwidth=1e12, call_s=3e-5)
NETWORK = LinkFigures(name="network", bandwidth=1.25e9, call_s=5e-4)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One training step, one generated token of each stream, or one pass."""

    server_s: float
    tenant_s: float
    link_s: float
    tokens: int
    """Of one step."""
    calls: int = 0
    bytes: int = 0
    """Over the link, both ways."""

    @property
    def seconds(self) -> float:
        return self.server_s + self.tenant_s + self.link_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def product_s(device: Device, parameters: int, weight_bytes: int, rows: int, passes: float = 1.0) -> float:
    """Rows times matrices, `passes` times."""
    return passes * max(2.0 * parameters * rows / device.flops, weight_bytes / device.bandwidth)


def attention_s(device: Device, size: ModelSize, sequences: int, length: int, *, training: bool) -> float:
    """Causal attention over whole sequences; backward takes twice as long as forward."""
    facts, config = size.facts, size.model.config.get_text_config()
    width = int(getattr(config, "num_attention_heads", 1) or 1) * (facts.head_dim or 1)
    operations = 2.0 * facts.layers * sequences * length * length * width
    return operations * (3 if training else 1) / device.flops


def cache_s(device: Device, size: ModelSize, tokens: int) -> float:
    """Reading the keys and values of so many tokens."""
    return tokens * size.kv_cache_token() / device.bandwidth


def train_step(
    size: ModelSize, *, server: Device, tenant: Device, link: LinkFigures, batch: int, length: int, calls: int, traffic: int
) -> StepTime:
    """A split tenant's step. The executor computes base layers forward, again for blocks, and their input gradients."""
    rows = batch * length
    head_bytes = size.head_parameters * size.dtype.itemsize
    return StepTime(
        server_s=product_s(server, size.base_parameters, size.hosted, rows, 2.7),
        tenant_s=product_s(tenant, size.head_parameters, head_bytes, rows, 2.0)
        + attention_s(tenant, size, batch, length, training=True),
        link_s=traffic / link.bandwidth + calls * link.call_s,
        tokens=rows,
        calls=calls,
        bytes=traffic,
    )


def split_token(
    size: ModelSize, *, server: Device, tenant: Device, link: LinkFigures, streams: int, context: int, calls: int, traffic: int
) -> StepTime:
    """One token of each of a split tenant's sequences, at full context."""
    head_bytes = size.head_parameters * size.dtype.itemsize
    return StepTime(
        server_s=product_s(server, size.base_parameters, size.hosted, streams),
        tenant_s=product_s(tenant, size.head_parameters, head_bytes, streams) + cache_s(tenant, size, streams * context),
        link_s=traffic / link.bandwidth + calls * link.call_s,
        tokens=streams,
        calls=calls,
        bytes=traffic,
    )


def engine_token(size: ModelSize, *, device: Device, streams: int, context: int) -> StepTime:
    """One token of each served sequence, at full context."""
    parameters = size.base_parameters + size.head_parameters
    seconds = product_s(device, parameters, size.weights, streams) + cache_s(device, size, streams * context)
    return StepTime(server_s=seconds, tenant_s=0.0, link_s=0.0, tokens=streams)


def training_pass(size: ModelSize, *, device: Device, rows: int) -> StepTime:
    """One pass of hosted training: forward, and the gradients of inputs."""
    parameters = size.base_parameters + size.head_parameters
    seconds = product_s(device, parameters, size.weights, rows, 2.0) + attention_s(device, size, 1, rows, training=True)
    return StepTime(server_s=seconds, tenant_s=0.0, link_s=0.0, tokens=rows)
