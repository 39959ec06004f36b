"""Examples of many sessions packed into one sequence of rows.

R = rows of the batch, N = rows with a label, S = sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters.parts import Ia3Part
from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.finetuning.adapters.lora_math import Dropout, Part, TrainableLora, divide_part, scale_rows
from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.examples import IGNORED, Example
from symbiosis.finetuning.packed.async_copy import copy_to_device
from symbiosis.finetuning.packed.dropout import drop

if TYPE_CHECKING:  # it needs Triton
    from symbiosis.finetuning.packed.lora_tables import LoraTables

Array: TypeAlias = npt.NDArray[np.int64]

_MIN_LENGTH, _MIN_SEQUENCES, _MIN_SESSIONS = 512, 16, 8  # of a bucket; kernels skip what is empty
_DENSE = 0.9  # of all rows have a label: selecting them would cost more than it saves


@dataclass(frozen=True, slots=True)
class PackedExample:
    """An example of a packed batch."""

    example: Example
    loss_divisor: float
    """Divides the sum of its losses."""
    dropout_key: str
    """Session seed, number of the call, number of the example. Empty: no dropout."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionSlice:
    """The examples of one session in a packed batch."""

    adapter: TrainedAdapter
    examples: tuple[PackedExample, ...]
    requires_grad: bool = True

    @property
    def rows(self) -> int:
        return sum(self.adapter.rows_of(len(each.example.ids)) for each in self.examples)


@dataclass(frozen=True, slots=True, eq=False)
class RowSpan:
    """The rows of a sequence, and the prefix keys and values before them."""

    rows: int
    prefix_L2HTD: Tensor | None = None


class BatchAdapters:
    """The adapters of a packed batch at one layer: consecutive runs of rows."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: list[Part | None] = []
        self.dropouts: list[Dropout] = []

    def scale_inputs(self, x_RI: Tensor) -> Tensor:
        """The layer's input with IA3 applied."""
        if not any(isinstance(part, Ia3Part) and part.of_input for part in self.parts):
            return x_RI
        runs = zip(self.parts, torch.split(x_RI, self.sizes), strict=True)
        return torch.cat([scale_rows(part, x) if isinstance(part, Ia3Part) and part.of_input else x for part, x in runs])

    def apply(self, x_RI: Tensor, y_RO: Tensor, layer: nn.Linear | Conv1D) -> Tensor:
        """The layer's result with LoRA and IA3 applied. `x_RI` is the layer's input."""
        if all(part is None or (isinstance(part, Ia3Part) and part.of_input) for part in self.parts):
            return y_RO
        results: list[Tensor] = []
        runs = torch.split(x_RI, self.sizes), torch.split(y_RO, self.sizes)
        for part, dropout, x, y in zip(self.parts, self.dropouts, *runs, strict=True):
            if isinstance(part, TrainableLora):
                results.append(part.apply(x, y, layer, dropout))
            else:
                results.append(scale_rows(part, y) if part is not None and not part.of_input else y)
        return torch.cat(results)


class PackedBatch:
    """The input of one forward and backward pass. Rows of one session are contiguous."""

    def __init__(
        self,
        slices: Sequence[SessionSlice],
        device: torch.device,
        *,
        dense: bool = False,
        bucketed: bool = False,
        window: int | None = None,
        kv_heads: slice | None = None,
    ) -> None:
        """`dense`: if nearly all rows have a label, the head reads all rows, and those without one are ignored.

        `bucketed`: pad the batch to a bucket size, so that batches of similar size have the same shapes. `window`: the
        attention window; sequences that fit into it are not padded beyond it. `kv_heads`: those of this shard.
        """
        self.slices = slices
        self.device = device
        self.spans: list[RowSpan] = []
        self.embeds: list[tuple[int, Tensor]] = []
        """First row and embeddings of virtual tokens."""
        ids: list[Array] = []
        positions: list[Array] = []
        label_rows: list[Array] = []
        labels: list[Array] = []
        self._rows: list[list[int]] = []
        self._head_rows: list[list[int]] = []
        start = 0
        for each in slices:
            virtual = each.adapter.virtual
            front = virtual.rows if virtual else 0
            embeds_TD = virtual.encode() if virtual and front else None
            prefix_L2HTD = virtual.keys_values_L2HTD() if virtual and not front else None
            if prefix_L2HTD is not None and kv_heads is not None:
                prefix_L2HTD = prefix_L2HTD[:, :, kv_heads]
            before = virtual.count if virtual else 0
            self._rows.append([])
            self._head_rows.append([])
            for packed in each.examples:
                tokens, targets = np.array(packed.example.ids), np.array(packed.example.labels)
                if embeds_TD is not None:
                    self.embeds.append((start, embeds_TD))
                ids += [np.zeros(front, np.int64), tokens]
                positions.append(np.arange(before - front, before + len(tokens)))
                rows = front + len(tokens)
                self.spans.append(RowSpan(rows, prefix_L2HTD))
                # A row predicts the next token; the last virtual token predicts the first.
                due = np.flatnonzero(targets != IGNORED)
                due = due[due > 0] if not front else due
                label_rows.append(start + front + due - 1)
                labels.append(targets[due])
                self._rows[-1].append(rows)
                self._head_rows[-1].append(len(due))
                start += rows
        self.longest = max(span.rows for span in self.spans)
        padding = min_sessions = 0
        if bucketed and any(span.rows != self.longest for span in self.spans):
            rounded = _next_power_of_2(self.longest, _MIN_LENGTH)
            self.longest = rounded if window is None or self.longest > window else min(rounded, window)
            padding = -start % _bucket_step(start)
            self.spans += [RowSpan(min(self.longest, padding - at)) for at in range(0, padding, self.longest)]
            self.spans += [RowSpan(0)] * (_next_power_of_2(len(self.spans), _MIN_SEQUENCES) - len(self.spans))
            min_sessions = _MIN_SESSIONS
        ids.append(np.zeros(padding, np.int64))
        positions.append(np.arange(padding) % self.longest)
        self.rows = start + padding
        self.edges_S = self._copy(np.cumsum([0, *(span.rows for span in self.spans)], dtype=np.int32))
        """First row of each sequence, and the end of the last."""
        head_rows, targets = np.concatenate(label_rows), np.concatenate(labels)
        dense = dense and len(head_rows) >= _DENSE * start
        head_padding = -len(head_rows) % _bucket_step(len(head_rows)) if bucketed and not dense else 0
        if dense:
            all_targets = np.full(self.rows, IGNORED)
            all_targets[head_rows] = targets
            head_rows, targets, head_padding = np.arange(0), all_targets, padding
            self._head_rows = self._rows
        elif head_padding:
            head_rows = np.concatenate([head_rows, np.zeros(head_padding, np.int64)])
            targets = np.concatenate([targets, np.full(head_padding, IGNORED)])
        weights = [1 / packed.loss_divisor if each.requires_grad else 0.0 for each in slices for packed in each.examples]
        weights_N = np.repeat(np.array([*weights, 0.0], np.float32), [*self.head_rows, head_padding])
        arrays = [np.concatenate(ids), np.concatenate(positions), targets, head_rows]
        self._numbers = self._copy(np.concatenate(arrays))
        self.ids_R, self.positions_R, self.labels_N, rows_N = torch.split(self._numbers, [len(array) for array in arrays])
        self.head_rows_N: Tensor | None = None if dense else rows_N
        """Rows that the head reads; None for all."""
        self.loss_weights_N = self._copy(weights_N)
        """The upstream gradient of each row's loss."""
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}
        """Attention masks of this pass."""
        self.by_lengths = False
        """Whether attention depends on the sequences' lengths by more than `edges_S`: then no CUDA graph can be reused."""
        self._adapters: dict[tuple[str, bool], BatchAdapters | None] = {}
        self.lora_tables = self._build_tables(min_sessions)

    def _copy(self, numbers: npt.NDArray[np.generic]) -> Tensor:
        return copy_to_device(torch.from_numpy(numbers), self.device)

    @property
    def head_rows(self) -> list[int]:
        """Rows of each example that the head reads."""
        return [rows for of_slice in self._head_rows for rows in of_slice]

    def _build_tables(self, min_sessions: int) -> LoraTables | None:
        """Of the sessions whose adapters the grouped kernels compute."""
        flats = [each.adapter.flat for each in self.slices if each.adapter.flat is not None]
        if not flats:
            return None
        from symbiosis.finetuning.packed.lora_tables import LoraTables

        segments = self._segments(self._rows), self._segments(self._head_rows)
        return LoraTables(flats, *segments, self.rows, self.device, min_sessions)

    @property
    def key(self) -> tuple[object, ...] | None:
        """Batches of the same key differ in `tensors` only; None if a session is not in `lora_tables`."""
        if self.lora_tables is None or any(each.adapter.flat is None for each in self.slices):
            return None
        is_even = all(span.rows == self.longest for span in self.spans)
        sizes = self.rows, len(self.labels_N), self.head_rows_N is None, len(self.spans), self.longest, is_even
        return *sizes, *self.lora_tables.key

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that differ between batches of one key."""
        assert self.lora_tables is not None
        return [self._numbers, self.loss_weights_N, self.edges_S, *self.lora_tables.tensors]

    def frame(self) -> PackedBatch:
        """A batch without sessions over the same tensors. Other batches of the key can be copied into it."""
        frame = copy.copy(self)
        frame.slices = ()
        frame.masks, frame._adapters = {}, {}  # a capture records tensors without computing them
        assert self.lora_tables is not None
        frame.lora_tables = copy.copy(self.lora_tables)
        frame.lora_tables.gradients = []
        return frame

    def _segments(self, rows_by_slice: list[list[int]]) -> list[tuple[int, int]]:
        """First row and number of rows of each session in `lora_tables`."""
        found, start = [], 0
        for each, rows in zip(self.slices, rows_by_slice, strict=True):
            if each.adapter.flat is not None:
                found.append((start, sum(rows)))
            start += sum(rows)
        return found

    def adapters_at(self, path: str, *, is_head: bool, parallel: ParallelLayer | None = None) -> BatchAdapters | None:
        """The adapters at a layer that are not in `lora_tables`; None if there are none.

        `parallel`, if this shard has a part of the layer: the adapters are divided like it.
        """
        if (path, is_head) not in self._adapters:
            rows = self._head_rows if is_head else self._rows
            self._adapters[path, is_head] = self._find_adapters(path, rows, parallel)
        return self._adapters[path, is_head]

    def _find_adapters(self, path: str, rows_by_slice: list[list[int]], parallel: ParallelLayer | None) -> BatchAdapters | None:
        parts = [None if each.adapter.flat is not None else each.adapter.parts.get(path) for each in self.slices]
        if not any(parts):
            return None
        adapters = BatchAdapters()
        for each, sizes, part in zip(self.slices, rows_by_slice, parts, strict=True):
            if part is None and adapters.parts and adapters.parts[-1] is None:
                adapters.sizes[-1] += sum(sizes)
                continue
            adapters.sizes.append(sum(sizes))
            adapters.parts.append(part if part is None or parallel is None else divide_part(part, parallel))
            keys = [packed.dropout_key for packed in each.examples]
            columns = None if parallel is None or parallel.style.divides_outputs else (parallel.width, parallel.own)
            adapters.dropouts.append(partial(drop, layer=path, keys=keys, sizes=sizes, columns=columns))
        return adapters


def _next_power_of_2(number: int, minimum: int) -> int:
    return max(minimum, 1 << max(0, number - 1).bit_length())


def _bucket_step(rows: int) -> int:
    """Batches of about so many rows are padded to a multiple of this: at most a sixteenth of the rows is padding."""
    return max(16, 1 << max(0, rows.bit_length() - 5))


def count_target_tokens(adapter: TrainedAdapter, example: Example) -> int:
    """Tokens of an example that are predicted: the first one only after virtual tokens."""
    front = adapter.virtual.rows if adapter.virtual else 0
    return sum(label != IGNORED for label in (example.labels if front else example.labels[1:]))
