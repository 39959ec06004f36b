"""Calls of the CUDA driver that torch does not offer: memory shared between processes, and partitions of a GPU.

The only module that loads the driver library, on first use. A process that opens a handle can write to the memory
behind it: handles are sent only to tenants that the provider trusts.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from symbiosis.errors import SymbiosisError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE_MAPPED = 3
_ALLOCATION_BYTES = 2 << 20
_MPS_ENABLED = 133
_MULTIPROCESSORS = 1  # type of resource
_RESOURCE_BYTES, _COUNT_OFFSET = 256, 96  # more than any driver writes; the number of multiprocessors
_NON_BLOCKING = _DEFAULT_STREAM = 1
capture_lock = threading.Lock()
"""Held during the capture of a CUDA graph, and by `synchronized`."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class DriverError(SymbiosisError):
    code = "cuda_driver"


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    result = getattr(_library(), name)(*args)
    if result:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'unknown').decode()} ({result})")


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """The context torch uses on this GPU."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(index))
    return context


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Driver calls inside are for this GPU. The thread's current stream is synchronized first."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        _call("cuCtxSetCurrent", _context(device.index))  # a new thread has no context
        yield


def current_stream(device: torch.device) -> int:
    """Handle of the calling thread's stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def gpu_name(device: torch.device) -> str:
    """UUID of a GPU, equal in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def is_shared(device: torch.device) -> bool:
    """Whether kernels of several processes run concurrently on this GPU (CUDA MPS) instead of time-sliced."""
    value = ctypes.c_int(0)
    try:
        _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_MPS_ENABLED), ctypes.c_int(device.index or 0))
    except DriverError:  # not supported by older drivers
        return False
    return bool(value.value)


@contextmanager
def synchronized(device: torch.device) -> Iterator[None]:
    """All work launched on the device is done. No CUDA graph is captured inside: synchronizing would break the capture."""
    with capture_lock:
        torch.cuda.synchronize(device)
        yield


def part_stream(device: torch.device, count: int, priority: int) -> tuple[torch.cuda.Stream, int]:
    """A stream that uses about `count` multiprocessors, and their exact number. It lives as long as the process.

    Raises `DriverError` where the driver does not support it.
    """
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    index, groups = ctypes.c_int(device.index or 0), ctypes.c_uint(1)
    described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with _on(torch.device("cuda", index.value)):
        try:
            _call("cuDeviceGetDevResource", index, whole, ctypes.c_int(_MULTIPROCESSORS))
            _call(
                "cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, ctypes.c_uint(0), ctypes.c_uint(count)
            )
            _call("cuDevResourceGenerateDesc", ctypes.byref(described), part, ctypes.c_uint(1))
            _call("cuGreenCtxCreate", ctypes.byref(context), described, index, ctypes.c_uint(_DEFAULT_STREAM))
            _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority))
        except AttributeError:  # the library lacks the call
            raise DriverError("this driver cannot partition a GPU's multiprocessors") from None
    partition = torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]
    return partition, int.from_bytes(part.raw[_COUNT_OFFSET : _COUNT_OFFSET + 4], "little")


def find_gpu(name: str | None) -> torch.device | None:
    """The GPU of this name; None if it is not visible to this process."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if name else []
    return next((device for device in devices if gpu_name(device) == name), None)


def export(tensor: Tensor) -> tuple[bytes, int, int]:
    """(handle, size of the allocation, offset of the tensor in it), for another process to open this tensor."""
    assert tensor.is_cuda, tensor.device
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _on(tensor.device):
        pointer = ctypes.c_uint64(tensor.data_ptr())
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), size.value, tensor.data_ptr() - base.value


class OpenedMemory:
    """Another process's allocation as a byte tensor, [size]."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        if len(handle) != HANDLE_BYTES or size <= 0:
            raise DriverError(
                f"bad handle: {len(handle)} bytes for {size} bytes of memory; expected {HANDLE_BYTES} bytes, size > 0"
            )
        self._pointer, self._device, raw = ctypes.c_uint64(), device, _Handle()
        ctypes.memmove(ctypes.byref(raw), handle, HANDLE_BYTES)
        with _on(device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._pointer), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.bytes = _at(self._pointer.value, size, device)

    def close(self) -> None:
        with _on(self._device):
            _call("cuIpcCloseMemHandle", self._pointer)


_opened: dict[tuple[bytes, torch.device], OpenedMemory] = {}
_lock = threading.Lock()


def open_allocation(handle: bytes, size: int, device: torch.device) -> Tensor:
    """Another process's allocation as a byte tensor. It is opened once and stays open as long as this process lives."""
    with _lock:
        if (handle, device) not in _opened:
            _opened[handle, device] = OpenedMemory(handle, size, device)
        return _opened[handle, device].bytes


class _Memory:
    """Raw device memory that torch wraps without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


def _at(pointer: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(pointer, size), device=device)


class DeviceMemory:
    """A separate allocation: a handle to it opens this memory and no other.

    Rounded up to 2 MiB: the driver combines smaller allocations into one, and a handle opens all of it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pointer, size = ctypes.c_uint64(), -(-size // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
        with _on(device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._pointer, self._device = pointer, device
        self.bytes = _at(pointer.value, size, device)

    def close(self) -> None:
        """Free the memory, after the work that uses it is done."""
        with _on(self._device), synchronized(self._device):
            _call("cuMemFree_v2", self._pointer)


class Counters:
    """32-bit counters in host memory that streams of several processes write and wait for."""

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        self.host = memoryview(memory).cast("I")
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pointer = ctypes.c_uint64()
        with _on(device):
            _call(
                "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), ctypes.c_uint(_PORTABLE_MAPPED)
            )
            _call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0))
        self._address, self._pointer, self._device = address, pointer.value, device
        self._write, self._wait = _library().cuStreamWriteValue32_v2, _library().cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def write(self, stream: int, index: int, value: int) -> None:
        """The stream sets the counter at `index` to `value` when it reaches this point."""
        self._enqueue(self._write, stream, index, value)

    def wait(self, stream: int, index: int, value: int) -> None:
        """The stream waits until the counter at `index` has reached `value`."""
        self._enqueue(self._wait, stream, index, value)

    def _enqueue(self, function: Any, stream: int, index: int, value: int) -> None:
        if torch._C._cuda_getDevice() != self._device.index:  # the default stream belongs to the current device
            with torch.cuda.device(self._device):
                return self._enqueue(function, stream, index, value)
        if function(stream, self._pointer + 4 * index, value & 0xFFFFFFFF, 0):
            raise DriverError("cannot enqueue a counter operation: the GPU's context is broken; restart the process")
        return None

    def close(self) -> None:
        with _on(self._device):
            _call("cuMemHostUnregister", ctypes.c_void_p(self._address))
        self.host.release()
