"""Devices of a plan: their memory, bandwidth and speed, from a specification or from this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from symbiosis.common.available_memory import available_memory
from symbiosis.errors import SymbiosisError
from symbiosis.planning.quantities import format_bytes, parse_bytes, parse_rate

GRAMMAR = "KIND[:MEMORY][:BANDWIDTH][:SPEED] [x COUNT], comma-separated, such as 'cuda:80GB x 2, cpu:64GB' or 'h200'"
CUDA_CONTEXT_BYTES = 780 << 20
"""Of a process on a GPU besides torch's tensors: context, kernels, libraries. An H200 with CUDA 13 takes 720 to 830 MiB.

Of that 527 MiB are the context, 92 torch's first kernel, 66 to 136 cuBLAS, the rest other modules of kernels.
"""
_MAX_DEVICES = 1024
_BANDWIDTH_SHARE, _SPEED_SHARE = 0.8, 0.6
"""Of the data sheet's figures, what products of matrices reach."""
_CPU_DEFAULTS = 2e10, 1e11


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. Its figures bound the speed; they do not predict contention."""

    kind: str
    """cpu or cuda."""
    index: int
    memory: int
    """Bytes that new processes can use."""
    bandwidth: float
    """Bytes per second, reached in practice."""
    flops: float
    """Operations per second of products in half precision on a GPU, in float32 on a CPU; reached in practice."""
    model: str = ""
    """Its name in the table of known devices, if it is there."""

    @property
    def name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


KNOWN: dict[str, tuple[int, float, float]] = {
    "b200": (180 * 10**9, 8.0e12, 2250e12),
    "h200": (141 * 10**9, 4.8e12, 989e12),
    "h100": (80 * 10**9, 3.35e12, 989e12),
    "a100": (80 * 10**9, 2.04e12, 312e12),
    "l40s": (48 * 10**9, 0.864e12, 362e12),
    "l4": (24 * 10**9, 0.3e12, 121e12),
    "a10": (24 * 10**9, 0.6e12, 125e12),
    "v100": (32 * 10**9, 0.9e12, 125e12),
    "t4": (16 * 10**9, 0.32e12, 65e12),
    "rtx4090": (24 * 10**9, 1.01e12, 165e12),
}
"""Memory, bandwidth and dense 16-bit speed of the data sheets."""


def parse_devices(specs: Sequence[str]) -> list[Device]:
    """The devices of `--devices`, GPUs in their order. Raises `SymbiosisError` with what was expected."""
    found: list[Device] = []
    for part in (part.strip() for spec in specs for part in spec.split(",")):
        match = re.fullmatch(r"(\S+)(?:\s*[x×]\s*(\d{1,6}))?", part)
        if match is None:
            raise SymbiosisError(f"--devices {part!r:.60}: expected {GRAMMAR}")
        count = int(match[2] or 1)
        if not 1 <= count <= _MAX_DEVICES:
            raise SymbiosisError(f"--devices {part!r:.60}: {count} devices, expected 1 to {_MAX_DEVICES}")
        found += [_parse_device(match[1])] * count
    if sum(device.kind == "cpu" for device in found) > 1:
        raise SymbiosisError("--devices: two CPUs, expected the host's memory once, such as 'cuda:80GB x 2, cpu:64GB'")
    gpus = [replace(device, index=index) for index, device in enumerate(d for d in found if d.kind == "cuda")]
    return [*gpus, *(device for device in found if device.kind == "cpu")]


def _parse_device(text: str) -> Device:
    kind, *fields = text.lower().split(":")
    memory, bandwidth, flops, model = None, None, None, ""
    if kind in KNOWN:
        (memory, bandwidth, flops), model, kind = KNOWN[kind], kind, "cuda"
        bandwidth, flops = _BANDWIDTH_SHARE * bandwidth, _SPEED_SHARE * flops
    if kind not in ("cpu", "cuda"):
        raise SymbiosisError(f"--devices {text!r:.60}: unknown kind {kind!r:.40}, expected cpu, cuda, {', '.join(KNOWN)}")
    for each in fields:
        size, rate, speed = parse_bytes(each), parse_rate(each, "B/s"), parse_rate(each, "FLOPS")
        if size is not None:
            memory = size
        elif rate is not None:
            bandwidth = rate
        elif speed is not None:
            flops = speed
        else:
            raise SymbiosisError(f"--devices {text!r:.60}: {each!r:.40} is neither memory (80GB), 2TB/s nor 300TFLOPS")
    if memory is None:
        if kind == "cuda":
            raise SymbiosisError(f"--devices {text!r:.60}: the memory is missing, expected cuda:80GB or a name such as h200")
        memory = available_memory()
    if kind == "cuda":
        return Device(kind="cuda", index=0, memory=memory, bandwidth=bandwidth or 1e12, flops=flops or 1e14, model=model)
    return Device(kind="cpu", index=0, memory=memory, bandwidth=bandwidth or _CPU_DEFAULTS[0], flops=flops or _CPU_DEFAULTS[1])


def this_machine(*, measured: bool = True) -> list[Device]:
    """The GPUs and the CPU of this machine, with the memory that is free now. `measured`: time the CPU for some 0.1 s."""
    gpus = [_read_gpu(index) for index in range(torch.cuda.device_count())]
    bandwidth, flops = _time_cpu() if measured else _CPU_DEFAULTS
    return [*gpus, Device(kind="cpu", index=0, memory=available_memory(), bandwidth=bandwidth, flops=flops)]


def _read_gpu(index: int) -> Device:
    free, _ = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index).lower().replace(" ", "")
    model = next((known for known in sorted(KNOWN, key=len, reverse=True) if known in name), "")
    _, bandwidth, flops = KNOWN.get(model, (0, 1e12 / _BANDWIDTH_SHARE, 1e14 / _SPEED_SHARE))
    return Device(
        kind="cuda", index=index, memory=free, bandwidth=_BANDWIDTH_SHARE * bandwidth, flops=_SPEED_SHARE * flops, model=model
    )


def _time_cpu() -> tuple[float, float]:
    """Bytes per second of a copy, and operations per second of a product; the best of a few."""
    source, target = torch.ones(1 << 22), torch.empty(1 << 22)
    a, b = torch.ones(256, 1024), torch.ones(1024, 1024)
    copies, products = [], []
    for _ in range(4):
        copies.append(_seconds(lambda: target.copy_(source)))
        products.append(_seconds(lambda: a @ b))
    return 2 * source.nbytes / min(copies), 2 * 256 * 1024 * 1024 / min(products)


def _seconds(function: object) -> float:
    started = time.perf_counter()
    function()  # type: ignore[operator]
    return max(1e-9, time.perf_counter() - started)


def describe(device: Device) -> str:
    """`cuda:0, 141 GB`."""
    return f"{device.name}{f' ({device.model})' if device.model else ''}, {format_bytes(device.memory)}"
