"""Base layers of which each shard holds a part. Plain reference for every kind: the layer in one piece."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.parallel_model import WeightPart
from symbiosis.models.loading import frozen_copy
from symbiosis.models.split import HostedLayer
from symbiosis.split.executor.layers import BaseLayer, Block, Embedding, Experts, GatedBlock, Matrix, Rows, is_close, make_layer
from symbiosis.split.executor.sharding.coordinator import Operation, OperationKind, ShardCoordinator
from symbiosis.split.executor.sharding.parts import (
    CHOICES,
    ExpertsPart,
    GatedPart,
    MatrixPart,
    PartialCall,
    Piece,
    backward_of_matrices,
    forward_of_matrices,
)
from symbiosis.split.executor.sharding.ways import Way, WayChooser
from symbiosis.split.executor.sharding.weights import Shape, ShardedWeight, contribute, divide, gather
from symbiosis.types import LayerKind, LayerSpec

Weights = dict[str, Tensor]


class Shards:
    """This rank's part of all layers, and the calls to the others'."""

    def __init__(
        self,
        hosted: Sequence[HostedLayer],
        mesh: ShardMesh,
        way: Way | None = None,
        given: Mapping[int, WeightPart] | None = None,
    ) -> None:
        """Copies this rank's parts: the whole weights may be freed afterwards.

        `given` are parts that exist already, by the address of the whole weight: hosted serving uses them, too.
        """
        self.mesh, self.chooser = mesh, WayChooser(way)
        self.coordinator = ShardCoordinator(mesh, self._take_part)
        gated = [each for each in hosted if each.module is not None and each.spec.kind is LayerKind.BLOCK]
        gated = [each for each in gated if GatedBlock.matches(each.spec, cast(nn.Module, each.module))]
        by_inputs = {_down_proj(each).weight.data_ptr() for each in gated}
        self._weights: dict[int, ShardedWeight] = {}
        self._placed = {id(each) for each in gated}
        for each in hosted:
            for name, weight in each.weights.items():
                address = weight.data_ptr()
                part = given.get(address) if given is not None and each.spec.kind is not LayerKind.EXPERTS else None
                if address not in self._weights:
                    self._weights[address] = ShardedWeight(weight, _dim(each, name, by_inputs), mesh, part)
        self.layers: list[BaseLayer] = [self._make(each) for each in hosted]

    def _make(self, each: HostedLayer) -> BaseLayer:
        spec = each.spec
        if spec.kind in (LayerKind.LINEAR, LayerKind.CONV1D):
            return ShardedMatrix(spec, self._weights[each.weights["weight"].data_ptr()], each.bias, self)
        if spec.kind is LayerKind.EMBEDDING:
            return ShardedEmbedding(spec, self._weights[each.weights["weight"].data_ptr()], self)
        assert each.module is not None
        if spec.kind is LayerKind.NORM:
            return make_layer(spec, {}, None, each.module.to(self.mesh.device))
        if spec.kind is LayerKind.EXPERTS:
            return ShardedExperts(each, {name: self._weights[w.data_ptr()] for name, w in each.weights.items()}, self)
        weights = {name: self._weights.get(p.data_ptr()) for name, p in each.module.named_parameters()}
        return ShardedBlock(spec, each.module, weights, self, is_gated=id(each) in self._placed)

    def start(self, model: str, calibrate: Callable[[], None]) -> None:
        """Serve the other ranks' calls, once all hold the same model, and calibrate each rank in turn."""
        self.mesh.check_same("model", model)
        self.coordinator.start()
        self.mesh.wait_for_all("started")
        for rank in range(self.mesh.size):
            if rank == self.mesh.rank:
                calibrate()
            self.mesh.wait_for_all(f"calibrated {rank}")

    def run(self, layers: Sequence[ShardedLayer], is_backward: bool, rows: Rows) -> Rows:
        """The results of layers that read the same rows, in one of the two ways."""
        call = layers[0].partial_call(layers, is_backward=is_backward)
        key = (is_backward, *((layer.spec.kind, layer.spec.in_width, layer.spec.out_width) for layer in layers))
        count = rows[0].shape[0]
        way = Way.PARAMETERS if call is None else self.chooser.choose(key, count)
        started = time.perf_counter()
        results = self._call(call, layers, is_backward, rows) if call is not None and way is Way.TENSOR else None
        if results is None:
            results = layers[0].run_whole(layers, self.gather(layers), rows, is_backward=is_backward)
        if call is not None:
            self.chooser.observe(key, way, count, time.perf_counter() - started)
        return results

    def gather(self, layers: Sequence[ShardedLayer]) -> list[Weights]:
        """The whole weights of layers."""
        operation = Operation(OperationKind.GATHER, self.mesh.rank, tuple(layer.spec.handle for layer in layers))
        weights = _weights_of(layers)
        whole = iter(self.coordinator.run(operation, lambda: gather(weights, self.mesh)))
        return [{name: next(whole) for name in layer.parts} for layer in layers]

    def _call(self, call: PartialCall, layers: Sequence[ShardedLayer], is_backward: bool, rows: Rows) -> Rows:
        mesh, count = self.mesh, rows[0].shape[0]
        handles = tuple(layer.spec.handle for layer in layers)
        choices = rows[1].shape[1] if layers[0].spec.kind is LayerKind.EXPERTS else 0
        operation = Operation(OperationKind.CALL, mesh.rank, handles, is_backward, count, choices)

        def do() -> Rows:
            works = []
            for rank in mesh.others:
                works += mesh.send(_pieces(rows, call.inputs, rank), rank)
            received = {rank: mesh.receive(_shapes(call.outputs, operation, layers[0], rank), rank) for rank in mesh.others}
            parts = {mesh.rank: list(call.compute(tuple(_pieces(rows, call.inputs, mesh.rank))))}
            parts |= {rank: each.wait() for rank, each in received.items()}
            for work in works:
                work.wait()
            ordered = [parts[rank] for rank in range(mesh.size)]
            return tuple(_combine([each[i] for each in ordered], piece) for i, piece in enumerate(call.outputs))

        return cast(Rows, self.coordinator.run(operation, do))

    def _take_part(self, operation: Operation) -> None:
        """Do this rank's part of another rank's operation."""
        layers = [cast(ShardedLayer, self.layers[handle]) for handle in operation.handles]
        if operation.kind is OperationKind.GATHER:
            contribute(_weights_of(layers), self.mesh, operation.origin)
            return
        call = layers[0].partial_call(layers, is_backward=operation.is_backward)
        assert call is not None, "the origin has the same layers"
        shapes = _shapes(call.inputs, operation, layers[0], self.mesh.rank)
        results = call.compute(tuple(self.mesh.receive(shapes, operation.origin).wait()))
        for work in self.mesh.send(list(results), operation.origin):
            work.wait()


class ShardedLayer(BaseLayer):
    """A base layer of which this rank has the `parts`."""

    is_local = False
    shards: Shards
    parts: dict[str, ShardedWeight]
    _fetched: tuple[str, Tensor] | None = None

    def _set_parts(self, parts: dict[str, ShardedWeight], shards: Shards) -> None:
        self.parts, self.shards = parts, shards
        self.weights = {name: part.part for name, part in parts.items()}
        self.device = shards.mesh.device

    def partial_call(self, layers: Sequence[ShardedLayer], *, is_backward: bool) -> PartialCall | None:
        """How the ranks compute this together; None if they cannot."""
        raise NotImplementedError

    def run_whole(
        self, layers: Sequence[ShardedLayer], weights: list[dict[str, Tensor]], rows: Rows, *, is_backward: bool
    ) -> Rows:
        """The results with whole weights."""
        raise NotImplementedError

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return self.shards.run((self,), False, rows)

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return self.shards.run((self,), True, rows)

    def weight(self, name: str) -> Tensor | None:
        if name not in self.parts:
            return None
        if self._fetched is None or self._fetched[0] != name:  # tenants read it in chunks
            self._fetched = name, self.shards.gather((self,))[0][name]
        return self._fetched[1]


class ShardedMatrix(ShardedLayer, Matrix):
    """A matrix, divided by outputs, or by inputs if it ends a gated MLP."""

    def __init__(self, spec: LayerSpec, weight: ShardedWeight, bias: Tensor | None, shards: Shards) -> None:
        BaseLayer.__init__(self, spec, {"weight": weight.part})
        self._set_parts({"weight": weight}, shards)
        self._part = MatrixPart(weight, is_transposed=spec.kind is LayerKind.CONV1D)
        self.bias, self._with_bias, self._row_squares = None, None, None
        if bias is not None:
            self._with_bias = ShardedMatrix(spec, weight, None, shards)
            self._with_bias.bias = bias.to(self.device)

    @property
    def is_by_outputs(self) -> bool:
        return self._part.by_outputs

    def partial_call(self, layers: Sequence[ShardedLayer], *, is_backward: bool) -> PartialCall | None:
        parts = [cast(ShardedMatrix, layer)._part for layer in layers]
        make = backward_of_matrices if is_backward else forward_of_matrices
        return make(parts, self.spec.in_width, [layer.spec.out_width for layer in layers])

    def run_whole(
        self, layers: Sequence[ShardedLayer], weights: list[dict[str, Tensor]], rows: Rows, *, is_backward: bool
    ) -> Rows:
        whole = [Matrix(layer.spec, each) for layer, each in zip(layers, weights, strict=True)]
        return whole[0].backward_group(whole, rows, None) if is_backward else whole[0].forward_group(whole, rows, None)

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return self.forward_group((self,), rows, out)

    def forward_group(self, group: Sequence[Matrix], rows: Rows, out: Rows | None) -> Rows:
        results: list[Tensor] = []
        for layers in _divided_alike(cast(Sequence[ShardedMatrix], group)):
            found = self.shards.run(layers, False, rows)
            results += (y if layer.bias is None else y + layer.bias for layer, y in zip(layers, found, strict=True))
        return tuple(results)

    def backward_group(self, group: Sequence[Matrix], rows: Rows, out: Rows | None) -> Rows:
        total: Tensor | None = None
        first = 0
        for layers in _divided_alike(cast(Sequence[ShardedMatrix], group)):
            (found,) = self.shards.run(layers, True, rows[first : first + len(layers)])
            first += len(layers)
            total = found if total is None else total.add_(found)
        assert total is not None
        return (total,)

    def row_squares(self) -> Tensor:
        if self._row_squares is None:
            (weights,) = self.shards.gather((self,))
            self._row_squares = Matrix(self.spec, weights).row_squares()
        return self._row_squares.clone()


class ShardedEmbedding(ShardedLayer, Embedding):
    """Token embeddings, divided by columns, or by ids if the head has the same weight."""

    def __init__(self, spec: LayerSpec, weight: ShardedWeight, shards: Shards) -> None:
        BaseLayer.__init__(self, spec, {"weight": weight.part})
        self._set_parts({"weight": weight}, shards)

    def partial_call(self, layers: Sequence[ShardedLayer], *, is_backward: bool) -> PartialCall | None:
        part, inputs = self.parts["weight"], (Piece(1, is_index=True),)
        if part.dim == 1:
            return PartialCall(inputs, (Piece(self.spec.out_width, part.slices),), Embedding(self.spec, self.weights).forward)
        own = part.slices[self.shards.mesh.rank]

        def compute(rows: Rows) -> Rows:
            ids = rows[0][:, 0]
            is_local = (ids >= own.start) & (ids < own.stop)
            found = part.part.new_zeros(len(ids), self.spec.out_width)
            found[is_local] = part.part[ids[is_local] - own.start]
            return (found,)

        return PartialCall(inputs, (Piece(self.spec.out_width),), compute)

    def run_whole(
        self, layers: Sequence[ShardedLayer], weights: list[dict[str, Tensor]], rows: Rows, *, is_backward: bool
    ) -> Rows:
        return Embedding(self.spec, weights[0]).forward(rows)


class ShardedBlock(ShardedLayer, Block):
    """A row-wise sub-module. A gated MLP is divided by its inner columns; others are gathered."""

    def __init__(
        self,
        spec: LayerSpec,
        module: nn.Module,
        weights: dict[str, ShardedWeight | None],
        shards: Shards,
        *,
        is_gated: bool,
    ) -> None:
        """`weights`: by the names of the module's parameters; None for those that every rank has as a whole."""
        Block.__init__(self, spec, module)
        self._set_parts({name: weight for name, weight in weights.items() if weight is not None}, shards)
        self.weights = {}  # those of the matrices inside
        self._whole = (GatedBlock if is_gated else Block)(spec, module)
        self._parameters = dict(module.named_parameters())
        self._part = self._gated_part(module) if is_gated else None
        self._release()

    def _gated_part(self, module: Any) -> GatedPart | None:
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        if any(name not in self.parts for name in names) or module.down_proj.bias is not None:
            return None
        gate, up, down = (self.parts[name] for name in names)
        own = gate.slices[self.shards.mesh.rank]
        biases = [None if each.bias is None else each.bias.detach()[own] for each in (module.gate_proj, module.up_proj)]
        return GatedPart(gate.part, up.part, down.part, biases, module.act_fn)

    def _release(self) -> None:
        for name, part in self.parts.items():
            self._parameters[name].data = part.part.new_empty(0)

    def partial_call(self, layers: Sequence[ShardedLayer], *, is_backward: bool) -> PartialCall | None:
        if self._part is None:
            return None
        x, y = Piece(self.spec.in_width), Piece(self.spec.out_width)
        return PartialCall((x, y), (x,), self._part.backward) if is_backward else PartialCall((x,), (y,), self._part.forward)

    def run_whole(
        self, layers: Sequence[ShardedLayer], weights: list[dict[str, Tensor]], rows: Rows, *, is_backward: bool
    ) -> Rows:
        try:
            for name, weight in weights[0].items():
                self._parameters[name].data = weight
            return self._whole.backward(rows) if is_backward else self._whole.forward(rows)
        finally:
            self._release()


class ShardedExperts(ShardedLayer, Experts):
    """Stacked experts; each rank has some of them."""

    def __init__(self, hosted: HostedLayer, weights: dict[str, ShardedWeight], shards: Shards) -> None:
        super().__init__(hosted.spec, {name: weight.part for name, weight in weights.items()}, hosted.module)
        self._parameters = dict(self.module.named_parameters())
        self._experts = divide(self.spec.experts, shards.mesh.size)
        is_divisible = self._is_sum_of_parts(shards.mesh.size)
        self._set_parts(weights, shards)
        self._part = None
        if is_divisible:
            module = frozen_copy(self.module)  # of its own: other ranks' calls run on another thread
            self._part = ExpertsPart(module, self._experts[shards.mesh.rank], self.spec.out_width)
            for name, parameter in module.named_parameters():
                parameter.data = weights[name].part
        self._release()

    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._parameters[name].data = weight

    def _release(self) -> None:
        self._set({name: weight.part.new_empty(0) for name, weight in self.parts.items()})

    @torch.no_grad()
    def _is_sum_of_parts(self, size: int) -> bool:
        """Whether the module computes the same with some experts at a time, on a trial."""
        whole = {name: parameter.data for name, parameter in self._parameters.items()}
        first, generator, count = next(iter(whole.values())), torch.Generator().manual_seed(0), min(2, self.spec.experts)
        x = torch.randn(8, self.spec.in_width, generator=generator).to(first)
        index = torch.stack([torch.randperm(self.spec.experts, generator=generator)[:count] for _ in range(8)]).to(first.device)
        weight = torch.rand(8, count, generator=generator).to(first)
        try:
            expected = self.module(x, index, weight)
            total = torch.zeros_like(expected)
            for own in divide(self.spec.experts, size):
                self._set({name: each[own] for name, each in whole.items()})
                total += ExpertsPart(self.module, own, self.spec.out_width).forward((x, index, weight))[0]
            return is_close(total, expected)
        except Exception:  # noqa: BLE001 - then its weights are gathered
            return False
        finally:
            self._set(whole)

    def partial_call(self, layers: Sequence[ShardedLayer], *, is_backward: bool) -> PartialCall | None:
        if self._part is None:
            return None
        x, y = Piece(self.spec.in_width), Piece(self.spec.out_width)
        index, weight = Piece(CHOICES, is_index=True), Piece(CHOICES)
        if is_backward:
            return PartialCall((x, index, weight, y), (x, weight), self._part.backward)
        return PartialCall((x, index, weight), (y,), self._part.forward)

    def run_whole(
        self, layers: Sequence[ShardedLayer], weights: list[dict[str, Tensor]], rows: Rows, *, is_backward: bool
    ) -> Rows:
        try:
            self._set(weights[0])
            return Experts.backward(self, rows) if is_backward else Experts.forward(self, rows)
        finally:
            self._release()


def _down_proj(each: HostedLayer) -> nn.Linear:
    module: Any = each.module
    found: nn.Linear = module.down_proj
    return found


def _dim(each: HostedLayer, name: str, by_inputs: set[int]) -> int:
    """The dimension along which a weight is divided."""
    if each.spec.kind is LayerKind.LINEAR:
        return 1 if each.weights[name].data_ptr() in by_inputs else 0
    return 0 if each.spec.kind is LayerKind.EXPERTS else 1


def _weights_of(layers: Sequence[ShardedLayer]) -> list[ShardedWeight]:
    return [weight for layer in layers for weight in layer.parts.values()]


def _divided_alike(group: Sequence[ShardedMatrix]) -> Iterator[list[ShardedMatrix]]:
    """Neighbours that are divided the same way."""
    for _, neighbours in itertools.groupby(group, key=lambda layer: layer.is_by_outputs):
        yield list(neighbours)


def _pieces(rows: Rows, pieces: Sequence[Piece], rank: int) -> list[Tensor]:
    """A rank's columns of the tensors of a call."""
    return [x if piece.columns is None else x[:, piece.columns[rank]] for x, piece in zip(rows, pieces, strict=True)]


def _combine(parts: list[Tensor], piece: Piece) -> Tensor:
    """A result from those of all ranks, in the order of ranks: the same from run to run."""
    if piece.columns is not None:
        return torch.cat(parts, dim=1)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _shapes(pieces: Sequence[Piece], operation: Operation, layer: BaseLayer, rank: int) -> list[Shape]:
    """Shapes and dtypes of a rank's pieces."""
    found: list[Shape] = []
    for piece in pieces:
        width = operation.choices if piece.width == CHOICES else piece.width
        if piece.columns is not None:
            width = piece.columns[rank].stop - piece.columns[rank].start
        found.append(((operation.rows, width), torch.int64 if piece.is_index else layer.dtype))
    return found
