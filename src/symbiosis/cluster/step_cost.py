"""Time of an engine's step as a function of its batch, as fitted by `symbiosis profile`.

seconds = fixed + row × decode rows + context × their context tokens + prefill × prompt tokens + attention × (prompt tokens ×
tokens before them). A batch is a mixture of decode rows and prompt chunks, so the terms add up.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from symbiosis.errors import BadProfile

_LIMITS = ("max_rows", "max_chunk", "max_running", "kv_tokens", "slots")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One kind of engine: the terms of its step time, and its limits."""

    fixed_s: float
    """Seconds of a step, whatever its batch: reading the weights, launching kernels."""
    row_s: float
    """Per decode row."""
    context_s: float
    """Per token in the KV cache of a decode row."""
    prefill_s: float
    """Per prompt token."""
    attention_s: float
    """Per prompt token and token before it."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_rows: int = 2048
    """Most tokens in one batch."""
    max_chunk: int = 512
    """Most prompt tokens of one sequence in one batch."""
    max_running: int = 512
    """Most running sequences."""
    slots: int = 256
    """Most adapters on the device."""
    adapter_load_s: float = 0.1
    """Seconds from the store to the device."""
    start_s: float = 40.0
    """Seconds from the request for an engine until it serves: process, weights, CUDA graphs."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "source":
                if not isinstance(value, str):
                    raise BadProfile(f"source is {value!r:.40}, expected a text")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise BadProfile(f"{each.name} is {value!r:.40}, expected a number that is not negative")
            elif each.name in _LIMITS and (not isinstance(value, int) or value < 1):
                raise BadProfile(f"{each.name} is {value!r:.40}, expected a whole number above zero")
        if self.fixed_s + self.prefill_s <= 0:
            raise BadProfile("a step takes no time, expected fixed_s or prefill_s above zero")

    def step_s(self, *, rows: int = 0, context: int = 0, prefill: int = 0, before: int = 0) -> float:
        """Seconds of one step: decode rows with `context` tokens in all, and `prefill` prompt tokens after `before` others."""
        attention = self.attention_s * prefill * (before + prefill / 2)
        return self.fixed_s + self.row_s * rows + self.context_s * context + self.prefill_s * prefill + attention

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds that a prompt adds to the steps that prefill it; its first `cached` tokens are in the KV cache."""
        new = tokens - cached
        return self.prefill_s * new + self.attention_s * new * (cached + new / 2)

    def completion_s(self, prompt: int, output: int) -> float:
        """Seconds that the decode rows of a completion add to the steps they are in."""
        return output * (self.row_s + self.context_s * (prompt + output / 2))

    def first_token_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds to the first token on an idle engine."""
        return self.prompt_s(tokens, cached) + self.fixed_s * -(-(tokens - cached) // min(self.max_chunk, self.max_rows))

    def scaled(self, weights: float, parameters: float, kv: float, **changes: Any) -> StepCost:
        """Of a larger model on the same device: times as many bytes of weights, parameters, and bytes of a token's KV cache."""
        return replace(
            self,
            fixed_s=self.fixed_s * weights,
            row_s=self.row_s * parameters,
            context_s=self.context_s * kv,
            prefill_s=self.prefill_s * parameters,
            **changes,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_step_cost(name: str) -> StepCost:
    """A profile by name (`PROFILES`) or from a file of `symbiosis profile`. Raises `BadProfile`."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise BadProfile(f"cannot read the profile {name!r:.80}: {reason}; expected {', '.join(PROFILES)} or a file") from None
    known = {each.name for each in fields(StepCost)}
    found = content.get("step_cost") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not set(found) <= known:
        raise BadProfile(f"{name!r:.80} is no profile: expected a file of `symbiosis profile`")
    try:
        return StepCost(**found)
    except TypeError:
        raise BadProfile(f"{name!r:.80} is no profile: fields are missing, expected those of `symbiosis profile`") from None


_H200_7B = StepCost(
    fixed_s=4.8e-3,
    row_s=1.2e-5,
    context_s=1.3e-7,
    prefill_s=2.1e-5,
    attention_s=1.0e-9,
    kv_tokens=200_000,
    adapter_load_s=0.1,
    source="benchmarks/results/gpu-serving-7b.json: one H200, 7B in bfloat16, 32 KV heads; attention by its operations",
)
PROFILES = {
    "h200-7b": _H200_7B,
    "h200-70b": _H200_7B.scaled(
        5.2,
        10.4,
        0.625,
        attention_s=2.5e-9,
        kv_tokens=150_000,
        max_rows=1024,
        max_chunk=512,
        max_running=256,
        source="h200-7b scaled to 70B with weights of 8 bits and 8 KV heads: an assumption, not a measurement",
    ),
}
"""Named profiles. The first is the default."""
