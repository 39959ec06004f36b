"""Plain LoRA of all sessions of a pass as tables for the kernels.

J = sessions in the tables, L = layers that one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.kernels.grouped import COLUMNS, Rows, grouped
from symbiosis.kernels.tiles import Segment
from symbiosis.training.flat import Flat


class Grouped:
    """Made before a pass. Its backward writes the gradients to `gradients`, one tensor for each session."""

    def __init__(
        self, flats: Sequence[Flat], rows: Sequence[tuple[int, int]], head_rows: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        """`rows`: the first of each session, and how many; `head_rows` the same, of those that the head sees."""
        self.gradients = [torch.zeros_like(flat.values_N) for flat in flats]
        self._device = device
        self._places = {False: rows, True: head_rows}
        self._ranks = max(flat.ranks for flat in flats)
        self._lines = {path: line for line, path in enumerate(dict.fromkeys(path for flat in flats for path in flat.paths))}
        table = torch.zeros(len(self._lines), len(flats), COLUMNS, dtype=torch.int64)
        scales = torch.zeros(len(self._lines), len(flats))
        for slot, (flat, gradients_N) in enumerate(zip(flats, self.gradients, strict=True)):
            lines = slice(None)
            if flat.paths != tuple(self._lines):
                lines = torch.tensor([self._lines[path] for path in flat.paths])  # type: ignore[assignment]
            table[lines, slot, :3] = flat.weights_P3
            table[lines, slot, 3:] = flat.offsets_P2 + gradients_N.data_ptr()
            scales[lines, slot] = flat.scales_P
        self._table_LJ = table.to(device, non_blocking=True)
        self._scales_LJ = scales.to(device, non_blocking=True)
        self._rows: dict[bool, Rows] = {}
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Autograd goes back to whatever depends on it."""

    def __contains__(self, path: str) -> bool:
        return path in self._lines

    def changed(self, path: str, layer: nn.Linear | Conv1D, x_RI: Tensor, *, of_head: bool) -> Tensor:
        """What a layer gives, with the changes of all sessions."""
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        line = self._lines[path]
        rows = self._rows_of(of_head)
        return grouped(x_RI, weight_OI, layer.bias, self._table_LJ[line], self._scales_LJ[line], rows, self.anchor)

    def _rows_of(self, of_head: bool) -> Rows:
        if of_head not in self._rows:
            segments = [Segment(slot, start, count) for slot, (start, count) in enumerate(self._places[of_head])]
            self._rows[of_head] = Rows.of(segments, self._ranks, self._device)
        return self._rows[of_head]
