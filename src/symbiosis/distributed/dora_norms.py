"""DoRA's weight norms over shards: ‖W + scale · B A‖ of each row, of which each shard has some rows or some columns.

I / O = input and output width, r = rank. Plain reference: `adapters.dora_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters.dora_norm import dora_norm
from symbiosis.distributed.operations import Handler, OperationLeader
from symbiosis.distributed.parallel_model import ParallelModel
from symbiosis.distributed.tensor_codec import decode_tensors, encode_tensors

NORMS = "dora norms"


@dataclass(frozen=True, slots=True, eq=False)
class LoraMatrices:
    """Of a whole layer."""

    a_rI: Tensor
    b_Or: Tensor
    scale: float


def compute_norms(loras: Mapping[str, LoraMatrices], parallel: ParallelModel, leader: OperationLeader) -> dict[str, Tensor]:
    """The norms by path of the layer, in float32 on the CPU. By the first shard. Thread-safe."""
    if not loras:
        return {}
    about = {path: lora.scale for path, lora in loras.items()}
    tensors = {f"a/{path}": lora.a_rI.float() for path, lora in loras.items()}
    tensors |= {f"b/{path}": lora.b_Or.float() for path, lora in loras.items()}
    norms: dict[str, Tensor] = {}
    with leader.operation(NORMS, encode_tensors(about, tensors)), torch.no_grad():
        for path, lora in loras.items():
            squares_O = torch.zeros(lora.b_Or.shape[0])
            own = _squares(path, lora, parallel)
            for rank in range(parallel.mesh.size):
                rows = _rows(path, parallel, rank, lora.b_Or.shape[0])
                if rank == 0:
                    squares_O[rows] += own
                elif path in parallel.layers:  # others have the same as this one
                    squares_O[rows] += parallel.mesh.receive_reply((rows.stop - rows.start,), rank)
            norms[path] = squares_O.sqrt()
    return norms


def handler(parallel: ParallelModel) -> Mapping[str, Handler]:
    """For the other shards."""

    @torch.no_grad()
    def compute(content: bytes) -> None:
        about, tensors = decode_tensors(content)
        for path, scale in about.items():
            if path in parallel.layers:
                lora = LoraMatrices(tensors[f"a/{path}"], tensors[f"b/{path}"], scale)
                parallel.mesh.reply(_squares(path, lora, parallel))

    return {NORMS: compute}


def _rows(path: str, parallel: ParallelModel, rank: int, height: int) -> slice:
    layer = parallel.layers.get(path)
    return layer.slices[rank] if layer is not None and layer.style.divides_outputs else slice(0, height)


def _squares(path: str, lora: LoraMatrices, parallel: ParallelModel) -> Tensor:
    """Of this shard's rows, or the summands of its columns."""
    layer, module = parallel.layers.get(path), parallel.model.get_submodule(path)
    weight: Any = module.weight
    weight_OI: Tensor = weight.T if isinstance(module, Conv1D) else weight
    a_rI, b_Or = lora.a_rI.float(), lora.b_Or.float()
    if layer is not None and layer.style.divides_outputs:
        b_Or = b_Or[layer.own]
    elif layer is not None:
        a_rI = a_rI[:, layer.own]
    norm_O = dora_norm(weight_OI, a_rI.to(weight_OI.device), b_Or.to(weight_OI.device), lora.scale)
    return norm_O.square().to("cpu", torch.float32)
