"""Whether a training job fits, before it is accepted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch
from peft import PeftConfig
from transformers import PreTrainedModel

from symbiosis.app.planning.dry_model import run_adapter_pass
from symbiosis.app.planning.processes import CPU_PASS_ROWS, PARAMETER_BYTES
from symbiosis.common.bounded_dict import evict_oldest
from symbiosis.planning.memory_check import check_fits, free_memory
from symbiosis.planning.model_size import ModelSize

_MAX_KNOWN = 256
_SAMPLED_LAYERS = 2, 4
"""A dry run of so many layers gives the rest: layers of a decoder differ little, and a long run would delay serving."""


class JobMemory:
    """Estimates for jobs of one served model. Thread-safe."""

    def __init__(self, model: PreTrainedModel, free: Callable[[torch.device], int] = free_memory) -> None:
        self._config, self._device, self._dtype, self._free = model.config, model.device, model.dtype, free
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def check(self, adapter: PeftConfig, length: int) -> None:
        """Raise `DoesNotFit` if a job with examples of `length` tokens does not fit into the memory that is free now."""
        rows = max(length, CPU_PASS_ROWS if self._device.type == "cpu" else 1)
        available = self._free(self._device)
        if self._bound(rows) <= available:  # most jobs: no dry run
            return
        parameters, activations = self._estimate(adapter, rows)
        parts = {"adapter": parameters * PARAMETER_BYTES, "activations": activations}
        what = f"a job with examples of {length} tokens"
        check_fits(what, parts, self._device, "lower max_length, so that longer examples are truncated", available)

    def _bound(self, rows: int) -> int:
        """Bytes that no training pass exceeds by much: some thirty rows of each width in float32."""
        config = self._config.get_text_config()
        widths = {name: int(getattr(config, name, 0) or 0) for name in ("hidden_size", "intermediate_size", "vocab_size")}
        layers = int(getattr(config, "num_hidden_layers", 1) or 1)
        per_layer = 32 * widths["hidden_size"] + 12 * (widths["intermediate_size"] or 4 * widths["hidden_size"])
        return 4 * rows * (layers * per_layer + 6 * widths["vocab_size"])

    def _estimate(self, adapter: PeftConfig, rows: int) -> tuple[int, int]:
        key = json.dumps(adapter.to_dict(), default=str, sort_keys=True), rows
        with self._lock:
            if key not in self._known:
                evict_oldest(self._known, _MAX_KNOWN)
                self._known[key] = self._run(adapter, rows)
            return self._known[key]

    def _run(self, adapter: PeftConfig, rows: int) -> tuple[int, int]:
        layers = int(getattr(self._config.get_text_config(), "num_hidden_layers", 0) or 0)
        few, more = _SAMPLED_LAYERS
        if layers <= more:
            return self._run_layers(None, adapter, rows)
        (low, first), (high, second) = (self._run_layers(count, adapter, rows) for count in _SAMPLED_LAYERS)
        steps = (layers - few) / (more - few)
        return round(low + steps * (high - low)), round(first + steps * (second - first))

    def _run_layers(self, layers: int | None, adapter: PeftConfig, rows: int) -> tuple[int, int]:
        config = type(self._config).from_dict(self._config.to_dict())
        text = config.get_text_config()
        if layers is not None:
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        return run_adapter_pass(ModelSize.of(config, self._dtype), adapter, rows, self._device.type)
