"""What a layer costs, by trying: a few rows and many, before the first tenant comes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from symbiosis.split.executor.layers import BaseLayer, run
from symbiosis.types import Direction

_ROWS = {"cpu": (1, 16, 64), "cuda": (1, 64, 512, 2048)}
_LONG_S = 0.1  # more rows are not tried where so many took so long


@torch.no_grad()
def time_layer(layer: BaseLayer, direction: Direction) -> Iterator[tuple[int, float]]:
    """(rows, seconds) of some runs, the second of two each."""
    for count in _ROWS.get(layer.device.type, (1, 64)):
        rows = tuple(
            torch.zeros(count, width or 1, dtype=layer.dtype, device=layer.device) for width in layer.widths(direction)
        )
        for _ in range(2):
            _wait(layer.device)
            started = time.perf_counter()
            run((layer,), direction, rows)
            _wait(layer.device)
            seconds = time.perf_counter() - started
        yield count, seconds
        if seconds > _LONG_S:
            return


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
