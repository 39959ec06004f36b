"""Peak memory of the processes of a placement: executor, engine, trainer, tenants, HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from symbiosis.app.planning.dry_model import run_prefill, run_training_pass
from symbiosis.app.planning.dry_tenant import TenantMemory, run_tenant
from symbiosis.models.default_model import default_model_folder
from symbiosis.models.model_source import is_default
from symbiosis.planning.devices import CUDA_CONTEXT_BYTES
from symbiosis.planning.estimates import GROWTH, ProcessEstimate, heap_share, tokenizer_bytes
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.tenants import TenantLoad, Workload
from symbiosis.types import LayerKind, Limits

BLOCK_TOKENS = 16
DEFAULT_BLOCKS = 1024
"""Of the engine's KV cache (`serving.engine_core`)."""
ADAPTER_POOL, HOST_ADAPTER_POOL = 2 * 10**9, 4 * 10**9
"""Which a GPU's engine allocates at its start on the GPU and on the host (`serve --adapter-gb --adapter-host-gb`)."""
STEP_ROWS = 2048
"""Most rows of an engine's step (`serve --max-rows`)."""
CPU_PASS_ROWS, MAX_PASS_ROWS = 256, 4096
"""Rows of a training pass (`finetuning.config`)."""
PARAMETER_BYTES = 16
"""Of a trained parameter with its gradient and AdamW's state in float32."""
PACKED_SHARE = 0.25
"""As in `serving.lora.lora_layers`."""
_WORKSPACE = 32 << 20
"""Of cuBLAS, for each stream that it is used on."""
_PASSES = 3
"""A GPU's engine keeps the memory of three of its largest steps: graphs of decode, graphs of prefill, and steps without."""


class ProcessEstimator:
    """Estimates for one model. Dry runs are made once for each load."""

    def __init__(self, size: ModelSize, source: Any, imports: int) -> None:
        """`source`: where the model comes from. `imports`: bytes of a process after its imports."""
        self.size, self._imports = size, imports
        self._source = default_model_folder() if is_default(source) else source
        self.run_tenant = cache(lambda load, kind: run_tenant(self.size, load, kind))
        self._run_pass = cache(lambda load, rows, kind: run_training_pass(self.size, load, rows, kind))

    @cached_property
    def _tokenizer(self) -> int:
        return tokenizer_bytes(self._source)

    def base(self, role: str) -> dict[str, int]:
        return {"process": self._imports + GROWTH[role]}

    def executor(self, device: str, split_loads: Sequence[TenantLoad] = (), shards: int = 1) -> ProcessEstimate:
        """The executor, or one of its shards."""
        size, on_cpu = self.size, device == "cpu"
        calls = self._call_bytes(split_loads)
        host = self.base("executor" if shards == 1 else "shard") | {"tokenizer": self._tokenizer}
        if shards > 1:
            weights = size.shard(shards)
            loading = size.weights + size.client_part  # shards load one after the other
        else:
            weights, loading = size.weights, 0
        if on_cpu:
            # The copy of the client part is freed, and its memory serves calls afterwards.
            copies = max(size.client_part, calls) if shards == 1 else calls
            parts = host | {"base weights": weights, "calls": copies}
            return ProcessEstimate(role="executor" if shards == 1 else "shard", device="cpu", parts=parts, loading=loading)
        parts = {"CUDA context": CUDA_CONTEXT_BYTES, "base weights": weights, "calls": calls + 2 * _WORKSPACE}
        host |= {"calls": size.client_part}
        return ProcessEstimate(role="executor", device=device, parts=parts, host_parts=host, loading=loading)

    def _call_bytes(self, loads: Sequence[TenantLoad]) -> int:
        """Rows in flight: a batch with its intermediate results, and one waiting call of each tenant."""
        if not loads:
            return 0
        item, limits = self.size.dtype.itemsize, Limits()
        specs = [layer.spec for layer in self.size.split.layers if layer.spec.kind is not LayerKind.NORM]
        inner = max((spec.out_width for spec in specs if spec.kind is LayerKind.LINEAR), default=0)
        widest = max(spec.in_width + spec.out_width for spec in specs)
        rows = max(min(_rows_of_call(load), limits.max_rows, limits.max_bytes // (widest * item)) for load in loads)
        waiting = sum(load.count for load in loads)
        return rows * item * (2 * widest + 6 * inner) + (waiting - 1) * rows * item * widest

    def engine(
        self,
        device: str,
        serve: Sequence[TenantLoad] = (),
        jobs: Sequence[TenantLoad] = (),
        split_loads: Sequence[TenantLoad] = (),
        *,
        available: int | None = None,
    ) -> ProcessEstimate:
        """The process of `serve --http`: executor, engine and trainer over the same weights.

        `available`: bytes of the host; a CPU engine packs its weights only where they take a small share of what is left.
        """
        size, kind = self.size, device.partition(":")[0]
        streams = max(1, sum(load.count * load.streams for load in serve))
        rows = min(STEP_ROWS, max([BLOCK_TOKENS, *(load.count * load.streams * load.context for load in serve)]))
        adapters = sum(load.adapters * self.adapter_bytes(load) for load in serve)
        parts = {"base weights": size.weights, "KV cache": self.kv_cache_bytes(serve), "adapters": adapters}
        step, training = run_prefill(size, rows, min(streams, rows), kind) if serve else 0, 0
        if jobs:
            passes = [self.training_pass(load, kind) for load in jobs]
            states = sum(load.count * parameters * PARAMETER_BYTES for load, (parameters, _) in zip(jobs, passes, strict=True))
            parts["adapter training"] = states
            training = max(activations for _, activations in passes)
        host = self.base("engine") | {"tokenizer": self._tokenizer}
        if kind == "cpu":
            # Steps and passes use the memory that the copy of the client part had.
            parts |= {"fused copies": size.fused}
            parts["activations"] = max(size.client_part, self._call_bytes(split_loads), step, training)
            left = None if available is None else available - sum(parts.values()) - sum(host.values())
            parts["packed copies"] = size.packed if left is None or size.packed <= PACKED_SHARE * left else 0
            return ProcessEstimate(role="server", device="cpu", parts=host | parts)
        parts |= {"CUDA context": CUDA_CONTEXT_BYTES, "adapters": max(ADAPTER_POOL, adapters)}
        parts["activations"] = max(_PASSES * step + training, self._call_bytes(split_loads)) + 2 * _WORKSPACE
        host |= {"client part": size.client_part, "adapters": HOST_ADAPTER_POOL}
        return ProcessEstimate(role="server", device=device, parts=parts, host_parts=host)

    def training_pass(self, load: TenantLoad, kind: str) -> tuple[int, int]:
        """Parameters of a job's adapter, and bytes of its largest pass."""
        least = CPU_PASS_ROWS if kind == "cpu" else MAX_PASS_ROWS
        parameters, activations = self._run_pass(load, min(MAX_PASS_ROWS, max(least, load.length)), kind)
        return int(parameters), int(activations)

    def adapter_bytes(self, load: TenantLoad) -> int:
        """Of one served adapter, in the model's dtype."""
        if load.method == "none":
            return 0
        parameters, _ = self._run_pass(load, 1, "cpu")
        return int(parameters) * self.size.dtype.itemsize

    def kv_cache_bytes(self, serve: Sequence[TenantLoad]) -> int:
        """The engine's KV cache: for all streams at their full context, and at least the default."""
        blocks = sum(load.count * load.streams * -(-load.context // BLOCK_TOKENS) for load in serve)
        return max(DEFAULT_BLOCKS, blocks) * BLOCK_TOKENS * self.size.kv_cache_token()

    def http(self, workers: int = 1) -> ProcessEstimate:
        return ProcessEstimate(
            role="HTTP", device="cpu", parts=self.base("http") | {"tokenizer": self._tokenizer}, count=workers
        )

    def tenant(self, load: TenantLoad, device: str, *, maps: bool = False) -> ProcessEstimate:
        """A split tenant; `maps`: it is on the executor's GPU, and maps the client part that is there."""
        found: TenantMemory = self.run_tenant(load, device.partition(":")[0])
        parts = {
            "client part": 0 if maps else found.client_part,
            "adapter": found.adapter,
            "gradients": found.gradients,
            "optimizer": found.optimizer,
            "KV cache": found.kv_cache,
            "activations": found.activations,
        }
        parts = {name: size for name, size in parts.items() if size}
        base, role = self.base("tenant"), "tenant"
        options: dict[str, Any] = {"count": load.count, "remote": load.remote}
        if device == "cpu":
            heap = {"heap": int(heap_share() * sum(parts.values()))}
            return ProcessEstimate(role=role, device="cpu", parts=base | parts | heap, **options)
        parts |= {"CUDA context": CUDA_CONTEXT_BYTES, "activations": found.activations + _WORKSPACE}
        return ProcessEstimate(role=role, device=device, parts=parts, host_parts=base, **options)


def _rows_of_call(load: TenantLoad) -> int:
    return load.batch * load.length if load.workload is Workload.TRAIN else load.streams * load.context
