"""The cost model of model blocks: time by rows and context, bytes of weights, of keys and values, and of a row's output.

seconds of a batch = fixed + row × decode rows + context × their context tokens + prefill × prompt tokens + attention × (prompt
tokens × tokens before each). Consecutive blocks add up, so a segment of a model is a block too. `symbiosis zoo profile` writes
the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from symbiosis.cluster.step_cost import PROFILES as ENGINE_PROFILES
from symbiosis.errors import BadProfile

_COUNTS = ("weight_bytes", "kv_bytes", "row_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """A block, or consecutive ones, on one kind of device."""

    fixed_s: float = 0.0
    """Seconds of a batch, whatever its rows: reading the weights, launching kernels."""
    row_s: float = 0.0
    """Per decode row."""
    context_s: float = 0.0
    """Per token in the KV cache of a decode row."""
    prefill_s: float = 0.0
    """Per prompt token."""
    attention_s: float = 0.0
    """Per prompt token and token before it."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    """Keys and values of one token."""
    row_bytes: int = 0
    """Output of one row."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value: Any = getattr(self, each.name)
            is_number = isinstance(value, int) or (isinstance(value, float) and each.name not in _COUNTS)
            if isinstance(value, bool) or not is_number or not math.isfinite(value) or value < 0:
                raise BadProfile(f"{each.name} of a block is {value!r:.40}, expected a number that is not negative")

    def __add__(self, other: BlockCost) -> BlockCost:
        """Both, one after the other."""
        return BlockCost(
            fixed_s=self.fixed_s + other.fixed_s,
            row_s=self.row_s + other.row_s,
            context_s=self.context_s + other.context_s,
            prefill_s=self.prefill_s + other.prefill_s,
            attention_s=self.attention_s + other.attention_s,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            row_bytes=other.row_bytes,
        )

    def batch_s(self, rows: int = 0, context: int = 0, prefill: int = 0, attended: float = 0.0) -> float:
        """Seconds of one batch. `attended`: sum over the prompt tokens of the tokens before each."""
        work = self.row_s * rows + self.context_s * context + self.prefill_s * prefill + self.attention_s * attended
        return self.fixed_s + work

    def prompt_s(self, tokens: int) -> float:
        """Seconds that a prompt adds to the batch that it is in."""
        return self.prefill_s * tokens + self.attention_s * tokens * tokens / 2


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The kinds of blocks of one model."""

    layers: int
    embedding: BlockCost
    attention: BlockCost
    ffn: BlockCost
    head: BlockCost

    def __post_init__(self) -> None:
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or not 0 < self.layers <= 10_000:
            raise BadProfile(f"layers is {self.layers!r:.40}, expected a whole number above zero")

    def segment(self, start: int, stop: int) -> BlockCost:
        """Layers `start` to `stop` as one block; the embedding goes with the first, the head with the last."""
        layer, count = self.attention + self.ffn, stop - start
        found = BlockCost(
            fixed_s=layer.fixed_s * count,
            row_s=layer.row_s * count,
            context_s=layer.context_s * count,
            prefill_s=layer.prefill_s * count,
            attention_s=layer.attention_s * count,
            weight_bytes=layer.weight_bytes * count,
            kv_bytes=layer.kv_bytes * count,
            row_bytes=layer.row_bytes,
        )
        if start == 0:
            found = self.embedding + found
        return found + self.head if stop == self.layers else found

    @property
    def whole(self) -> BlockCost:
        return self.segment(0, self.layers)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """Models on one kind of device, the smallest first."""

    models: dict[str, ModelCost]
    load_bytes_s: float
    """Bytes of weights that are loaded onto the device in a second."""
    adapter_share: float = 0.01
    """Of the fixed time of a batch, for each further adapter in it."""
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in (("load_bytes_s", self.load_bytes_s), ("adapter_share", self.adapter_share)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise BadProfile(f"{name} is {value!r:.40}, expected a number that is not negative")
        if not self.models or self.load_bytes_s == 0:
            raise BadProfile("a profile of blocks needs a model, and load_bytes_s above zero")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_block_profile(name: str) -> BlockProfile:
    """A profile by name (`BLOCK_PROFILES`), or from a file of `symbiosis zoo profile`. Raises `BadProfile`."""
    if name in BLOCK_PROFILES:
        return BLOCK_PROFILES[name]
    try:
        content = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        expected = f"expected {', '.join(BLOCK_PROFILES)} or a file of `symbiosis zoo profile`"
        raise BadProfile(f"cannot read the profile {name!r:.80}: {reason}; {expected}") from None
    try:
        found = content["block_profile"]
        models = {
            str(model): ModelCost(
                cost["layers"], *(BlockCost(**cost[kind]) for kind in ("embedding", "attention", "ffn", "head"))
            )
            for model, cost in found["models"].items()
        }
        models = dict(sorted(models.items(), key=lambda each: each[1].whole.weight_bytes))
        return BlockProfile(models, found["load_bytes_s"], found["adapter_share"], str(found["source"])[:1000])
    except (TypeError, KeyError, AttributeError):
        raise BadProfile(f"{name!r:.80} is no profile of blocks: expected a file of `symbiosis zoo profile`") from None


def _scaled_model(layers: int, width: int, ffn_width: int, vocabulary: int, bandwidth: float, compute: float) -> ModelCost:
    """A model in bfloat16 from the measured 7B: fixed and context time by bytes read, rows and prompts by parameters."""
    engine = ENGINE_PROFILES["h200-7b"]
    measured = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32_000 * 4096  # parameters that a step of the 7B reads

    def part(parameters: int, *, is_read: bool = True, has_kv: bool = False) -> BlockCost:
        share = parameters / measured if is_read else 0.0
        attended = width / 4096 / 32 if has_kv else 0.0
        return BlockCost(
            fixed_s=engine.fixed_s * bandwidth * share,
            row_s=engine.row_s * compute * share,
            context_s=engine.context_s * bandwidth * attended,
            prefill_s=engine.prefill_s * compute * share,
            attention_s=engine.attention_s * compute * attended,
            weight_bytes=2 * parameters,
            kv_bytes=4 * width if has_kv else 0,
            row_bytes=2 * width,
        )

    embedding = part(vocabulary * width, is_read=False)
    attention = part(4 * width * width, has_kv=True)
    return ModelCost(layers, embedding, attention, part(3 * width * ffn_width), part(vocabulary * width))


def _scaled_models(bandwidth: float, compute: float) -> dict[str, ModelCost]:
    return {
        "6b": _scaled_model(28, 4096, 11008, 64_000, bandwidth, compute),
        "7b": _scaled_model(32, 4096, 11008, 32_000, bandwidth, compute),
        "13b": _scaled_model(40, 5120, 13824, 32_000, bandwidth, compute),
    }


BLOCK_PROFILES = {
    "a100": BlockProfile(
        _scaled_models(bandwidth=4.8 / 2.0, compute=989 / 312),
        load_bytes_s=12.5e9,
        source="h200-7b scaled by memory bandwidth (2.0 of 4.8 TB/s), operations (312 of 989 TFLOP/s) and parameters: assumed",
    ),
    "h200": BlockProfile(
        _scaled_models(bandwidth=1.0, compute=1.0),
        load_bytes_s=25e9,
        source="h200-7b, by parts and sizes in proportion to parameters: assumed",
    ),
}
"""Named profiles. The first is the default."""
