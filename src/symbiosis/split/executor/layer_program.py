"""Layers that follow each other, with the norms and sums between them, as one call: a tenant's way onward.

In decoding that is the way from the attention of one layer to that of the next. In
training it is half a layer, from its attention to its end, and there is a way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from symbiosis.errors import BadCall
from symbiosis.split.executor.layers import BaseLayer, Block, Matrix, Norm, Rows
from symbiosis.types import Direction, LayerKind, LayerSpec, ProgramOp

_Step = BaseLayer | ProgramOp
_HALF = "what is saved for gradients is half a layer: a matrix, sums, SAVE, a norm, a block, ADD_SAVED"


def is_turn(handle: int) -> bool:
    return handle in ProgramOp._value2member_map_


class LayerProgram(BaseLayer):
    """A program of layers and turns. Its answers: the rows at its end; what its last norm read, if it ends with one, or what
    is saved; then what the layers after `HEADS` make of these rows.

    Plain reference: the same steps, each a call of its own (tests/parity).
    """

    def __init__(self, program: Sequence[int], layer_of: Callable[[int], BaseLayer]) -> None:
        """Raises `BadCall` unless each step can take what the one before gives, `UnknownLayer` for what there is not."""
        steps: list[_Step] = [ProgramOp(each) if is_turn(each) else layer_of(each) for each in program]
        if not steps or isinstance(steps[0], ProgramOp):
            raise BadCall("a call onward begins with a layer")
        end = steps.index(ProgramOp.HEADS) if ProgramOp.HEADS in steps else len(steps)
        self._steps, self._readers = steps[:end], steps[end + 1 :]
        if any(not isinstance(step, Matrix | Block | Norm | ProgramOp) for step in self._steps):
            raise BadCall("only matrices, blocks, norms and sums can be on the way of a call onward")
        if any(not isinstance(step, Matrix | Block) for step in self._readers):
            raise BadCall("only matrices and blocks can read what a call onward comes to")
        first = steps[0]
        self._widths: list[int] = [first.spec.in_width]
        self._floats: list[bool] = [False]
        width = self._check(first.spec.in_width)
        self.saves = ProgramOp.SAVE in self._steps
        if self.saves:
            self.half()
        spec = LayerSpec(
            handle=first.spec.handle,
            identity="",
            kind=LayerKind.BLOCK,
            paths=(f"the way from {first.spec.paths[0]}",),
            in_width=first.spec.in_width,
            out_width=width,
        )
        super().__init__(spec, first.weights, getattr(first, "module", None))
        self._results = [width] * (2 if self.saves or self._ends_with_norm() else 1)
        self._results += [reader.spec.out_width for reader in cast(list[BaseLayer], self._readers)]

    def _check(self, width: int) -> int:
        """How wide the rows are at the end."""
        kept: int | None = None
        for step in self._steps:
            if isinstance(step, BaseLayer):
                _check_width(step, width)
                width = step.spec.out_width
            elif step in (ProgramOp.ADD, ProgramOp.ADD_FLOAT):
                self._widths.append(width)
                self._floats.append(step is ProgramOp.ADD_FLOAT)
            elif step in (ProgramOp.PUSH, ProgramOp.SAVE):
                kept = width
            elif kept != width:
                raise BadCall(f"rows of width {width} cannot be added to kept ones: {'none' if kept is None else kept}")
        for reader in cast(list[BaseLayer], self._readers):
            _check_width(reader, width)
        return width

    def half(self) -> tuple[Matrix, Norm, Block]:
        """The layers of half a layer: x + block(norm(x)), where x is what a matrix gives, and sums. Raises `BadCall`."""
        first, *sums, save, norm, block, back = self._steps if len(self._steps) >= 5 else [ProgramOp.ADD_SAVED] * 5
        if not (isinstance(first, Matrix) and isinstance(norm, Norm) and isinstance(block, Block)):
            raise BadCall(_HALF)
        if (
            (save, back) != (ProgramOp.SAVE, ProgramOp.ADD_SAVED)
            or not {*sums} <= {ProgramOp.ADD, ProgramOp.ADD_FLOAT}
            or self._readers
        ):
            raise BadCall(_HALF)
        return first, norm, block

    def _ends_with_norm(self) -> bool:
        return isinstance(self._steps[-1], Norm)

    def widths(self, direction: Direction) -> tuple[int | None, ...]:
        return tuple(self._widths)

    def takes(self, index: int) -> torch.dtype:
        return torch.float32 if self._floats[index] else self.dtype

    def results(self) -> list[int]:
        return self._results

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        x, *others = rows
        before = kept = x
        for step in self._steps:
            if isinstance(step, BaseLayer):
                before, x = x, step.forward((x,))[0]
            elif step is ProgramOp.ADD:
                x = x + others.pop(0)
            elif step is ProgramOp.ADD_FLOAT:
                x = (x + others.pop(0)).to(x.dtype)
            elif step in (ProgramOp.PUSH, ProgramOp.SAVE):
                kept = x
            else:
                x = x + kept
        results: list[Tensor] = [x, kept] if self.saves else [x, before] if self._ends_with_norm() else [x]
        for reader in cast(list[BaseLayer], self._readers):
            results += reader.forward((x,), out and (out[len(results)],))
        return tuple(results)


class LayerProgramBackward(BaseLayer):
    """From the rows that half a layer saved and the gradient of its end to the gradients of its first rows and of the saved.

    Plain reference: autograd through the same steps (tests/split/executor/test_layer_program.py).
    """

    def __init__(self, way: LayerProgram) -> None:
        """Raises `BadCall` for a way of which nothing is saved."""
        self._matrix, self._norm, self._block = way.half()
        super().__init__(way.spec, self._matrix.weights)

    def widths(self, direction: Direction) -> tuple[int | None, ...]:
        return (self.spec.out_width, self.spec.out_width)

    def gradients(self) -> list[int]:
        return [self.spec.in_width, self.spec.out_width]

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        saved, grad = rows
        (inner,) = self._block.backward((*self._norm.forward((saved,)), grad))
        total = grad + self._norm.gradient(saved, inner)
        return (*self._matrix.backward((total,), out and out[:1]), total)


def _check_width(layer: BaseLayer, width: int) -> None:
    if layer.spec.in_width != width:
        raise BadCall(f"{layer.spec.paths[0]} takes rows of width {layer.spec.in_width}, got {width}")
