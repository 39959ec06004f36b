"""The modules of a loaded model that compute its blocks: the FFN, the attention, or both of a layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from symbiosis.zoo.errors import UnknownBlock
from symbiosis.zoo.partition import BlockKind, BlockPlace

_ATTENTION, _FFN = ("self_attn", "attn", "attention", "self_attention"), ("mlp", "feed_forward", "ffn")
_NAME = re.compile(r"\s*(?P<kind>[a-z]+)\s+(?P<layer>\d{1,4})\s*")


class PieceKind(StrEnum):
    FFN = "ffn"
    ATTENTION = "attention"
    LAYER = "layer"
    """Attention and FFN, with their norms and sums."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a layer, or both: what runs at one place, and what a surrogate stands for."""

    kind: PieceKind
    layer: int

    @staticmethod
    def parse(name: str) -> Piece:
        """Of `ffn 12`, `attention 12` or `layer 12`. Raises `UnknownBlock`."""
        found = _NAME.fullmatch(name)
        if found is None or found["kind"] not in list(PieceKind):
            raise UnknownBlock(
                f"{name!r:.60} is no block: expected 'ffn N', 'attention N' or 'layer N' with the number of a layer"
            )
        return Piece(PieceKind(found["kind"]), int(found["layer"]))

    @property
    def places(self) -> tuple[BlockPlace, ...]:
        """Of its model blocks."""
        kinds = {PieceKind.FFN: (BlockKind.FFN,), PieceKind.ATTENTION: (BlockKind.ATTENTION,)}
        return tuple(BlockPlace(kind, self.layer) for kind in kinds.get(self.kind, (BlockKind.ATTENTION, BlockKind.FFN)))

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}"


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Raises `UnknownBlock`."""
    config = getattr(model, "config", None)
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) if config is not None else None
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnknownBlock(f"{type(model).__name__} has no list of decoder layers: expected a decoder as transformers has them")


def module_path(model: nn.Module, piece: Piece) -> str:
    """Of the module that computes the piece. Raises `UnknownBlock`."""
    layers = decoder_layers(model)
    if piece.layer >= len(layers):
        raise UnknownBlock(f"the model has no layer {piece.layer}: expected 0 to {len(layers) - 1}")
    path = f"{next(name for name, module in model.named_modules() if module is layers)}.{piece.layer}"
    if piece.kind is PieceKind.LAYER:
        return path
    return f"{path}.{module_name(layers[piece.layer], piece)}"


def module_name(layer: nn.Module, piece: Piece) -> str:
    """Of a block's module within its decoder layer. Raises `UnknownBlock`."""
    names = _ATTENTION if piece.kind is PieceKind.ATTENTION else _FFN
    name = next((name for name in names if isinstance(getattr(layer, name, None), nn.Module)), None)
    if name is None:
        raise UnknownBlock(f"{type(layer).__name__} has no {piece.kind}: expected a child named {' or '.join(names)}")
    return name


def replace_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put a module at this path; returns the one that was there."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    before = parent._modules[name]
    assert before is not None, "the path of a module"
    parent._modules[name] = module
    return before


def first_tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The hidden states in what a module returns."""
    return output[0] if isinstance(output, tuple) else output
