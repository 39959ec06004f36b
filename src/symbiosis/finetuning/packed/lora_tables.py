"""Plain LoRA of all sessions of a packed batch as tables for the grouped_lora kernels.

J = sessions in the tables, L = layers that one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.finetuning.adapters.flat_parameters import FlatParameters
from symbiosis.finetuning.packed.async_copy import copy_to_device
from symbiosis.kernels.lora.grouped import COLUMNS, GroupedRows, grouped_lora
from symbiosis.kernels.tiles import Segment


class LoraTables:
    """Built before a pass. The backward pass writes to `gradients`, one tensor per session."""

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        rows: Sequence[tuple[int, int]],
        head_rows: Sequence[tuple[int, int]],
        max_rows: int,
        device: torch.device,
        min_sessions: int = 1,
    ) -> None:
        """`rows`: first row and number of rows of each session; `head_rows`: the same for the rows that the head reads.

        The tables have space for `min_sessions` sessions and `max_rows` rows in all.
        """
        self.gradients = [torch.zeros_like(flat.values_N) for flat in flats]
        self._layers = {path: at for at, path in enumerate(dict.fromkeys(path for flat in flats for path in flat.paths))}
        slots = triton.next_power_of_2(max(min_sessions, len(flats)))
        table = torch.zeros(len(self._layers), slots, COLUMNS, dtype=torch.int64)
        scales = torch.zeros(len(self._layers), slots)
        for slot, (flat, gradients_N) in enumerate(zip(flats, self.gradients, strict=True)):
            layers = slice(None)
            if flat.paths != tuple(self._layers):
                layers = torch.tensor([self._layers[path] for path in flat.paths])  # type: ignore[assignment]
            table[layers, slot, :3] = flat.weights_P3
            table[layers, slot, 3:] = flat.offsets_P2 + gradients_N.data_ptr()
            scales[layers, slot] = flat.scales_P
        self._table_LJ, self._scales_LJ = (copy_to_device(each, device) for each in (table, scales))
        empty = [(0, 0)] * (slots - len(flats))
        self._rows, self._head_rows = (
            GroupedRows.of(
                [Segment(slot, start, count) for slot, (start, count) in enumerate([*segments, *empty])],
                max(flat.max_rank for flat in flats),
                device,
                max_rows,
            )
            for segments in (rows, head_rows)
        )
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Results depend on it, so that autograd runs the kernels' backward pass."""

    @property
    def key(self) -> tuple[object, ...]:
        """Batches of the same key differ in `tensors` only."""
        sizes = self._rows.ranks, self._rows.tiles.capacity, self._head_rows.tiles.capacity
        return (*self._layers, *self._table_LJ.shape, *sizes)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that differ between batches."""
        return [self._table_LJ, self._scales_LJ, *self._rows.tensors, *self._head_rows.tensors]

    def __contains__(self, path: str) -> bool:
        return path in self._layers

    def project(self, path: str, layer: nn.Linear | Conv1D, x_RI: Tensor, *, is_head: bool) -> Tensor:
        """The layer's result with the deltas of all sessions."""
        weight_OI = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        at = self._layers[path]
        rows = self._head_rows if is_head else self._rows
        return grouped_lora(x_RI, weight_OI, layer.bias, self._table_LJ[at], self._scales_LJ[at], rows, self.anchor)
