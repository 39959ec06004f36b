"""Block tables of sequences in device memory, which many batches read.

B = sequences, P = most blocks of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockTables:
    """Line b has the blocks of whichever sequence a batch puts there. CUDA graphs share them, whatever their sizes."""

    def __init__(self, sequences: int, max_blocks: int, block_size: int, device: torch.device | str) -> None:
        self.block_size = block_size
        self.host_BP = np.zeros((sequences, max_blocks), dtype=np.int32)
        self.device_BP: Tensor = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._lists: list[Sequence[int]] = [()] * sequences
        """The lists in the table, each with its length then: they only grow, or are replaced by other lists."""
        self._num_blocks = [0] * sequences

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]], block_size: int, device: torch.device | str) -> BlockTables:
        """Exactly as large as these need; they do not change."""
        made = cls(len(tables), max(1, *map(len, tables), 0), block_size, device)
        for b, table in enumerate(tables):
            made.host_BP[b, : len(table)] = table
        host_BP = torch.from_numpy(made.host_BP)
        made.device_BP.copy_(host_BP.pin_memory() if made.device_BP.is_cuda else host_BP, non_blocking=True)
        return made

    def __len__(self) -> int:
        return len(self._lists)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.host_BP.shape[1] * self.block_size

    def update(self, lines: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Write the blocks of sequences to their lines, in the order of the current stream. Only what has changed is copied."""
        places: list[int] = []  # in the flat table
        blocks: list[int] = []
        known, lengths, width = self._lists, self._num_blocks, self.host_BP.shape[1]
        for b, table in zip(lines, tables, strict=True):
            start, end = lengths[b], len(table)
            if table is not known[b]:
                start, known[b] = 0, table
            if start != end:
                assert end <= width, (end, width)
                places += range(b * width + start, b * width + end)
                blocks += table[start:]
                lengths[b] = end
        if blocks:
            try:
                self._change(places, blocks)
            except BaseException:  # what the device has is unknown
                self._lists[:], self._num_blocks[:] = [()] * len(known), [0] * len(known)
                raise

    def _change(self, places: list[int], blocks: list[int]) -> None:
        changes_2N = torch.from_numpy(np.array((places, blocks)))
        self.host_BP.reshape(-1)[changes_2N[0].numpy()] = changes_2N[1].numpy()
        if self.device_BP.is_cuda:
            changes_2N = changes_2N.pin_memory().to(self.device_BP.device, non_blocking=True)
        self.device_BP.view(-1).index_copy_(0, changes_2N[0], changes_2N[1].int())
