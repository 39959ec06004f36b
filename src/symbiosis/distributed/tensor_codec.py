"""A JSON value and tensors as bytes, for messages between shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor


def encode_tensors(about: Any, tensors: Mapping[str, Tensor]) -> bytes:
    text = json.dumps(about).encode()
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}  # it refuses shared memory
    content: bytes = save(copies)
    return struct.pack("<q", len(text)) + text + content


def decode_tensors(content: bytes) -> tuple[Any, dict[str, Tensor]]:
    (length,) = struct.unpack_from("<q", content)
    return json.loads(content[8 : 8 + length]), load(content[8 + length :])
