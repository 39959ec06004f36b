"""Dropout masks seeded by session, call, example and layer.

One stream of random numbers would make masks depend on how examples are packed. With a seed per mask, a pass that is
repeated or split drops the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def drop(
    x_RI: Tensor,
    rate: float,
    *,
    layer: str,
    keys: Sequence[str],
    sizes: Sequence[int],
    columns: tuple[int, slice] | None = None,
) -> Tensor:
    """Dropout over the rows of several examples. `keys` seed their masks, `sizes` are their numbers of rows.

    All keys are empty if nothing is to be dropped. `columns`, if the rows are some columns of a layer's input: its width and
    these.
    """
    if not any(keys):
        return x_RI
    width, own = columns or (x_RI.shape[1], slice(None))
    masks = [_mask(f"{key}/{layer}", (size, width), rate, x_RI)[:, own] for key, size in zip(keys, sizes, strict=True)]
    return x_RI * torch.cat(masks)


def _mask(key: str, shape: tuple[int, int], rate: float, like: Tensor) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(like.device).manual_seed(seed)
    mask = torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - rate, generator=generator)
    return mask.div_(1 - rate)
