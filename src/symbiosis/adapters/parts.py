"""The parts of an adapter: what it does to a model, as tensors on the CPU, independent of the file format.

I = in width, O = out width, R = rank, L = layers, H = key/value heads, T = virtual tokens, D = width of a head or a row.

W is always [O, I]. transformers' `Conv1D` stores the transpose, and so does an embedding, whose I is the vocabulary. Parts of
one path apply in list order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """LoRA, rsLoRA, DoRA: W becomes W + scale · B A, and `bias_O` · scale is added to the output.

    With a magnitude (DoRA) each row of that sum is scaled to the magnitude:
    W' = m / ‖W + scale · B A‖ · (W + scale · B A). The base layer's bias is unchanged.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ia3Part:
    """IA3: the layer's input, or its output including the bias, times a vector."""

    vector: Tensor
    of_input: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedPart:
    """Replaces the module's weight or bias, in the model's storage shape. None: unchanged."""

    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainableTokensPart:
    """Replaces rows of an embedding, or of a head tied to it: row `ids[i]` by `rows_TD[i]`."""

    ids: tuple[int, ...]
    rows_TD: Tensor


Part: TypeAlias = LoraPart | Ia3Part | ReplacedPart | TrainableTokensPart


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPart:
    """Prefix tuning: the KV cache of each layer starts with these T entries, without position encoding. They count as T tokens:
    the first real token has position T.
    """

    keys_LHTD: Tensor
    values_LHTD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptPart:
    """Prompt tuning, p-tuning: T rows before the rows of the input embedding, as `inputs_embeds`."""

    embeddings_TD: Tensor


# Databases and clients store hashes: neither these tags nor the parts' field names, which are hashed too, may change.
_HASH_TAGS = {
    LoraPart: "LowRank",
    Ia3Part: "Scaling",
    ReplacedPart: "Whole",
    TrainableTokensPart: "Tokens",
    PrefixPart: "Prefix",
    PromptPart: "Prompt",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A checked adapter. It has no name: two folders with equal content have the same hash."""

    hash: str
    """SHA-256 over the method and all parts with their paths, values and settings."""
    method: str
    """lora, dora, ia3, prefix_tuning, prompt_tuning or p_tuning."""
    parts: Mapping[str, tuple[Part, ...]]
    """By path of the module in the plain transformers model, such as model.layers.0.self_attn.q_proj."""
    prefix: PrefixPart | None = None
    prompt: PromptPart | None = None
    bytes: int = 0
    """Size of the tensors; one that two tied modules share counts once."""
    rank: int = 0
    """The largest rank of the parts; 0 without LoRA."""
    warnings: tuple[str, ...] = ()
    """Remarks for the owner, without effect on serving."""
    base_model: str = ""
    """Name of the model that it was made for, as its config says: the last part, in lower case."""


def build_adapter(
    method: str,
    parts: Mapping[str, tuple[Part, ...]],
    *,
    prefix: PrefixPart | None = None,
    prompt: PromptPart | None = None,
    warnings: tuple[str, ...] = (),
) -> Adapter:
    """The adapter of these parts, with its hash, size and rank."""
    digest = hashlib.sha256(f"adapter 1 {method}".encode())
    sizes: dict[int, int] = {}
    all_parts = [(path, part) for path in sorted(parts) for part in parts[path]]
    for path, part in [*all_parts, ("", prefix), ("", prompt)]:
        if part is None:
            continue
        digest.update(f"\n{path} {_HASH_TAGS[type(part)]}".encode())
        for name, value in ((each.name, getattr(part, each.name)) for each in fields(part)):
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
        rank=max((part.a_RI.shape[0] for _, part in all_parts if isinstance(part, LoraPart)), default=0),
        warnings=warnings,
    )
