"""Base layers as the executor runs them: pure functions of rows, nothing kept between calls.

R = rows of all tenants in a batch, I / O = input and output width, K = experts per row.
Plain reference for every kind: the module it was cut out of (tests/parity).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.errors import BadCall
from symbiosis.executor.product import product, speed_up
from symbiosis.types import Direction, LayerKind, LayerSpec

Rows = tuple[Tensor, ...]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BaseLayer:
    """One hosted layer. `forward` and `backward` take joined, checked rows in the layer's dtype."""

    def __init__(self, spec: LayerSpec, weights: dict[str, Tensor], module: nn.Module | None = None) -> None:
        self.spec = spec
        self.weights = weights
        first = next(iter(weights.values())) if module is None else next(module.parameters())
        self.dtype, self.device = first.dtype, first.device

    def widths(self, direction: Direction) -> tuple[int | None, ...]:
        """Expected width of each tensor of a call; None for integer indices."""
        return (self.spec.in_width,) if direction is Direction.FORWARD else (self.spec.out_width,)

    def check(self, direction: Direction, rows: Rows) -> None:
        """Raise `BadCall` unless these rows fit. Everything here is decided per call, before any joining."""
        widths = self.widths(direction)
        if len(rows) != len(widths):
            raise BadCall(f"{self.spec.paths[0]} takes {len(widths)} tensors {direction.name.lower()}, got {len(rows)}")
        for tensor, width in zip(rows, widths, strict=True):
            self._check_rows(tensor, width)

    def _check_rows(self, tensor: Tensor, width: int | None) -> None:
        if tensor.dtype not in FLOATS:
            raise BadCall(f"{self.spec.paths[0]} takes floating point rows, got {tensor.dtype}")
        if width is not None and tensor.shape[1] != width:
            raise BadCall(f"{self.spec.paths[0]} takes rows of width {width}, got {tensor.shape[1]}")

    def forward(self, rows: Rows) -> Rows:
        raise BadCall(f"{self.spec.paths[0]} has no forward call")

    def backward(self, rows: Rows) -> Rows:
        raise BadCall(f"{self.spec.paths[0]} has no backward call")

    def with_bias(self) -> BaseLayer:
        """The same layer with its bias added in forward."""
        raise BadCall(f"{self.spec.paths[0]} has no bias to add")

    def row_squares(self) -> Tensor:
        """Squared norm of each output's weights, [1, O]: what DoRA needs of a matrix."""
        raise BadCall(f"{self.spec.paths[0]} is no matrix")


class Matrix(BaseLayer):
    """`nn.Linear` or `Conv1D`. Without its bias, unless the tenant asks for it: tenants may train their own."""

    def __init__(self, spec: LayerSpec, weights: dict[str, Tensor], bias: Tensor | None = None) -> None:
        super().__init__(spec, weights)
        self.weight_OI = weights["weight"] if spec.kind is LayerKind.LINEAR else weights["weight"].t()
        self.bias: Tensor | None = None
        self._with_bias: Matrix | None = None
        if bias is not None:
            self._with_bias = Matrix(spec, weights)
            self._with_bias.bias = bias

    def with_bias(self) -> BaseLayer:
        return self._with_bias or super().with_bias()

    def forward(self, rows: Rows) -> Rows:
        return (product(rows[0], self.weight_OI, self.bias),)

    def backward(self, rows: Rows) -> Rows:
        return (rows[0] @ self.weight_OI,)

    def row_squares(self) -> Tensor:
        # a few rows at a time: the whole matrix in float64 may be larger than all that is free
        return torch.cat([part.double().square().sum(dim=1) for part in torch.split(self.weight_OI, 1024)])[None, :]


class Embedding(BaseLayer):
    """Word embeddings on the executor: ids in, rows out. Ids have no gradient."""

    def check(self, direction: Direction, rows: Rows) -> None:
        if direction is Direction.BACKWARD:
            raise BadCall("embeddings have no backward call")
        if len(rows) != 1 or rows[0].shape[1] != 1:
            raise BadCall("an embedding takes one column of ids")
        check_index(rows[0], self.spec)

    def forward(self, rows: Rows) -> Rows:
        return (F.embedding(rows[0][:, 0], self.weights["weight"]),)


@contextmanager
def _recomputing() -> Iterator[None]:
    """Autograd on this thread alone.

    Usually backward on a GPU runs on autograd's one thread for that GPU. A
    tenant in this process may hold just that thread while it waits for us.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class Block(BaseLayer):
    """A row-wise sub-module as one call; backward recomputes it from the rows the tenant sends again."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        super().__init__(spec, {}, module)
        speed_up(module)
        self.module = module

    def widths(self, direction: Direction) -> tuple[int | None, ...]:
        if direction is Direction.FORWARD:
            return (self.spec.in_width,)
        return (self.spec.in_width, self.spec.out_width)

    def forward(self, rows: Rows) -> Rows:
        return (self.module(rows[0]),)

    def backward(self, rows: Rows) -> Rows:
        x, grad = rows
        with _recomputing():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.module(x), x, grad)


class Experts(BaseLayer):
    """Stacked experts of an MoE: (rows, indices, weights) in, rows out; routing stays with the tenant."""

    def __init__(self, spec: LayerSpec, weights: dict[str, Tensor], module: nn.Module) -> None:
        super().__init__(spec, weights, module)
        self.module = module

    def check(self, direction: Direction, rows: Rows) -> None:
        expected = 3 if direction is Direction.FORWARD else 4
        if len(rows) != expected:
            raise BadCall(f"{self.spec.paths[0]} takes {expected} tensors, got {len(rows)}")
        self._check_rows(rows[0], self.spec.in_width)
        check_index(rows[1], self.spec)
        self._check_rows(rows[2], rows[1].shape[1])
        if expected == 4:
            self._check_rows(rows[3], self.spec.out_width)

    def forward(self, rows: Rows) -> Rows:
        return (self.module(*rows),)

    def backward(self, rows: Rows) -> Rows:
        x, index, weight, grad = rows
        with _recomputing():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(self.module(x, index, weight), (x, weight), grad)


def check_index(index: Tensor, spec: LayerSpec) -> None:
    if index.dtype != torch.int64:
        raise BadCall(f"{spec.paths[0]} takes int64 indices, got {index.dtype}")
    if index.shape[1] > max(1, spec.experts):
        raise BadCall(f"{spec.paths[0]} takes at most {spec.experts} indices a row, got {index.shape[1]}")
    low, high = (int(bound) for bound in torch.aminmax(index)) if index.numel() else (0, 0)
    if low < 0 or high >= spec.experts:
        raise BadCall(f"{spec.paths[0]} has indices 0 to {spec.experts - 1}, got {low} to {high}")


def make_layer(spec: LayerSpec, weights: dict[str, Tensor], bias: Tensor | None, module: nn.Module | None) -> BaseLayer:
    if spec.kind in (LayerKind.LINEAR, LayerKind.CONV1D):
        return Matrix(spec, weights, bias)
    if spec.kind is LayerKind.EMBEDDING:
        return Embedding(spec, weights)
    assert module is not None, "experts and blocks come with their module"
    return Block(spec, module) if spec.kind is LayerKind.BLOCK else Experts(spec, weights, module)


def run(layers: Sequence[BaseLayer], direction: Direction, rows: Rows) -> Rows:
    """Run one layer, or several matrices that read the same rows, on joined rows.

    Forward gives one result per layer; backward of several gives the one
    gradient of the rows they shared.
    """
    if len(layers) == 1:
        return layers[0].forward(rows) if direction is Direction.FORWARD else layers[0].backward(rows)
    if direction is Direction.FORWARD:
        return tuple(layer.forward(rows)[0] for layer in layers)
    total = layers[0].backward(rows[:1])[0]
    for layer, grad in zip(layers[1:], rows[1:], strict=True):
        total += layer.backward((grad,))[0]
    return (total,)
