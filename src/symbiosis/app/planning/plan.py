"""A plan: placement, memory by part, step times, traffic, and the commands that make it real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from symbiosis.app.planning.placement import Placement, Placer
from symbiosis.app.planning.processes import CPU_PASS_ROWS, DEFAULT_BLOCKS, MAX_PASS_ROWS, ProcessEstimator
from symbiosis.models.default_model import NAME as DEFAULT_NAME
from symbiosis.models.device_dtype import resolve_dtype
from symbiosis.planning import roofline
from symbiosis.planning.devices import Device
from symbiosis.planning.estimates import sum_on
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.roofline import LinkFigures, StepTime
from symbiosis.planning.tenants import TenantLoad, Workload

_CONTEXTS = (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """What `symbiosis plan` prints."""

    model: str
    source: str | None
    dtype: str
    size: ModelSize
    devices: tuple[Device, ...]
    placement: Placement
    times: tuple[StepTime, ...]
    """Of one tenant of each load."""

    @property
    def kv_cache(self) -> dict[int, int]:
        """Bytes of one sequence's KV cache by its length."""
        token, longest = self.size.kv_cache_token(), self.size.max_length
        lengths = [length for length in _CONTEXTS if length <= longest] or [longest]
        return {length: token * length for length in lengths} if token else {}

    def used(self, device: Device) -> int:
        return sum_on(self.placement.processes, device.name)

    def commands(self) -> list[str]:
        """The server's command, and what each split tenant calls."""
        placement = self.placement
        kind = placement.server[0].kind
        words = ["symbiosis serve", *([self.source] if self.source else [])]
        words += ["--device cuda"] if kind == "cuda" and placement.shards > 1 else []
        words += [f"--device {placement.server[0].name}"] if kind == "cuda" and placement.shards == 1 else []
        words += [f"--dtype {self.dtype}"] if self.dtype != _config_dtype(self.size) else []
        words += [f"--shards {placement.shards}"] if placement.shards > 1 else []
        if kind == "cuda" and any(load.is_split and device.kind == "cuda" for load, device in placement.loads):
            words.append("--listen tcp://127.0.0.1:7777 --listen shm://base")
        words += self._hosting_options()
        lines = [" ".join(words)]
        for load, device in placement.loads:
            if load.is_split:
                on_gpu = device.kind == "cuda" and not load.remote
                address = "tcp://HOST:7777" if load.remote else "shm://base" if on_gpu else "tcp://127.0.0.1:7777"
                options = f', device="{device.name}"' if on_gpu else ""
                lines.append(f'model = symbiosis.connect("{address}"{options})  # {load.describe()}')
        return lines

    def _hosting_options(self) -> list[str]:
        if not self.placement.is_hosting:
            return []
        found = ["--http"]
        (server,) = [process for process in self.placement.processes if process.role == "server"]
        cache = server.parts["KV cache"]
        if cache > DEFAULT_BLOCKS * 16 * self.size.kv_cache_token():
            found.append(f"--cache-gb {math.ceil(cache / 1e7) / 100:g}")
        return found

    def to_json(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "model": self.model,
            "dtype": self.dtype,
            "bytes": {
                "weights": self.size.weights,
                "base_layers": self.size.hosted,
                "client_part": self.size.client_part,
                "kv_cache_token": self.size.kv_cache_token(),
            },
            "kv_cache": {str(length): size for length, size in self.kv_cache.items()},
            "devices": [
                {"name": each.name, "model": each.model, "memory": each.memory, "planned": self.used(each)}
                for each in self.devices
            ],
            "server": [device.name for device in placement.server],
            "processes": [
                {
                    "role": each.role,
                    "device": each.device,
                    "count": each.count,
                    "remote": each.remote,
                    "bytes": each.total,
                    "peak_host_bytes": each.peak,
                    "parts": dict(each.parts),
                    "host_parts": dict(each.host_parts),
                }
                for each in placement.processes
            ],
            "tenants": [
                {
                    **asdict(load),
                    "device": device.name,
                    "step_s": time.seconds,
                    "tokens_per_s": time.tokens_per_s,
                    "calls": time.calls,
                    "link_bytes": time.bytes,
                }
                for (load, device), time in zip(placement.loads, self.times, strict=True)
            ],
            "notes": list(placement.notes),
            "commands": self.commands(),
        }


def make_plan(
    source: str | None,
    loads: Sequence[TenantLoad],
    devices: Sequence[Device],
    *,
    dtype: str | None = None,
    shards: int | None = None,
    link_bandwidth: float | None = None,
    imports: int,
) -> Plan:
    """`imports`: bytes of a process after its imports. Raises `UnknownModel`, `DoesNotFit`, or `SymbiosisError`."""
    size = ModelSize.of(source, resolve_dtype(dtype))
    estimator = ProcessEstimator(size, source, imports)
    placement = Placer(estimator, devices, loads).place(shards)
    network = roofline.NETWORK if link_bandwidth is None else replace(roofline.NETWORK, bandwidth=link_bandwidth)
    times = [_time_load(estimator, placement, load, device, network) for load, device in placement.loads]
    return Plan(
        model=source or DEFAULT_NAME,
        source=source,
        dtype=str(size.dtype).removeprefix("torch."),
        size=size,
        devices=tuple(devices),
        placement=placement,
        times=tuple(times),
    )


def _time_load(
    estimator: ProcessEstimator, placement: Placement, load: TenantLoad, device: Device, network: LinkFigures
) -> StepTime:
    size, server = estimator.size, placement.server[0]
    if load.workload is Workload.SERVE:
        return roofline.engine_token(size, device=server, streams=load.streams * load.count, context=load.context)
    if load.workload is Workload.JOB:
        least = CPU_PASS_ROWS if server.kind == "cpu" else MAX_PASS_ROWS
        return roofline.training_pass(size, device=server, rows=min(MAX_PASS_ROWS, max(least, load.length)))
    memory = estimator.run_tenant(load, device.kind)
    link = (
        network if load.remote else roofline.GPU_CHANNEL if device == server and server.kind == "cuda" else roofline.LOCAL_TCP
    )
    common: dict[str, Any] = {"server": server, "tenant": device, "link": link, "calls": memory.calls}
    common["traffic"] = memory.sent + memory.received
    if load.workload is Workload.TRAIN:
        return roofline.train_step(size, batch=load.batch, length=load.length, **common)
    return roofline.split_token(size, streams=load.streams, context=load.context, **common)


def _config_dtype(size: ModelSize) -> str:
    return str(getattr(size.model.config, "dtype", None) or size.dtype).removeprefix("torch.")
