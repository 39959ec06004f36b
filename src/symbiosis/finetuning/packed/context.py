"""The pass that runs: what layers and attention of the packed model look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from symbiosis.finetuning.packed.batch import PackedBatch


class PassContext:
    """One for each packed model. One pass at a time."""

    def __init__(self) -> None:
        self._pack: PackedBatch | None = None

    @property
    def pack(self) -> PackedBatch:
        assert self._pack is not None, "no pass is running"
        return self._pack

    @contextmanager
    def running(self, pack: PackedBatch) -> Iterator[None]:
        assert self._pack is None, "a pass is running already"
        self._pack = pack
        try:
            yield
        finally:
            self._pack = None
