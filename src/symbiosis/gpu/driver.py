"""The CUDA driver's calls that torch does not offer: memory of one process used by another, in place; parts of a GPU.

The only home of the driver library. Nothing here is loaded before a GPU is
used. Whoever opens a handle can write to the memory behind it: handles go to
tenants the provider trusts with that, and to nobody else.
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
_OWN_BLOCK = 2 << 20
_MPS_ENABLED = 133
_MULTIPROCESSORS = 1  # a kind of resource
_RESOURCE_BYTES, _COUNT_AT = 256, 96  # more than any driver writes; where their number lies
_NON_BLOCKING = _DEFAULT_STREAM = 1
capture_lock = threading.Lock()
"""Held by whoever captures a CUDA graph."""


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
    """The driver's calls in here are about this GPU; what the thread has queued on it so far is done."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        _call("cuCtxSetCurrent", _context(device.index))  # a thread that has not used the GPU yet has none
        yield


def current_stream(device: torch.device) -> int:
    """The calling thread's stream, as the driver calls it."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def gpu_name(device: torch.device) -> str:
    """What two processes recognise one GPU by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def is_shared(device: torch.device) -> bool:
    """Whether kernels of several processes run side by side on this GPU (CUDA MPS), instead of in turns."""
    value = ctypes.c_int(0)
    try:
        _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_MPS_ENABLED), ctypes.c_int(device.index or 0))
    except DriverError:  # older drivers do not know the question
        return False
    return bool(value.value)


@contextmanager
def synchronized(device: torch.device) -> Iterator[None]:
    """All that was launched there is done, and nobody captures in here: waiting for the device would fail, and their graph."""
    with capture_lock:
        torch.cuda.synchronize(device)
        yield


def part_stream(device: torch.device, count: int, priority: int) -> tuple[torch.cuda.Stream, int]:
    """A stream that has about `count` of the multiprocessors, and how many it has. It lasts as long as the process.

    Raises `DriverError` where the driver cannot.
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
        except AttributeError:  # the library has no such call
            raise DriverError("this driver cannot divide a GPU's multiprocessors") from None
    made = torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]
    return made, int.from_bytes(part.raw[_COUNT_AT : _COUNT_AT + 4], "little")


def find_gpu(name: str | None) -> torch.device | None:
    """The GPU of this name, if this process sees it."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if name else []
    return next((device for device in devices if gpu_name(device) == name), None)


def export(tensor: Tensor) -> tuple[bytes, int, int]:
    """(handle, size of the allocation, where in it the tensor starts): how another process finds this tensor."""
    assert tensor.is_cuda, tensor.device
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _on(tensor.device):
        pointer = ctypes.c_uint64(tensor.data_ptr())
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), size.value, tensor.data_ptr() - base.value


class OpenedMemory:
    """Another process's allocation as bytes, [size]."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        if len(handle) != HANDLE_BYTES or size <= 0:
            raise DriverError(f"a handle of {len(handle)} bytes for {size} bytes of memory makes no sense")
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
    """Another process's allocation as bytes, opened once and for as long as this process lives."""
    with _lock:
        if (handle, device) not in _opened:
            _opened[handle, device] = OpenedMemory(handle, size, device)
        return _opened[handle, device].bytes


class _Memory:
    """Raw device memory, as torch takes it without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 2}


def _at(pointer: int, size: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(pointer, size), device=device)


class DeviceMemory:
    """An allocation of its own: a handle to it opens this memory and nothing beside it.

    Whole blocks of 2 MiB, since the driver puts smaller allocations together
    into one, and a handle opens all of that.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pointer, size = ctypes.c_uint64(), -(-size // _OWN_BLOCK) * _OWN_BLOCK
        with _on(device):
            _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self._pointer, self._device = pointer, device
        self.bytes = _at(pointer.value, size, device)

    def close(self) -> None:
        """Waits for the work that uses the memory."""
        with _on(self._device), synchronized(self._device):
            _call("cuMemFree_v2", self._pointer)


class Counters:
    """32-bit numbers in host memory that streams of several processes write and wait for."""

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

    def write(self, stream: int, place: int, value: int) -> None:
        """Once the stream has come here, the number at `place` is `value`."""
        self._enqueue(self._write, stream, place, value)

    def wait(self, stream: int, place: int, value: int) -> None:
        """The stream goes on once the number at `place` is `value` or has passed it."""
        self._enqueue(self._wait, stream, place, value)

    def _enqueue(self, function: Any, stream: int, place: int, value: int) -> None:
        if torch._C._cuda_getDevice() != self._device.index:  # the default stream is that of the current device
            with torch.cuda.device(self._device):
                return self._enqueue(function, stream, place, value)
        if function(stream, self._pointer + 4 * place, value & 0xFFFFFFFF, 0):
            raise DriverError("a counter could not be put into a stream: the GPU's context is broken")
        return None

    def close(self) -> None:
        with _on(self._device):
            _call("cuMemHostUnregister", ctypes.c_void_p(self._address))
        self.host.release()
