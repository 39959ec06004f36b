"""Runs packed passes and isolates their faults: only the session at fault fails."""

from __future__ import annotations

from collections.abc import Callable

import torch

from symbiosis.errors import PassFailed
from symbiosis.finetuning.packed.batch import SessionSlice
from symbiosis.finetuning.packed.model import PackedModel, PassResult


class PassRunner:
    def __init__(self, packed: PackedModel, on_launched: Callable[[], None]) -> None:
        """`on_launched` runs after each launch, while the device computes."""
        self._packed, self._on_launched = packed, on_launched

    @property
    def is_new(self) -> bool:
        """Whether the last pass was of a new shape: the next pass of that shape is faster."""
        return self._packed.is_new

    def run(self, slices: list[SessionSlice], *, trimmed: bool = False) -> list[PassResult | Exception]:
        """The outcome of each slice. If the pass fails, each slice runs alone.

        Raises `torch.OutOfMemoryError` if a smaller pass may fit, `PassFailed` if the device is lost.
        """
        failed: Exception | None = None
        try:
            launched = self._packed.launch(slices)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything
            failed = error
        self._on_launched()
        if failed is None:
            try:
                return [*launched.results()]
            except Exception as error:  # noqa: BLE001 - as above
                failed = error
        if isinstance(failed, torch.OutOfMemoryError):
            failed = failed.with_traceback(None)
            if trimmed or sum(len(each.examples) for each in slices) > 1:
                raise failed
            self.trim()  # a single example: the memory of cached graphs may be missing
            try:
                return self.run(slices, trimmed=True)
            except torch.OutOfMemoryError as error:
                return [error.with_traceback(None)]
        self.check_device(failed)
        if len(slices) == 1:
            return [failed]
        return [self.run([each])[0] for each in slices]

    def trim(self) -> None:
        """Release the graphs and the memory kept for later passes."""
        self._packed.trim()

    def check_device(self, error: Exception) -> None:
        """Raises `PassFailed` if the device computes nothing any more: then `error` is no session's fault."""
        if not self._packed.is_sound():
            raise PassFailed(f"the device fails, hosted training has stopped: {type(error).__name__}: {error}") from None
