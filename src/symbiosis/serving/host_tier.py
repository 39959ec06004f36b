"""The host tier of the KV cache: host blocks, their memory, and whether they pay.

A block is copied to host memory and back if that takes less time than computing its tokens again. Copies are measured once,
when the engine starts; computing is measured by the prefill steps that run.
"""

from __future__ import annotations

from collections.abc import Callable

from symbiosis.common.cost_model import CostModel
from symbiosis.serving.model.host_kv import HostKV
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.block_manager import BlockManager

_PREFILL = "prefill"
_MIN_ROWS = 32  # a smaller step measures the reading of the weights


class HostTier:
    """Used by the engine's thread."""

    def __init__(self, block_manager: BlockManager, kv_cache: PagedKVCache) -> None:
        """Raises `OutOfHostMemory`."""
        self._block_manager, self._costs = block_manager, CostModel()
        self.memory = HostKV(block_manager.host.num_blocks, kv_cache.by_block) if block_manager.host.num_blocks else None
        self.copy_s = self.memory.measure() if self.memory is not None else 0.0
        """Seconds to store and restore one block."""

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def flush(self, copy: Callable[[], None] = lambda: None) -> None:
        """Make the pending transfers, and between them `copy`. Must precede every other write to the KV cache.

        Stores come first: copies and restores overwrite what they read. Restores come last: they overwrite what copies read.
        If they fail, the content of cached blocks is unknown, and all are forgotten.
        """
        if self.memory is None:
            copy()
            return
        transfers = self._block_manager.host.take_transfers()
        try:
            self.memory.store(transfers.stores)
            copy()
            self.memory.restore(transfers.restores)
        except BaseException:
            self._block_manager.reset_cache()
            raise

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step, and decide whether copies pay."""
        if self.memory is None or batch.num_rows < _MIN_ROWS or 2 * sum(_prefill_rows(batch)) < batch.num_rows:
            return
        self._costs.observe(_PREFILL, batch.num_rows, seconds)
        compute_s = (self._costs.seconds_per_row(_PREFILL) or 0.0) * self._block_manager.block_size
        self._block_manager.host.is_worthwhile = self.copy_s < compute_s


def _prefill_rows(batch: Batch) -> list[int]:
    return [chunk.count for chunk in batch.chunks if chunk.count > 1]
