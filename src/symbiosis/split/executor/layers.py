"""Base layers as the executor runs them: pure functions of rows, without state between calls.

R = rows of all tenants in a batch, I / O = input and output width, K = experts per row.
Plain reference for every kind: the module that the layer replaces (tests/parity).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from symbiosis.errors import BadCall
from symbiosis.models.patches.linear import linear, patch_linears
from symbiosis.models.rms_norms import apply_rms_norm, epsilon_of, rounds_twice
from symbiosis.types import Direction, LayerKind, LayerSpec

Rows = tuple[Tensor, ...]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BaseLayer:
    """One hosted layer. `forward` and `backward` take joined, validated rows in the layer's dtype.

    They may write their results into `out`. The caller checks whether they did.
    """

    is_local = True
    """Whether this process computes it alone."""

    def __init__(self, spec: LayerSpec, weights: dict[str, Tensor], module: nn.Module | None = None) -> None:
        self.spec, self.weights = spec, weights
        self.module: Any = module
        first = next(iter(weights.values())) if module is None else next(module.parameters())
        self.dtype, self.device = first.dtype, first.device

    def input_widths(self, direction: Direction) -> tuple[int | None, ...]:
        """Expected width of each tensor of a call; None for integer indices."""
        return (self.spec.in_width,) if direction is Direction.FORWARD else (self.spec.out_width,)

    def check(self, direction: Direction, rows: Rows) -> None:
        """Raise `BadCall` unless these rows fit. Called for each call, before its rows are joined with others."""
        widths = self.input_widths(direction)
        if len(rows) != len(widths):
            raise BadCall(f"{self.spec.paths[0]} takes {len(widths)} tensors {direction.name.lower()}, got {len(rows)}")
        for tensor, width in zip(rows, widths, strict=True):
            self.check_rows(tensor, width)

    def check_rows(self, tensor: Tensor, width: int | None) -> None:
        if tensor.dtype not in _FLOATS:
            raise BadCall(f"{self.spec.paths[0]} takes floating point rows, got {tensor.dtype}")
        if width is not None and tensor.shape[1] != width:
            raise BadCall(f"{self.spec.paths[0]} takes rows of width {width}, got {tensor.shape[1]}")

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        raise BadCall(f"{self.spec.paths[0]} has no forward call")

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        raise BadCall(f"{self.spec.paths[0]} has no backward call")

    def input_dtype(self, index: int) -> torch.dtype:
        """The dtype in which the layer reads its input of this index, if that is floating point."""
        return self.dtype

    def result_widths(self) -> list[int]:
        """Widths of the results of `forward`."""
        return [self.spec.out_width]

    def gradient_widths(self) -> list[int]:
        """Widths of the results of `backward`."""
        return [self.spec.in_width]

    def with_bias(self) -> BaseLayer:
        """The same layer with its bias added in forward."""
        raise BadCall(f"{self.spec.paths[0]} has no bias to add")

    def weight(self, name: str) -> Tensor | None:
        """A weight as tenants may download it; None if there is none of this name."""
        return self.weights.get(name)

    def row_squares(self) -> Tensor:
        """Squared norm of each output's weights, [1, O]. DoRA needs these of a matrix."""
        raise BadCall(f"{self.spec.paths[0]} is not a matrix: it has no row norms")


class Matrix(BaseLayer):
    """`nn.Linear` or `Conv1D`. Without its bias unless the call includes it: tenants may train their own."""

    def __init__(self, spec: LayerSpec, weights: dict[str, Tensor], bias: Tensor | None = None) -> None:
        super().__init__(spec, weights)
        self.weight_OI = weights["weight"] if spec.kind is LayerKind.LINEAR else weights["weight"].t()
        self.weight_IO = self.weight_OI.t()
        self.bias: Tensor | None = None
        self._with_bias: Matrix | None = None
        self._row_squares: Tensor | None = None
        if bias is not None:
            self._with_bias = Matrix(spec, weights)
            self._with_bias.bias = bias

    def with_bias(self) -> BaseLayer:
        return self._with_bias or super().with_bias()

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        if out is None:
            return (linear(rows[0], self.weight_OI, self.bias),)
        if self.bias is None:
            return (torch.mm(rows[0], self.weight_IO, out=out[0]),)
        return (torch.addmm(self.bias, rows[0], self.weight_IO, out=out[0]),)

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return (torch.mm(rows[0], self.weight_OI, out=out[0] if out else None),)

    def forward_group(self, group: Sequence[Matrix], rows: Rows, out: Rows | None) -> Rows:
        """The results of several matrices that read the same rows; this is the first of them."""
        return tuple(layer.forward(rows, out and (out[i],))[0] for i, layer in enumerate(group))

    def backward_group(self, group: Sequence[Matrix], rows: Rows, out: Rows | None) -> Rows:
        """The gradient of the rows that several matrices read; this is the first of them."""
        (total,) = self.backward(rows[:1], out)
        for layer, grad in zip(group[1:], rows[1:], strict=True):
            total.addmm_(grad, layer.weight_OI)
        return (total,)

    def row_squares(self) -> Tensor:
        if self._row_squares is None:  # cached: repeated fetches must not delay other tenants
            # In parts: the whole matrix in float64 may exceed the free memory.
            parts = torch.split(self.weight_OI, 1024)
            self._row_squares = torch.cat([part.double().square().sum(dim=1) for part in parts])[None, :]
        return self._row_squares.clone()


class Embedding(BaseLayer):
    """Token embeddings on the executor: ids in, rows out. Ids have no gradient."""

    def check(self, direction: Direction, rows: Rows) -> None:
        if direction is Direction.BACKWARD:
            raise BadCall("embeddings have no backward call")
        if len(rows) != 1 or rows[0].shape[1] != 1:
            raise BadCall("an embedding takes one column of ids")
        check_index(rows[0], self.spec)

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return (F.embedding(rows[0][:, 0], self.weights["weight"]),)


def differentiate(function: Callable[..., Tensor], inputs: Rows, grad: Tensor) -> Rows:
    """Gradients of the inputs of a function, computed on this thread.

    Autograd's own thread for a GPU may be held by a tenant in this process that waits for the executor: a deadlock.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(function(*inputs), inputs, grad)


class Block(BaseLayer):
    """A row-wise sub-module as one call. Backward recomputes it from the rows, which the tenant sends again."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        super().__init__(spec, {}, module)
        patch_linears(module)

    def input_widths(self, direction: Direction) -> tuple[int | None, ...]:
        return (self.spec.in_width,) if direction is Direction.FORWARD else (self.spec.in_width, self.spec.out_width)

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return (self.module(rows[0]),)

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return differentiate(self.module, rows[:1], rows[1])


class GatedBlock(Block):
    """The gated MLP, down(act(gate(x)) · up(x)), without autograd: backward runs `down` once. Plain reference: `Block`."""

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        module = self.module
        return (module.down_proj(module.act_fn(module.gate_proj(rows[0])).mul_(module.up_proj(rows[0]))),)

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        (x, grad), module = rows, self.module
        gate, up = module.gate_proj(x), module.up_proj(x)
        inner = grad @ module.down_proj.weight
        if isinstance(module.act_fn, nn.SiLU):
            grad_up = F.silu(gate).mul_(inner)
            grad_gate = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        else:
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):  # as `differentiate`
                gate.requires_grad_()
                (grad_gate,) = torch.autograd.grad(act := module.act_fn(gate), gate, inner * up)
            grad_up = inner.mul_(act.detach())
        result = torch.mm(grad_gate, module.gate_proj.weight, out=out[0] if out else None)
        return (result.addmm_(grad_up, module.up_proj.weight),)

    @classmethod
    @torch.no_grad()
    def matches(cls, spec: LayerSpec, module: nn.Module) -> bool:
        """Whether this module computes a gated MLP: its children have the names, and a trial run the results."""
        names = ["gate_proj", "up_proj", "down_proj"]
        linears = [part for name, part in module.named_children() if name in names and isinstance(part, nn.Linear)]
        if len(linears) != len(names) or not isinstance(getattr(module, "act_fn", None), nn.Module):
            return False
        # no other parameters than those of the three projections
        if sum(1 for _ in module.parameters()) != sum(1 for part in linears for _ in part.parameters()):
            return False
        weight, generator = linears[0].weight, torch.Generator().manual_seed(0)
        # rows of very different magnitude: some modules clamp large values
        x = torch.randn(3, spec.in_width, generator=generator) * torch.tensor([[1.0], [1e2], [1e4]])
        grad = torch.randn(3, spec.out_width, generator=generator)
        x, grad = x.to(weight), grad.to(weight)
        plain, ours = Block(spec, module), cls(spec, module)
        try:
            return is_close(ours.forward((x,))[0], plain.forward((x,))[0]) and is_close(
                ours.backward((x, grad))[0], plain.backward((x, grad))[0]
            )
        except Exception:  # noqa: BLE001 - a module that fails is no gated MLP
            return False


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal up to rounding, row by row."""
    found, expected = found.float(), expected.float()
    same = (found - expected).abs() <= 0.02 * expected.abs().amax(dim=1, keepdim=True)
    return bool((same | (found == expected) | (found.isnan() & expected.isnan())).all())


class Norm(BaseLayer):
    """A norm between layers. It has no backward call: only `LayerProgramBackward` uses its gradient."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        super().__init__(spec, {}, module)
        self._rounds_twice = rounds_twice(module) if self.device.type == "cuda" else None

    def check(self, direction: Direction, rows: Rows) -> None:
        if direction is Direction.BACKWARD:
            raise BadCall("norms have no backward call")
        super().check(direction, rows)

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        if self._rounds_twice is None:
            return (self.module(rows[0]),)
        weight = self.module.weight.detach()
        return (apply_rms_norm(rows[0], weight, epsilon_of(self.module), twice=self._rounds_twice),)

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the rows."""
        return differentiate(lambda x: self.forward((x,))[0], (x,), grad)[0]


class Experts(BaseLayer):
    """Stacked experts of an MoE: (rows, indices, weights) in, rows out. The tenant computes the routing."""

    def check(self, direction: Direction, rows: Rows) -> None:
        expected = 3 if direction is Direction.FORWARD else 4
        if len(rows) != expected:
            raise BadCall(f"{self.spec.paths[0]} takes {expected} tensors, got {len(rows)}")
        self.check_rows(rows[0], self.spec.in_width)
        check_index(rows[1], self.spec)
        self.check_rows(rows[2], rows[1].shape[1])
        if expected == 4:
            self.check_rows(rows[3], self.spec.out_width)

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        return (self.module(*rows),)

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        x, index, weight, grad = rows
        return differentiate(lambda x, weight: self.module(x, index, weight), (x, weight), grad)


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
    assert module is not None, "experts, blocks and norms have a module"
    if spec.kind is LayerKind.NORM:
        return Norm(spec, module)
    if spec.kind is LayerKind.EXPERTS:
        return Experts(spec, weights, module)
    return (GatedBlock if GatedBlock.matches(spec, module) else Block)(spec, module)


def run(layers: Sequence[BaseLayer], direction: Direction, rows: Rows, out: Rows | None = None) -> Rows:
    """Run one layer, or several matrices that read the same rows, on joined rows; into `out` if given.

    Forward returns one result per layer. Backward of several returns the one gradient of their shared rows.
    """
    results = _run(layers, direction, rows, out)
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        if result is not target:
            target.copy_(result)
    return out


def _run(layers: Sequence[BaseLayer], direction: Direction, rows: Rows, out: Rows | None) -> Rows:
    if len(layers) == 1:
        return layers[0].backward(rows, out) if direction.is_backward else layers[0].forward(rows, out)
    group = cast(Sequence[Matrix], layers)
    if direction is Direction.FORWARD:
        return group[0].forward_group(group, rows, out)
    return group[0].backward_group(group, rows, out)
