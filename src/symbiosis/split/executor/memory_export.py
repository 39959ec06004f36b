"""The GPU memory that tenants on the executor's host may map: base layers for direct mode, the client part in any mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from symbiosis.errors import DirectRefused
from symbiosis.gpu import driver
from symbiosis.split.executor.layers import BaseLayer


def export_tensors(layers: Iterable[BaseLayer], client: Mapping[str, Tensor]) -> dict[str, Any]:
    """Handles of all allocations, and the place of each tensor in them, for another process. Raises `DirectRefused`."""
    allocations: dict[bytes, tuple[int, int]] = {}  # handle: (index, bytes)

    def locate(tensor: Tensor) -> list[Any]:
        if not tensor.is_contiguous():
            raise DirectRefused("a weight of this model is not contiguous: it cannot be mapped; connect with mode='executor'")
        handle, size, offset = driver.export(tensor)
        index, _ = allocations.setdefault(handle, (len(allocations), size))
        return [index, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    base = [[layer.spec.handle, name, *locate(weight)] for layer in layers for name, weight in layer.weights.items()]
    rest = [[name, *locate(tensor)] for name, tensor in client.items()]
    handles = [[handle.hex(), size] for handle, (_, size) in allocations.items()]
    return {"allocations": handles, "base": base, "client": rest}
