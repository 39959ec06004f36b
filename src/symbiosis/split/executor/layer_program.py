"""Layer programs: layers that follow each other, with the norms and sums between them, as one call.

In decoding a program runs from the attention of one layer to that of the next. In training it runs from the attention of
a layer to the layer's end (half a layer), and it has a backward program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from symbiosis.errors import BadCall
from symbiosis.split.executor.layers import BaseLayer, Block, Matrix, Norm, Rows
from symbiosis.types import Direction, LayerKind, ProgramOp

_HALF_LAYER = "a layer program with SAVE is half a layer: a matrix, sums, SAVE, a norm, a block, ADD_SAVED"


def is_program_op(handle: int) -> bool:
    return handle in ProgramOp._value2member_map_


class LayerProgram(BaseLayer):
    """A sequence of layers and ops. Results: the final rows; then the input of the final norm, or the saved rows; then the
    output of each layer after `HEADS`.

    Plain reference: the same steps, each a call of its own (tests/parity).
    """

    def __init__(self, handles: Sequence[int], layer_of: Callable[[int], BaseLayer]) -> None:
        """Raises `BadCall` unless each step accepts the result of the one before, `UnknownLayer` for unknown handles."""
        steps = [ProgramOp(each) if is_program_op(each) else layer_of(each) for each in handles]
        if not steps or isinstance(steps[0], ProgramOp):
            raise BadCall("a layer program begins with a layer")
        end = steps.index(ProgramOp.HEADS) if ProgramOp.HEADS in steps else len(steps)
        self._steps, heads = steps[:end], steps[end + 1 :]
        if any(not isinstance(step, Matrix | Block | Norm | ProgramOp) for step in self._steps):
            raise BadCall("a layer program consists of matrices, blocks, norms and ops")
        if any(not isinstance(head, Matrix | Block) for head in heads):
            raise BadCall("only matrices and blocks can follow HEADS in a layer program")
        self._heads = cast(list[BaseLayer], heads)
        first = steps[0]
        self._input_widths: list[int] = [first.spec.in_width]
        self._input_is_float32: list[bool] = [False]
        width = self._check_widths(first.spec.in_width)
        self.saves = ProgramOp.SAVE in self._steps
        if self.saves:
            self.half_layer()
        paths = (f"the layer program from {first.spec.paths[0]}",)
        super().__init__(replace(first.spec, kind=LayerKind.BLOCK, paths=paths, out_width=width), first.weights, first.module)
        self._ends_with_norm = isinstance(self._steps[-1], Norm)
        self._result_widths = [width] * (2 if self.saves or self._ends_with_norm else 1)
        self._result_widths += [head.spec.out_width for head in self._heads]

    def _check_widths(self, width: int) -> int:
        """The width of the final rows."""
        saved: int | None = None
        for step in self._steps:
            if isinstance(step, BaseLayer):
                _check_width(step, width)
                width = step.spec.out_width
            elif step in (ProgramOp.ADD, ProgramOp.ADD_FLOAT):
                self._input_widths.append(width)
                self._input_is_float32.append(step is ProgramOp.ADD_FLOAT)
            elif step in (ProgramOp.PUSH, ProgramOp.SAVE):
                saved = width
            elif saved != width:
                raise BadCall(f"ADD_SAVED takes saved rows of width {width}, got {'none' if saved is None else saved}")
        for head in self._heads:
            _check_width(head, width)
        return width

    def half_layer(self) -> tuple[Matrix, Norm, Block]:
        """The layers of x + block(norm(x)), where x is a matrix's result plus sums. Raises `BadCall` for other programs."""
        first, *sums, save, norm, block, add = self._steps if len(self._steps) >= 5 else [ProgramOp.ADD_SAVED] * 5
        if not (isinstance(first, Matrix) and isinstance(norm, Norm) and isinstance(block, Block)):
            raise BadCall(_HALF_LAYER)
        has_ops = (save, add) == (ProgramOp.SAVE, ProgramOp.ADD_SAVED) and {*sums} <= {ProgramOp.ADD, ProgramOp.ADD_FLOAT}
        if not has_ops or self._heads:
            raise BadCall(_HALF_LAYER)
        return first, norm, block

    def input_widths(self, direction: Direction) -> tuple[int | None, ...]:
        return tuple(self._input_widths)

    def input_dtype(self, index: int) -> torch.dtype:
        return torch.float32 if self._input_is_float32[index] else self.dtype

    def result_widths(self) -> list[int]:
        return self._result_widths

    def forward(self, rows: Rows, out: Rows | None = None) -> Rows:
        x, *addends = rows
        before = saved = x
        for step in self._steps:
            if isinstance(step, BaseLayer):
                before, x = x, step.forward((x,))[0]
            elif step is ProgramOp.ADD:
                x = x + addends.pop(0)
            elif step is ProgramOp.ADD_FLOAT:
                x = (x + addends.pop(0)).to(x.dtype)
            elif step in (ProgramOp.PUSH, ProgramOp.SAVE):
                saved = x
            else:
                x = x + saved
        results: list[Tensor] = [x, saved] if self.saves else [x, before] if self._ends_with_norm else [x]
        for head in self._heads:
            results += head.forward((x,), out and (out[len(results)],))
        return tuple(results)


class LayerProgramBackward(BaseLayer):
    """Backward of half a layer: from the saved rows and the gradient of the end to the gradients of input and saved rows.

    Plain reference: autograd through the same steps (tests/split/executor/test_layer_program.py).
    """

    def __init__(self, program: LayerProgram) -> None:
        """Raises `BadCall` for a program without SAVE."""
        self._matrix, self._norm, self._block = program.half_layer()
        super().__init__(program.spec, self._matrix.weights)

    def input_widths(self, direction: Direction) -> tuple[int | None, ...]:
        return (self.spec.out_width, self.spec.out_width)

    def gradient_widths(self) -> list[int]:
        return [self.spec.in_width, self.spec.out_width]

    def backward(self, rows: Rows, out: Rows | None = None) -> Rows:
        saved, grad = rows
        (inner,) = self._block.backward((*self._norm.forward((saved,)), grad))
        total = grad + self._norm.gradient(saved, inner)
        return (*self._matrix.backward((total,), out and out[:1]), total)


def _check_width(layer: BaseLayer, width: int) -> None:
    if layer.spec.in_width != width:
        raise BadCall(f"{layer.spec.paths[0]} takes rows of width {layer.spec.in_width}, got {width}")
