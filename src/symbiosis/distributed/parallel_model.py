"""A model of which each shard holds a part of most layers: tensor parallelism.

Every shard runs the whole forward pass over its parts. A layer that divides its outputs is followed by one that divides its
inputs, whose results are summed over the shards. Adapters are divided with their layers. Plain reference: the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.partition import LayerPartition, ModelPartition, Style
from symbiosis.errors import CannotServe
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import shared_copy
from symbiosis.models.patches.mixin import mix_in

PROBE_TOKENS = 12


class ParallelLayer:
    """How this rank's part of a layer takes part in the forward and the backward pass."""

    def __init__(self, partition: LayerPartition, mesh: ShardMesh, inputs: _Inputs) -> None:
        self.style, self.slices, self._mesh, self._inputs = partition.style, partition.slices, mesh, inputs
        self._is_alone = False

    def __deepcopy__(self, memo: object) -> ParallelLayer:
        return self  # a copy of the model belongs to the same shard

    @property
    def own(self) -> slice:
        """This rank's slice of the divided width."""
        return self.slices[self._mesh.rank]

    @property
    def width(self) -> int:
        """The divided width, of all ranks."""
        return int(self.slices[-1].stop)

    @property
    def is_leader(self) -> bool:
        return self._mesh.is_leader

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return self._mesh.all_reduce(tensor)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute this rank's part without the others inside: results are summands or some columns."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def enter(self, x: Tensor) -> Tensor:
        """The input of this rank's part."""
        if self.style in (Style.ROW, Style.EMBEDDING):
            return x
        if torch.is_grad_enabled() and x.requires_grad:
            x = self._inputs.enter(x, self._mesh)
        return x[..., self.own] if self.style is Style.DIVIDED_ROW else x

    def leave(self, y: Tensor) -> Tensor:
        """The result of the layer from that of this rank's part, which may be overwritten."""
        if self.style is Style.COLUMN or self._is_alone:
            return y
        self._inputs.forget()
        if not (torch.is_grad_enabled() and y.requires_grad):
            return self.gather(y) if self.style is Style.GATHERED_COLUMN else self._mesh.all_reduce(y.contiguous())
        if self.style is Style.GATHERED_COLUMN:
            return _Gather.apply(y, self)  # type: ignore[no-untyped-call, no-any-return]
        return _Sum.apply(y, self._mesh)  # type: ignore[no-untyped-call, no-any-return]

    def localize(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank's part of an embedding, and which of them are its own; the others are any."""
        is_local = (ids >= self.own.start) & (ids < self.own.stop)
        return torch.where(is_local, ids - self.own.start, 0), is_local

    def gather(self, y: Tensor) -> Tensor:
        """All columns, from those of each rank."""
        rows = y.reshape(-1, y.shape[-1]).contiguous()
        whole = self._mesh.all_gather(rows, [each.stop - each.start for each in self.slices])
        return whole.view(*y.shape[:-1], -1)


class _Inputs:
    """The last input under autograd: layers that read the same one share the sum of its gradients."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, mesh: ShardMesh) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, _SumGradients.apply(x, mesh)  # type: ignore[no-untyped-call]
        return self._last[1]

    def forget(self) -> None:
        self._last = None


class _SumGradients(torch.autograd.Function):
    """All ranks read the same rows, each for some outputs: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: ShardMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.mesh.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mesh: ShardMesh) -> Tensor:
        return mesh.all_reduce(y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """All columns. Each rank's gradient is that of its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: ParallelLayer) -> Tensor:
        ctx.own = layer.own
        return layer.gather(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.own], None


class ParallelExperts(nn.Module):
    """Mixed into the class of stacked experts of which each shard has some inner columns."""

    symbiosis_parallel: ParallelLayer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parallel = self.symbiosis_parallel
        args = tuple(parallel.enter(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return parallel.leave(super().forward(*args, **kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """This shard's part of a weight."""

    dim: int
    slices: tuple[slice, ...]
    part: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ParallelModel:
    """This shard's part of a model."""

    model: PreTrainedModel
    """Layers compute on this rank's parts. `layers` tells what to do before and after each."""
    mesh: ShardMesh
    layers: Mapping[str, ParallelLayer]
    facts: ModelFacts
    """Of the whole model."""
    kv_heads: tuple[slice, ...]
    """By rank."""
    probe_logits: Tensor
    """Of the whole model, for the first tokens of its vocabulary: [PROBE_TOKENS, vocabulary]."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of whole parameters, by name."""
    parts: Mapping[int, WeightPart] = field(repr=False)
    """By the address of the whole weight, of those that consist of one slice on each shard."""

    @staticmethod
    @torch.no_grad()
    def of(whole: PreTrainedModel, mesh: ShardMesh) -> ParallelModel:
        """Copies this rank's parts to its device: the whole model may be freed afterwards. Raises `CannotServe`.

        All ranks of a mesh do this at the same time.
        """
        facts = ModelFacts.from_model(whole)
        if not facts.decoder_only or not facts.kv_heads or not whole.can_generate():
            raise CannotServe(
                f"{type(whole).__name__} cannot be hosted: expected a decoder whose layers all have key-value heads"
            )
        partition = ModelPartition.of(whole, facts.kv_heads, mesh.size)
        probe_logits = whole(input_ids=probe_ids(whole)[None], use_cache=False).logits[0].to(mesh.device)
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters(remove_duplicate=False)}
        model = shared_copy(whole)
        _cut(model, partition, mesh)
        fuse_projections(model)
        inputs = _Inputs()
        layers = {path: ParallelLayer(each, mesh, inputs) for path, each in partition.layers.items()}
        for path, layer in layers.items():
            if layer.style is Style.EXPERTS:
                mix_in(model.get_submodule(path), ParallelExperts, symbiosis_parallel=layer)
        parts = _find_parts(whole, model, partition)
        return ParallelModel(model, mesh, layers, facts.without_weights(), partition.kv_heads, probe_logits, shapes, parts)

    @property
    def local_kv_heads(self) -> int:
        own = self.kv_heads[self.mesh.rank]
        return int(own.stop - own.start)

    def copy(self) -> ParallelModel:
        """The same part with modules of its own."""
        return replace(self, model=shared_copy(self.model))

    def skeleton(self) -> PreTrainedModel:
        """A model with the shapes of the whole, whose parameters are zero and take no memory."""
        model = shared_copy(self.model)
        replaced: dict[int, nn.Parameter] = {}
        for name, shape in self.shapes.items():
            module = model.get_submodule(name.rpartition(".")[0])
            old = module._parameters[name.rpartition(".")[2]]
            like = old if old is not None else next(model.parameters())
            zeros = torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
            new = nn.Parameter(zeros, requires_grad=False)
            module._parameters[name.rpartition(".")[2]] = new if old is None else replaced.setdefault(id(old), new)
        _set_widths(model)
        return model


def probe_ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(PROBE_TOKENS, device=model.device).remainder(model.config.get_text_config().vocab_size)


def _cut(model: PreTrainedModel, partition: ModelPartition, mesh: ShardMesh) -> None:
    """Replace the parameters of a model by this rank's parts, and move the others to its device."""
    cut: dict[int, nn.Parameter] = {}  # by the whole parameter: ties stay
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, short = name.rpartition(".")
        module = model.get_submodule(path)
        layer = partition.layers.get(path)
        if layer is not None and short == "bias" and not layer.style.divides_outputs and not mesh.is_leader:
            module._parameters[short] = None  # the leader adds it
            continue
        if id(parameter) not in cut:
            divided = partition.parameters.get(name)
            data = parameter.detach() if divided is None else divided.cut(parameter, mesh.rank)
            cut[id(parameter)] = nn.Parameter(data.to(mesh.device), requires_grad=False)
        module._parameters[short] = cut[id(parameter)]
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        path, _, short = name.rpartition(".")
        model.get_submodule(path)._buffers[short] = buffer.to(mesh.device)
    _set_widths(model)


def _set_widths(model: PreTrainedModel) -> None:
    """Let layers report the widths of their weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = module.weight.shape


def _find_parts(whole: PreTrainedModel, model: PreTrainedModel, partition: ModelPartition) -> dict[int, WeightPart]:
    parts: dict[int, WeightPart] = {}
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        divided = partition.parameters.get(name)
        if divided is not None and all(len(each) == 1 for each in divided.slices):
            slices = tuple(each[0] for each in divided.slices)
            parts[parameter.data_ptr()] = WeightPart(divided.dim, slices, own[name].detach())
    return parts
