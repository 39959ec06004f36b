"""The blocks of a model: which of its tensors belong to the embedding, to each attention and each FFN, and to the head.

Names of tensors within a block have a star for the number of its layer, so equal blocks are equal wherever they stand. A norm
belongs to the block whose input it normalises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|h|blocks|block|layer))\.(?P<number>\d+)\.(?P<name>.+)")
_ANY_LAYER = ".*."
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|embed_positions|wte|wpe|word_embeddings|tok_embeddings)\b.*")
_FFN = re.compile(r"(?:mlp|feed_forward|ffn|ff|fc1|fc2|moe|block_sparse_moe|experts|router|shared_expert)\b.*")
_FFN_NORM = re.compile(r"(?:pre_feedforward_layernorm|post_feedforward_layernorm|ffn_norm|ln_2|final_layer_norm)\b.*")
_LLAMA_FFN_NORM = re.compile(r"post_attention_layernorm\b.*")


class BlockKind(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block stands in the chain of its model."""

    kind: BlockKind
    layer: int = 0
    """0 for embedding and head."""

    def __str__(self) -> str:
        in_layer = self.kind in (BlockKind.ATTENTION, BlockKind.FFN)
        return f"{self.kind} {self.layer}" if in_layer else str(self.kind)


def partition(names: Iterable[str]) -> dict[BlockPlace, dict[str, str]]:
    """The blocks of a model in the order of its chain: names within the block, and the model's names for them."""
    names = sorted(names)
    found: dict[BlockPlace, dict[str, str]] = {}
    layers = [(name, match) for name in names if (match := _LAYER.fullmatch(name))]
    has_ffn_norm = any(_FFN_NORM.fullmatch(match["name"]) for _, match in layers)
    for name, match in layers:
        own = match["name"]
        is_ffn = _FFN.fullmatch(own) or _FFN_NORM.fullmatch(own) or (not has_ffn_norm and _LLAMA_FFN_NORM.fullmatch(own))
        place = BlockPlace(BlockKind.FFN if is_ffn else BlockKind.ATTENTION, int(match["number"]))
        found.setdefault(place, {})[f"{match['stack']}{_ANY_LAYER}{own}"] = name
    for name in names:
        if _LAYER.fullmatch(name) is None:
            kind = BlockKind.EMBEDDING if _EMBEDDING.fullmatch(name) else BlockKind.HEAD
            found.setdefault(BlockPlace(kind), {})[name] = name
    return dict(sorted(found.items(), key=lambda each: _order(each[0])))


def name_in_model(name: str, place: BlockPlace) -> str:
    """The model's name for a tensor of the block at this place: the inverse of `partition`."""
    return name.replace(_ANY_LAYER, f".{place.layer}.", 1)


def _order(place: BlockPlace) -> tuple[int, int, int]:
    order = list(BlockKind)
    if place.kind is BlockKind.EMBEDDING:
        return 0, 0, 0
    if place.kind is BlockKind.HEAD:
        return 2, 0, 0
    return 1, place.layer, order.index(place.kind)
