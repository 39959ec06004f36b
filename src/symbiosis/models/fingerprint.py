"""The fingerprint of a loaded model: engines of a cluster compare theirs instead of their weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NOT_COMPARED = ("name_or_path", "transformers_version")
_PIECE_BYTES, _PIECES = 4096, 16
_WORD_BYTES = 8


def fingerprint_model(model: PreTrainedModel) -> str:
    """The hex SHA-256 of a model: equal for equal models in any process, on any device, fused projections or not.

    It covers the config without paths and versions, the dtype, and name, shape, dtype and content of every stored tensor. The
    content is hashed whole up to 64 KiB. Of a larger tensor it is 16 pieces of 4 KiB at equal distances, the first and the
    last included, and the sum of all 8-byte words. So every byte is read, and no large tensor is copied: a change of
    anything changes the hash, unless it leaves all sums as they are. It detects other weights, not an attack.

    Take it from a model as loaded, before an engine or a trainer changes its modules.
    """
    config = json.dumps(_without_paths(model.config.to_dict()), sort_keys=True, default=_to_json)
    digest = hashlib.sha256(f"{config}\n{model.dtype}\n".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            _add_content(digest, tensor.detach())
    return digest.hexdigest()


def _without_paths(config: Any) -> Any:
    """Configs may contain configs."""
    if not isinstance(config, dict):
        return config
    return {str(key): _without_paths(value) for key, value in config.items() if not str(key).endswith(_NOT_COMPARED)}


def _to_json(value: object) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _add_content(digest: Any, tensor: Tensor) -> None:
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    size = content.numel()
    if size > _PIECE_BYTES * _PIECES:
        digest.update(_sum_words(content).to_bytes(_WORD_BYTES, "big", signed=True))
        starts = [(size - _PIECE_BYTES) * number // (_PIECES - 1) for number in range(_PIECES)]
        content = torch.cat([content[start : start + _PIECE_BYTES] for start in starts])
    digest.update(content.cpu().numpy().data)


def _sum_words(content: Tensor) -> int:
    """Modulo 2^64, without the last bytes that are no word: the last piece has them."""
    if content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    words = content[: content.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    return int(words.sum())
