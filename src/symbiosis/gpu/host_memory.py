"""Host memory for a KV cache: huge pages, and page-locked where a GPU copies to and from it."""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.common.available_memory import available_memory
from symbiosis.errors import OutOfHostMemory

_log = logging.getLogger("symbiosis")
_SPARE_BYTES = 1 << 30  # left to everything else on the host, where there is that much


class HostMemory:
    """A zeroed tensor in memory of its own.

    torch's page-locked allocator rounds sizes up to a power of two, which would waste up to half of a large cache. So the
    memory is mapped here and registered with CUDA. Views of the tensor stay valid when this object is gone.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool, advice: str) -> None:
        """Raises `OutOfHostMemory`, with this advice."""
        size = math.prod(shape) * dtype.itemsize
        check_host_memory(size, advice)
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:size].view(dtype).view(*shape)
        if pinned:
            self._register(size)

    def _register(self, size: int) -> None:
        address = self.tensor.data_ptr()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if (status := int(cudart.cudaHostRegister(address, size, 0))) == 0:
            weakref.finalize(self, cudart.cudaHostUnregister, address)
        else:
            _log.warning("%d bytes of host memory cannot be page-locked (CUDA error %d): copies are slower", size, status)


def check_host_memory(size: int, advice: str) -> None:
    """Raise `OutOfHostMemory` unless this many bytes are available."""
    available = available_memory()
    if size > max(available - _SPARE_BYTES, available // 2):
        raise OutOfHostMemory(
            f"the KV cache needs {size / 2**30:.1f} GiB of host memory, {available / 2**30:.1f} GiB are available: {advice}"
        )
