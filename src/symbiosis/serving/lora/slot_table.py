"""Slot table: where kernels find the LoRA weights of every resident adapter.

An entry is (address of A [r, I], address of B [O, r], r, address of the DoRA `mag_norm_scale` [O] or 0). All tensors are
contiguous, and B includes the scaling. r = 0: the adapter does not change that layer. Entries are written and cleared
between batches on the stream that computes, so no batch reads a partial entry.

S = slots, M = layers in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symbiosis.serving.lora.lora_weights import EngineAdapter


class SlotTable:
    """Assigns slots to adapters and holds their entries. For the stepping thread, except `build_entries`."""

    def __init__(self, slots: int, layers: Sequence[str], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.table_SM4 = torch.zeros(slots, len(self.layers), 4, dtype=torch.int64, device=device)
        self._columns = {path: column for column, path in enumerate(self.layers)}
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[str, int] = {}
        self.max_rank = 16
        """The largest rank seen so far, rounded up to a power of two: kernels are compiled for it."""

    @property
    def device(self) -> torch.device:
        return self.table_SM4.device

    @property
    def num_free(self) -> int:
        return len(self._free)

    def columns_of(self, *paths: str) -> Tensor:
        """The view [S, len(paths), 4] of layers that are adjacent in the table."""
        first = self._columns[paths[0]]
        if self.layers[first : first + len(paths)] != paths:
            raise ValueError(f"{', '.join(paths)} are not adjacent in the slot table")
        return self.table_SM4[:, first : first + len(paths)]

    def slot_of(self, adapter: EngineAdapter) -> int:
        return self._slots[adapter.hash]

    def build_entries(self, adapter: EngineAdapter) -> Tensor:
        """An adapter's entries, [M, 4], in host memory. Thread-safe."""
        entries = [(0, 0, 0, 0)] * len(self.layers)
        for path in adapter.parts:
            lora = adapter.table_lora(path)
            if lora is not None and path in self._columns:
                mag_norm_scale = 0 if lora.mag_norm_scale_O is None else lora.mag_norm_scale_O.data_ptr()
                entries[self._columns[path]] = (lora.a_rI.data_ptr(), lora.b_Or.data_ptr(), lora.a_rI.shape[0], mag_norm_scale)
        entries_M4 = torch.tensor(entries, dtype=torch.int64).view(len(self.layers), 4)
        return entries_M4.pin_memory() if self.table_SM4.is_cuda else entries_M4

    def assign(self, hash: str, entries_M4: Tensor) -> None:
        """Write an adapter's entries to a free slot; one must exist."""
        slot = self._slots[hash] = self._free.pop()
        while self.max_rank < int(entries_M4[:, 2].max()):
            self.max_rank *= 2
        self.table_SM4[slot].copy_(entries_M4, non_blocking=True)

    def clear(self, hash: str) -> None:
        """Zero an adapter's entries and free its slot."""
        slot = self._slots.pop(hash)
        self.table_SM4[slot].zero_()
        self._free.append(slot)

    def check_integrity(self, resident: set[str]) -> None:
        """Asserts that exactly these adapters have slots, each its own."""
        assert set(self._slots) == resident
        assert sorted([*self._slots.values(), *self._free]) == list(range(len(self.table_SM4)))
