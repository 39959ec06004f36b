"""Layers of the served model that apply the adapters of the current batch (`batch_adapters`).

The model stays the plain transformers model: each module keeps its class, with a mixin in front. A layer without adapters
computes what the base layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.common.available_memory import available_memory
from symbiosis.distributed.parallel_model import ParallelLayer
from symbiosis.distributed.partition import Style
from symbiosis.models.fuse_projections import find_fused_projections
from symbiosis.models.patches.mixin import PatchedLayer, mix_in, plain_linears
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_ops import FusedProjection

PackedKey: TypeAlias = tuple[int, torch.Size]
"""Address and shape of a weight."""
_MAX_PACKED_SHARE = 0.25
"""Of the memory that is available, for packed copies of weights."""


class LoraLinear(PatchedLayer):
    """In front of `nn.Linear` and `Conv1D`."""

    symbiosis_adapters: ActiveAdapters
    symbiosis_single: FusedProjection
    """This layer alone."""
    symbiosis_fused: FusedProjection
    """This layer with its fused find_fused_projections."""

    def forward(self, x: Tensor) -> Tensor:
        adapters, is_head, fused = self.symbiosis_adapters, self.symbiosis_is_head, self.symbiosis_fused
        cached = fused.pop_cached(self.symbiosis_path, x)
        if cached is not None:
            return cached
        ops = adapters.ops_at(fused, is_head=is_head)
        if ops is not None and ops.scaled_inputs and len(fused.paths) > 1:
            fused = self.symbiosis_single  # IA3 scales this layer's input and not its fused find_fused_projections'
            ops = adapters.ops_at(fused, is_head=is_head)
        x_RI = fused.enter(x.reshape(-1, x.shape[-1]))
        x_RI = x_RI if x_RI.stride(-1) == 1 else x_RI.contiguous()
        adapters.check_rows(x_RI.shape[0], is_head=is_head)
        if ops is not None:
            x_RI = ops.scale_inputs(x_RI)
        delta = adapters.begin_delta(x_RI, fused, is_head=is_head)
        y_RO = fused.project(x_RI)
        if delta is not None:
            delta.add(y_RO)
        if ops is not None:
            ops.apply(x_RI, y_RO, fused.bias_O)
        y_RO = fused.leave(y_RO)
        results = torch.split(y_RO, fused.widths, 1) if len(fused.paths) > 1 else [y_RO]
        return fused.cache(x, self.symbiosis_path, [each.view(*x.shape[:-1], each.shape[-1]) for each in results])


class LoraEmbedding(PatchedLayer):
    """In front of `nn.Embedding`."""

    symbiosis_adapters: ActiveAdapters
    symbiosis_single: FusedProjection
    symbiosis_scale: Tensor | float | None
    """The layer multiplies its rows by this. None: it does something else; the converter rejects adapters for it."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parallel = self.symbiosis_single.parallel
        is_local = None
        if parallel is not None:
            ids, is_local = parallel.localize(ids)
        result: Tensor = super().forward(ids, *args, **kwargs)
        ops = self.symbiosis_adapters.ops_at(self.symbiosis_single, is_head=self.symbiosis_is_head)
        if ops is not None:
            assert self.symbiosis_scale is not None, "the converter rejects adapters for this layer"
            ops.apply_to_embedding(ids.reshape(-1), result.view(-1, result.shape[-1]), self.symbiosis_scale)
        if parallel is None or is_local is None:
            return result
        return parallel.leave(result.masked_fill(~is_local[..., None], 0))


def install_lora_layers(
    model: PreTrainedModel, adapters: ActiveAdapters, parallel: Mapping[str, ParallelLayer] | None = None
) -> None:
    """Patch the linear layers and embeddings of a model. Neighbours (`models.fuse_projections`) are computed as one.

    `parallel`: the layers of which this shard has a part.
    """
    parallel = parallel or {}
    for path, layer, is_head in plain_linears(model):
        weight_OI = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        single = FusedProjection([path], [weight_OI.shape[0]], weight_OI, layer.bias, parallel.get(path))
        mix_in(
            layer,
            LoraLinear,
            symbiosis_path=path,
            symbiosis_is_head=is_head,
            symbiosis_adapters=adapters,
            symbiosis_single=single,
            symbiosis_fused=single,
        )
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            scale = 1.0 if type(module) is nn.Embedding else getattr(module, "embed_scale", None)
            mix_in(
                module,
                LoraEmbedding,
                symbiosis_path=path,
                symbiosis_is_head=False,
                symbiosis_adapters=adapters,
                symbiosis_single=FusedProjection([path], [module.embedding_dim], module.weight, None, parallel.get(path)),
                symbiosis_scale=scale.to(module.weight) if isinstance(scale, Tensor) else scale,
            )
        for names in find_fused_projections(module):
            members = [module.get_submodule(name) for name in names]
            weight, bias = (_as_one(member._parameters[name] for member in members) for name in ("weight", "bias"))
            assert weight is not None
            paths = [f"{path}.{name}" if path else name for name in names]
            divided = [parallel.get(each) for each in paths]
            if {None if each is None else each.style for each in divided} not in ({None}, {Style.COLUMN}):
                continue  # their results take different ways
            fused = FusedProjection(paths, [member.weight.shape[0] for member in members], weight, bias, divided[0])
            for member in members:
                object.__setattr__(member, "symbiosis_fused", fused)


def pack_projections(model: PreTrainedModel, packed: dict[PackedKey, FusedProjection] | None = None) -> int:
    """Keep packed copies of the weights on a CPU, if they fit easily. Returns their bytes.

    `packed`: projections of other models that were packed, by their weights. Shared weights share the copy. Those of this model
    are added.
    """
    packed = {} if packed is None else packed
    projections = {id(each.symbiosis_fused): each.symbiosis_fused for each in model.modules() if isinstance(each, LoraLinear)}
    keyed = [((each.weight_OI.data_ptr(), each.weight_OI.shape), each) for each in projections.values()]
    new = {key: each for key, each in keyed if key not in packed}
    num_bytes = sum(each.weight_OI.nbytes for each in new.values())
    is_small = num_bytes <= _MAX_PACKED_SHARE * available_memory()
    num_packed = sum(each.pack() for each in new.values()) if is_small else 0
    packed.update(new)
    for key, each in keyed:
        each.share_packed(packed[key])
    return num_packed


def _as_one(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Adjacent tensors as one."""
    first, *others = parts
    if first is None:
        return None
    rows = first.shape[0] + sum(other.shape[0] for other in others if other is not None)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
