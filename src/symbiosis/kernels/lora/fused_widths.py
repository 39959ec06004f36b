"""Output widths of layers that read the same rows (q, k and v), whose outputs lie next to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FusedWidths:
    """Where in y the outputs of each member begin."""

    def __init__(self, widths: Sequence[int], device: torch.device | str) -> None:
        self.widths, self.device = tuple(widths), torch.device(device)
        self.is_aligned = all(width % 16 == 0 for width in widths)
        self._blocks: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.widths)

    def blocks(self, size: int) -> Tensor:
        """All outputs in blocks of `size` columns: (member, first column in y, first of its own columns, columns) of each."""
        if size not in self._blocks:
            found, offset = [], 0
            for member, width in enumerate(self.widths):
                found += [(member, offset + own, own, min(size, width - own)) for own in range(0, width, size)]
                offset += width
            self._blocks[size] = torch.tensor(found, dtype=torch.int32, device=self.device)
        return self._blocks[size]
