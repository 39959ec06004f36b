"""Dropout that depends on nothing but the session, the call, the example and the layer.

A stream of random numbers that is drawn from in the order of computation would depend on how examples were
packed. Here every mask has a seed of its own, so a pass that is repeated, or cut differently, drops the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def drop(x_RI: Tensor, rate: float, *, layer: str, keys: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """Some numbers become 0, the others larger. `keys` name the examples whose rows these are, `sizes` says how many.

    Of an example without a key nothing is dropped.
    """
    if not any(keys):
        return x_RI
    masks = [_mask(f"{key}/{layer}", (size, x_RI.shape[1]), rate, x_RI) for key, size in zip(keys, sizes, strict=True)]
    return x_RI * torch.cat(masks)


def _mask(key: str, shape: tuple[int, int], rate: float, like: Tensor) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(like.device).manual_seed(seed)
    kept = torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - rate, generator=generator)
    return kept.div_(1 - rate)
