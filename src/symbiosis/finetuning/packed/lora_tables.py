"""Plain LoRA of all sessions of a pass as tables for the kernels.

J = sessions in the tables, L = layers that one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.finetuning.packed.flat_lora import FlatParameters
from symbiosis.kernels.lora.grouped import COLUMNS, GroupedRows, grouped_lora
from symbiosis.kernels.tiles import Segment


class LoraTables:
    """Made before a pass. Its backward writes the gradients to `gradients`, one tensor for each session."""

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        rows: Sequence[tuple[int, int]],
        head_rows: Sequence[tuple[int, int]],
        most: int,
        device: torch.device,
        least: int = 1,
    ) -> None:
        """`rows`: the first of each session, and how many; `head_rows` the same, of those that the head sees; `most` of all.

        With room for `least` sessions.
        """
        self.gradients = [torch.zeros_like(flat.values_N) for flat in flats]
        self.lines = {path: line for line, path in enumerate(dict.fromkeys(path for flat in flats for path in flat.paths))}
        slots = triton.next_power_of_2(max(least, len(flats)))
        table = torch.zeros(len(self.lines), slots, COLUMNS, dtype=torch.int64)
        scales = torch.zeros(len(self.lines), slots)
        for slot, (flat, gradients_N) in enumerate(zip(flats, self.gradients, strict=True)):
            lines = slice(None)
            if flat.paths != tuple(self.lines):
                lines = torch.tensor([self.lines[path] for path in flat.paths])  # type: ignore[assignment]
            table[lines, slot, :3] = flat.weights_P3
            table[lines, slot, 3:] = flat.offsets_P2 + gradients_N.data_ptr()
            scales[lines, slot] = flat.scales_P
        self._table_LJ, self._scales_LJ = (_to(device, each) for each in (table, scales))
        nobody = [(0, 0)] * (slots - len(flats))
        self._rows, self._head_rows = (
            GroupedRows.of(
                [Segment(slot, start, count) for slot, (start, count) in enumerate([*places, *nobody])],
                max(flat.ranks for flat in flats),
                device,
                most,
            )
            for places in (rows, head_rows)
        )
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Autograd goes back to whatever depends on it."""

    @property
    def key(self) -> tuple[object, ...]:
        """Passes of the same key differ in `tensors` only."""
        return (*self.lines, *self._table_LJ.shape, self._rows.ranks, self._rows.tiles.capacity, self._head_rows.tiles.capacity)

    @property
    def tensors(self) -> list[Tensor]:
        """All that changes from pass to pass."""
        return [self._table_LJ, self._scales_LJ, *self._rows.tensors, *self._head_rows.tensors]

    def __contains__(self, path: str) -> bool:
        return path in self.lines

    def changed(self, path: str, layer: nn.Linear | Conv1D, x_RI: Tensor, *, of_head: bool) -> Tensor:
        """What a layer gives, with the changes of all sessions."""
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        line = self.lines[path]
        rows = self._head_rows if of_head else self._rows
        return grouped_lora(x_RI, weight_OI, layer.bias, self._table_LJ[line], self._scales_LJ[line], rows, self.anchor)


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
