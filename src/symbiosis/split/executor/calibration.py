"""Times layers with few and with many rows before the first call, for the cost model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch

from symbiosis.common.cost_model import CostModel
from symbiosis.split.executor.call_validation import CallValidator
from symbiosis.split.executor.layers import BaseLayer, run
from symbiosis.types import Direction, LayerKind

_ROWS = {"cpu": (1, 16, 64), "cuda": (1, 64, 512, 2048)}
_MAX_ROW_BYTES = 64 << 20  # of a run's rows and results: 2,048 rows of a head with a large vocabulary take 0.5 GB
_MAX_RUN_S = 0.1  # a slower run is the last one of its layer
_log = logging.getLogger("symbiosis")


def calibrate(layers: Sequence[BaseLayer], validator: CallValidator, costs: CostModel) -> None:
    """Time one layer of every shape, so that the policy has estimates from the first call on."""
    for layer in {(layer.spec.kind, layer.spec.in_width, layer.spec.out_width): layer for layer in layers}.values():
        if layer.spec.kind in (LayerKind.EXPERTS, LayerKind.EMBEDDING):
            continue  # their cost depends on the values of their rows
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            if layer.spec.kind is LayerKind.NORM and direction is Direction.BACKWARD:
                continue
            shape = validator.single_key(layer.spec, direction).shape
            try:
                for rows, seconds in _time_layer(layer, direction):
                    costs.observe(shape, rows, seconds)
            except Exception:  # noqa: BLE001 - other rows may work, and the layer may never be called
                _log.warning("%s could not be timed %s", layer.spec.paths[0], direction.name.lower(), exc_info=True)
    if layers[0].device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def _time_layer(layer: BaseLayer, direction: Direction) -> Iterator[tuple[int, float]]:
    """Pairs of (rows, seconds). The second of two runs counts."""
    widths = layer.input_widths(direction)
    synchronize = torch.cuda.synchronize if layer.device.type == "cuda" else lambda device: None
    most = max(1, _MAX_ROW_BYTES // ((layer.spec.in_width + layer.spec.out_width) * layer.dtype.itemsize))
    for count in sorted({min(count, most) for count in _ROWS.get(layer.device.type, (1, 64))}):
        rows = tuple(torch.zeros(count, width or 1, dtype=layer.dtype, device=layer.device) for width in widths)
        for _ in range(2):
            synchronize(layer.device)
            started = time.perf_counter()
            run((layer,), direction, rows)
            synchronize(layer.device)
            seconds = time.perf_counter() - started
        yield count, seconds
        if seconds > _MAX_RUN_S:
            return
