"""Choosing a placement: what runs on which device, or why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.app.planning.processes import ProcessEstimator
from symbiosis.errors import DoesNotFit, SymbiosisError
from symbiosis.planning.devices import Device, describe
from symbiosis.planning.estimates import ProcessEstimate, sum_on
from symbiosis.planning.quantities import format_bytes, format_tokens
from symbiosis.planning.tenants import TenantLoad, Workload

_MAX_SHARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Processes and the devices they are on."""

    server: tuple[Device, ...]
    """The device of the server, or one for each shard."""
    processes: tuple[ProcessEstimate, ...]
    loads: tuple[tuple[TenantLoad, Device], ...]
    """Each load and the device of the tenant's part; hosted loads are on the server's."""
    notes: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        return len(self.server)

    @property
    def is_hosting(self) -> bool:
        return any(not load.is_split for load, _ in self.loads)


class Placer:
    def __init__(self, estimator: ProcessEstimator, devices: Sequence[Device], loads: Sequence[TenantLoad]) -> None:
        self._estimator, self._loads = estimator, tuple(loads)
        self._gpus = [device for device in devices if device.kind == "cuda"]
        self._cpu = next((device for device in devices if device.kind == "cpu"), None)
        self._memory = {device.name: device.memory for device in devices}
        self._split = [load for load in loads if load.is_split]
        self._serve = [load for load in loads if load.workload is Workload.SERVE]
        self._jobs = [load for load in loads if load.workload is Workload.JOB]

    def place(self, shards: int | None = None) -> Placement:
        """The first placement that fits: one GPU, shards over GPUs, the CPU. Raises `DoesNotFit` with what is missing.

        `shards`: exactly so many. Raises `SymbiosisError` if there are fewer devices.
        """
        self._check_loads()
        if shards is not None:
            self._check_shards(shards)
        tried: list[Placement] = []
        for servers in self._servers(shards):
            candidate = self._complete(servers)
            if not self._missing(candidate):
                return candidate
            tried.append(candidate)
        raise self._does_not_fit(tried)

    def _check_loads(self) -> None:
        size = self._estimator.size
        for load in self._loads:
            longest = load.length if load.workload in (Workload.TRAIN, Workload.JOB) else load.context
            if longest > size.max_length:
                raise SymbiosisError(
                    f"{load.describe()}: the model's longest sequence is {size.max_length} tokens, not {longest}: shorten it"
                )
            if load.device == "cuda" and not self._gpus and not load.remote:
                raise SymbiosisError(f"{load.describe()}: there is no GPU for it: add one to --devices, or leave cuda out")
        if self._serve and not (size.facts.decoder_only and size.kv_cache_token()):
            raise SymbiosisError(f"{type(size.model).__name__} cannot be served: expected a decoder with key-value heads")

    def _check_shards(self, shards: int) -> None:
        most = self._estimator.size.max_shards()
        if not 2 <= shards <= _MAX_SHARDS:
            raise SymbiosisError(f"--shards {shards}: expected 2 to {_MAX_SHARDS}")
        if self._gpus and shards > len(self._gpus):
            raise SymbiosisError(f"--shards {shards}: --devices has {len(self._gpus)} GPUs, each shard needs its own")
        if shards > most:
            raise SymbiosisError(f"--shards {shards}: the smallest layer has {most} rows: expected at most {most}")
        if self._serve or self._jobs:
            raise SymbiosisError("--shards: hosted serving and jobs need the whole model on one device: plan split tenants")

    def _servers(self, shards: int | None) -> list[tuple[Device, ...]]:
        """Candidates for the server's devices, the best first."""
        if shards is not None:
            if self._gpus:
                return [tuple(self._gpus[:shards])]
            return [(self._cpu,) * shards] if self._cpu is not None else []
        found: list[tuple[Device, ...]] = [(gpu,) for gpu in sorted(self._gpus, key=lambda gpu: -gpu.memory)[:1]]
        if not (self._serve or self._jobs):
            by_memory = sorted(self._gpus, key=lambda gpu: -gpu.memory)
            most = min(len(by_memory), self._estimator.size.max_shards(), _MAX_SHARDS)
            found += [tuple(by_memory[:count]) for count in range(2, most + 1)]
        return [*found, *([(self._cpu,)] if self._cpu is not None else [])]

    def _complete(self, servers: tuple[Device, ...]) -> Placement:
        """The tenants' parts on the server's GPU, on the emptiest other one, or on the CPU."""
        processes, notes = self._server_processes(servers), list[str]()
        sizes = {device.memory for device in servers}
        if len(servers) > 1 and len(sizes) > 1:
            notes.append(f"shards are of equal size: the smallest device ({format_bytes(min(sizes))}) bounds all of them")
        placed: list[tuple[TenantLoad, Device]] = []
        for load in self._loads:
            if not load.is_split:
                placed.append((load, servers[0]))
                continue
            device = self._place_tenant(load, servers, processes)
            processes.append(self._tenant(load, device, servers))
            placed.append((load, device))
            if device.kind == "cpu" and servers[0].kind == "cuda" and load.device is None and not load.remote:
                notes.append(f"{load.describe()}: its KV cache and activations are in host memory, as the GPUs have no room")
        return Placement(server=servers, processes=tuple(processes), loads=tuple(placed), notes=tuple(notes))

    def _server_processes(self, servers: tuple[Device, ...]) -> list[ProcessEstimate]:
        first, estimator = servers[0], self._estimator
        if self._serve or self._jobs:
            host = self._cpu.memory if self._cpu is not None else None
            engine = estimator.engine(first.name, self._serve, self._jobs, self._split, available=host)
            return [engine, estimator.http(1 if first.kind == "cpu" else 4)]
        return [estimator.executor(device.name, self._split, len(servers)) for device in servers]

    def _place_tenant(self, load: TenantLoad, servers: tuple[Device, ...], processes: list[ProcessEstimate]) -> Device:
        wants_gpu = load.device == "cuda" or (load.device is None and servers[0].kind == "cuda")
        if load.remote or not wants_gpu:
            return self._cpu or servers[0]
        for gpu in sorted(self._gpus, key=lambda gpu: sum_on(processes, gpu.name) - gpu.memory):
            estimate = self._tenant(load, gpu, servers)
            if sum_on([*processes, estimate], gpu.name) <= gpu.memory:
                return gpu
        return self._gpus[0] if load.device == "cuda" or self._cpu is None else self._cpu

    def _tenant(self, load: TenantLoad, device: Device, servers: tuple[Device, ...]) -> ProcessEstimate:
        maps = device.kind == "cuda" and servers == (device,) and not load.remote
        return self._estimator.tenant(load, device.name, maps=maps)

    def _missing(self, placement: Placement) -> dict[str, int]:
        """Bytes that are missing, by device."""
        needed = {name: sum_on(placement.processes, name) for name in self._memory}
        return {name: needed[name] - memory for name, memory in self._memory.items() if needed[name] > memory}

    def _does_not_fit(self, tried: Sequence[Placement]) -> DoesNotFit:
        best = min(tried, key=lambda placement: sum(self._missing(placement).values()))
        missing = self._missing(best)
        name = max(missing, key=lambda each: missing[each])
        needed, memory = missing[name] + self._memory[name], self._memory[name]
        what = f"does not fit: {format_bytes(needed)} needed on {name}, {format_bytes(memory)} available"
        hint = self._suggest(best, name)
        return DoesNotFit(f"{what}, {format_bytes(missing[name])} missing{hint}", needed=needed, available=memory)

    def _suggest(self, placement: Placement, device: str) -> str:
        """What would fit."""
        largest = {"base weights": 0, "KV cache": 0, "activations": 0}
        for process in placement.processes:
            if process.device == device and not process.remote:
                for part in largest:
                    largest[part] += process.count * process.parts.get(part, 0)
        part = max(largest, key=lambda name: largest[name])
        if part == "KV cache" and self._serve:
            load = max(self._serve, key=lambda each: each.streams * each.context)
            others = sum_on(placement.processes, device) - largest[part]
            tokens = max(0, self._memory[device] - others) // max(1, self._estimator.size.kv_cache_token())
            if tokens >= load.context:
                return f"; {tokens // load.context // load.count} streams of {format_tokens(load.context)} would fit"
            return f"; {tokens} tokens of KV cache would fit"
        if part == "activations":
            return "; a smaller batch, shorter sequences or checkpointing need less"
        if self._estimator.size.dtype.itemsize > 2:
            return f"; the base weights take {format_bytes(largest[part])}, half of it with --dtype bfloat16"
        return f"; the base weights take {format_bytes(largest[part])}: add devices, or choose a smaller model"


def describe_devices(devices: Sequence[Device]) -> str:
    return "; ".join(describe(device) for device in devices)
