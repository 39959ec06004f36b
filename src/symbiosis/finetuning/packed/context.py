"""The pass context of a packed model: layers and attention find their packed batch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from symbiosis.finetuning.packed.batch import PackedBatch


class PassContext:
    """One per packed model. One pass at a time."""

    batch: PackedBatch
    """Of the running pass; unset between passes."""

    @contextmanager
    def running(self, batch: PackedBatch) -> Iterator[None]:
        assert not hasattr(self, "batch"), "a pass is running already"
        self.batch = batch
        try:
            yield
        finally:
            del self.batch
