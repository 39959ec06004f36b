"""Which memory a tenant on the executor's GPU may map: base layers for direct mode, the client part in any mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from symbiosis.errors import DirectRefused
from symbiosis.gpu import driver
from symbiosis.split.executor.layers import BaseLayer


def describe(layers: Iterable[BaseLayer], client: Mapping[str, Tensor]) -> dict[str, Any]:
    """Where each tensor lies, in words another process understands."""
    allocations: dict[bytes, tuple[int, int]] = {}  # handle: (number, bytes)

    def place(tensor: Tensor) -> list[Any]:
        if not tensor.is_contiguous():
            raise DirectRefused("a weight of this model does not lie in one piece: it can be called, not mapped")
        handle, size, offset = driver.export(tensor)
        number, _ = allocations.setdefault(handle, (len(allocations), size))
        return [number, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    base = [[layer.spec.handle, name, *place(weight)] for layer in layers for name, weight in layer.weights.items()]
    rest = [[name, *place(tensor)] for name, tensor in client.items()]
    return {
        "allocations": [[handle.hex(), size] for handle, (_, size) in allocations.items()],
        "base": base,
        "client": rest,
    }
