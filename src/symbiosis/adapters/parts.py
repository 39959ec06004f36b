"""What an adapter does to a model: tensors on the CPU, and nothing of how they were stored.

I = in width, O = out width, R = rank, L = layers, H = key/value heads, T = virtual tokens, D = width of a head or a row.

W is always meant as [O, I]: transformers' `Conv1D` stores its transpose, and so does an embedding, whose I is
the vocabulary. Parts of one path act in the order they are listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """LoRA, rsLoRA, DoRA: W becomes W + scale · B A, and `bias_O` · scale is added to the output.

    With a magnitude (DoRA) each row of that sum is brought to the magnitude's length:
    W' = m / ‖W + scale · B A‖ · (W + scale · B A). The base layer's bias stays as it is.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ia3Part:
    """IA3: the layer's input, or its output with the bias in it, times a vector."""

    vector: Tensor
    of_input: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedPart:
    """The module's own weight or bias is replaced, in the shape the model stores it in. None: it stays."""

    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainableTokensPart:
    """Some rows of an embedding (or of a head tied to it) are replaced: row `ids[i]` by `rows_TD[i]`."""

    ids: tuple[int, ...]
    rows_TD: Tensor


Part: TypeAlias = LoraPart | Ia3Part | ReplacedPart | TrainableTokensPart


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPart:
    """Prefix tuning: the cache of each layer starts with these T entries, as they are (no positions are applied
    to them). They count as T tokens: the first real token has position T.
    """

    keys_LHTD: Tensor
    values_LHTD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptPart:
    """Prompt tuning, p-tuning: T rows put in front of what the input embedding gives, as `inputs_embeds`."""

    embeddings_TD: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A checked adapter. It has no name: two folders with the same content give the same hash."""

    hash: str
    """SHA-256 over the method and every part with its path, numbers and settings."""
    method: str
    """lora, dora, ia3, prefix_tuning, prompt_tuning or p_tuning."""
    parts: Mapping[str, tuple[Part, ...]]
    """By path of the module in the plain transformers model, such as model.layers.0.self_attn.q_proj."""
    prefix: PrefixPart | None = None
    prompt: PromptPart | None = None
    bytes: int = 0
    """What the tensors take; one that serves two tied modules counts once."""
    rank: int = 0
    """The largest rank among the parts; 0 if none has one."""
    notes: tuple[str, ...] = ()
    """What the owner may want to know and does not change what is served."""


def assemble(
    method: str,
    parts: Mapping[str, tuple[Part, ...]],
    *,
    prefix: PrefixPart | None = None,
    prompt: PromptPart | None = None,
    notes: tuple[str, ...] = (),
) -> Adapter:
    """The adapter made of these parts, with its hash, size and rank."""
    digest = hashlib.sha256(f"adapter 1 {method}".encode())
    sizes: dict[int, int] = {}
    everything = [(path, part) for path in sorted(parts) for part in parts[path]]
    for path, part in [*everything, ("", prefix), ("", prompt)]:
        if part is None:
            continue
        digest.update(f"\n{path} {type(part).__name__}".encode())
        for name, value in _fields(part):
            digest.update(f"\n{name} ".encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
                sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            else:
                digest.update(repr(value).encode())
    return Adapter(
        hash=digest.hexdigest(),
        method=method,
        parts=dict(parts),
        prefix=prefix,
        prompt=prompt,
        bytes=sum(sizes.values()),
        rank=max((part.a_RI.shape[0] for _, part in everything if isinstance(part, LoraPart)), default=0),
        notes=notes,
    )


def _fields(part: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(part, field.name)) for field in fields(part))
