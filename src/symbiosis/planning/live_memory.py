"""Memory of a computation, from a dry run: tensors have shapes, dtypes and devices, but no values.

Operations of the model's own code run on torch's fake tensors. The tracker counts each storage from the operation that
creates it to the moment it is freed. So the peak follows from what autograd keeps, for any architecture, and a GPU's memory
can be computed on a machine without one. Scratch memory inside of kernels is not seen, except the copy of a transposed
weight that products on ARM make.
"""

from __future__ import annotations

import platform
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_running = threading.Lock()
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Position of the second factor."""
_FEW_ROWS = 16
_GRANULARITY = {"cpu": 64, "cuda": 512}
"""To which torch's allocators round up."""


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive, and their highest number since `reset_peak`."""

    def __init__(self, *, granularity: int = 1, copies_weights: bool = False) -> None:
        """`granularity`: each storage is rounded up to it, as an allocator does. `copies_weights`: by products, as on ARM."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._granularity, self._copies_weights = granularity, copies_weights
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:  # code asks whether its own weights are unchanged: they are
            return args[0].shape == args[1].shape
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # whether a mask is full
        result = func(*args, **(kwargs or {}))
        if self._copies_weights and func in _PRODUCTS:
            self.peak = max(self.peak, self.live + _copied_weight(args[_PRODUCTS[func]], args[_PRODUCTS[func] - 1]))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed; once, however many tensors share it."""
        if tensor.device.type == "meta":
            return  # weights that another process holds
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self._granularity) * self._granularity
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def reset_peak(self) -> None:
        self.peak = self.live


def _copied_weight(weight: Tensor, rows: Tensor) -> int:
    """Bytes that a product of many rows copies of a transposed weight in float32, on an ARM CPU."""
    is_copied = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.stride(0) == 1
    return weight.nbytes if is_copied and rows.shape[0] > _FEW_ROWS else 0


@contextmanager
def dry_run(kind: str = "cpu") -> Iterator[LiveMemory]:
    """Run what is inside on tensors without values. Their memory is counted by what this yields. One at a time.

    `kind`: of device, cpu or cuda. Tensors claim to be on the CPU in both cases: a torch without CUDA plans for GPUs too.
    """
    # Code that compares addresses reads that of a tensor without values, which is 0.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    on_cpu = kind == "cpu"
    memory = LiveMemory(granularity=_GRANULARITY[kind], copies_weights=on_cpu and _IS_ARM)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _running, _movable_modules(), torch.random.fork_rng(devices=[]), mode, memory:
        yield memory


@contextmanager
def _movable_modules() -> Iterator[None]:
    """Let `nn.Module.to` move modules of fake tensors: torch refuses to swap a tensor with weak references, which these have.

    Other tensors, of other threads too, are swapped as before.
    """
    original: Callable[[Any, Any], None] = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        if not isinstance(one, FakeTensor):
            original(one, other)
            return
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        torch._C._swap_tensor_impl(one, other)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original
