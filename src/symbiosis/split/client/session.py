"""A tenant's session with an executor: layer calls, weights where allowed, tokenizer, statistics."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from symbiosis.errors import BadCall, NoTokenizer
from symbiosis.models.client_part import unpack_tokenizer
from symbiosis.split.client.blob_download import download
from symbiosis.transport.base import Link, flatten_rows, unflatten_rows
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import WITH_BIAS, Direction, LayerKind, LayerSpec, Limits, Manifest

_MAX_SHAPES = 4096
_PART_BYTES = 1 << 20  # least size of a part, with its reply, of a call that is divided to be in flight at once
_SPARE_BYTES = 4096  # alignment of tensors within a message


def reply_widths(layers: tuple[LayerSpec, ...], direction: Direction, rows: tuple[Tensor, ...]) -> list[int]:
    """The widths of the tensors in the reply to a layer call."""
    if direction is Direction.FORWARD:
        return [layer.out_width for layer in layers]
    if layers[0].kind is LayerKind.EXPERTS:
        return [layers[0].in_width, rows[1].shape[-1]]
    return [layers[0].in_width]


@dataclass(frozen=True, slots=True)
class _CallShape:
    """What all calls of the same layers with rows of the same widths have in common."""

    handles: tuple[int, ...]
    widths: list[int]
    max_rows: int
    """Of one message."""
    row_bytes: int
    """Of one row, in the call and in its reply."""


class ClientSession:
    """The object behind `model.symbiosis`. Copies of a model share it. It cannot be pickled."""

    def __init__(self, link: Link, manifest: Manifest, limits: Limits, model_class: type) -> None:
        self.model_class = model_class
        self.manifest = manifest
        self.limits = limits
        self.defer_training = True
        """Whether training defers the steps between attention and layer end. Set it to False if steps are refused."""
        self._link = link
        self._shapes: dict[Any, _CallShape] = {}
        self._row_squares: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def tokenizer(self) -> Any:
        """The model's tokenizer, from the executor. Raises `NoTokenizer`."""
        ref = self.manifest.tokenizer
        if ref is None:
            raise NoTokenizer(f"the executor serves {self.manifest.name!r} without a tokenizer: load the tokenizer yourself")
        download(self._link, ref)
        return AutoTokenizer.from_pretrained(unpack_tokenizer(ref), trust_remote_code=False)

    def stats(self) -> dict[str, Any]:
        """The executor's statistics: calls, batches, mean batch size, tokens, per tenant."""
        return self._link.request(Message(Kind.STATS)).body

    def traffic(self) -> dict[str, int]:
        """Round trips, messages and bytes of this session so far."""
        return asdict(self._link.traffic())

    def close(self) -> None:
        """End the session; layer calls raise `Closed` from now on."""
        self._link.close()

    def call(
        self,
        layers: tuple[LayerSpec, ...],
        direction: Direction,
        rows: tuple[Tensor, ...],
        *,
        training: bool,
        with_bias: tuple[bool, ...] = (),
    ) -> tuple[Tensor, ...]:
        """One layer call, or several where it exceeds the executor's limits.

        The first tensor's leading shape is that of the results.
        """
        key = (layers, direction, with_bias, *[(t.shape[-1], t.dtype) for t in rows])
        shape = self._shapes.get(key) or self._remember(key, self._shape_call(layers, direction, rows, with_bias))
        return self._call_in_parts(shape, direction, rows, training=training)

    def run_program(
        self, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...], *, training: bool = False
    ) -> tuple[Tensor, ...]:
        """A layer program, as handles and `ProgramOp`s. `widths` are those of the results."""
        shape = self._shapes.get(program) or self._shape_program(program, program, widths, rows)
        return self._call_in_parts(shape, Direction.PROGRAM, rows, training=training)

    def run_program_backward(self, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of a program, from its saved rows and the gradient of its result."""
        key = ("backward", *program)
        shape = self._shapes.get(key) or self._shape_program(key, program, widths, rows)
        return self._call_in_parts(shape, Direction.PROGRAM_BACKWARD, rows, training=True)

    def _shape_program(self, key: Any, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...]) -> _CallShape:
        row_bytes, max_rows = self._row_limits(rows, widths)
        max_rows = min(max_rows, max(1, self.limits.max_rows // len(program)))
        return self._remember(key, _CallShape(program, widths, max_rows, row_bytes))

    def _remember(self, key: Any, shape: _CallShape) -> _CallShape:
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        self._shapes[key] = shape
        return shape

    def _shape_call(
        self, layers: tuple[LayerSpec, ...], direction: Direction, rows: tuple[Tensor, ...], with_bias: tuple[bool, ...]
    ) -> _CallShape:
        widths = reply_widths(layers, direction, rows)
        flags = with_bias or (False,) * len(layers)
        handles = tuple(layer.handle | (WITH_BIAS * flag) for layer, flag in zip(layers, flags, strict=True))
        row_bytes, max_rows = self._row_limits(rows, widths)
        if layers[0].kind is LayerKind.EXPERTS:
            max_rows = max(1, min(max_rows, self.limits.max_choices // rows[1].shape[-1]))
        return _CallShape(handles, widths, max_rows, row_bytes)

    def _row_limits(self, rows: tuple[Tensor, ...], widths: list[int]) -> tuple[int, int]:
        """The bytes of one row, in the call and in its reply; and how many rows fit into one message."""
        sent = sum(t.shape[-1] * t.element_size() for t in rows)
        size = rows[0].element_size() if rows[0].is_floating_point() else 8  # the reply to ids has the layer's dtype
        received = size * sum(widths)
        max_rows = (self.limits.max_bytes - _SPARE_BYTES) // max(sent, received)
        return sent + received, max(1, min(self.limits.max_rows, max_rows))

    def _call_in_parts(
        self, shape: _CallShape, direction: Direction, rows: tuple[Tensor, ...], *, training: bool
    ) -> tuple[Tensor, ...]:
        leading, device = rows[0].shape[:-1], rows[0].device
        if device.type == "meta":
            raise BadCall("rows on the meta device have no values, so the executor cannot compute with them")
        count, parts = math.prod(leading), [rows]
        number = min(self._link.max_in_flight, count, count * shape.row_bytes // _PART_BYTES)
        number = max(number, -(-count // shape.max_rows))
        if number > 1:
            length = -(-count // number)  # parts of about the same length
            parts = list(zip(*[torch.split(t, length) for t in flatten_rows(rows)], strict=True))
        messages = [Message(Kind.CALL, 0, shape.handles, direction, training, part) for part in parts]
        replies = self._link.call_all(messages, shape.widths)
        results = replies[0]
        if len(replies) > 1:
            results = unflatten_rows(tuple([torch.cat(column) for column in zip(*replies, strict=True)]), leading)
        return results if results[0].device == device else tuple([result.to(device) for result in results])

    def fetch_weight(self, layer: LayerSpec, name: str) -> Tensor:
        """The values of a base weight. Raises `WeightsWithheld` where the provider does not allow it."""
        shape = dict(layer.weights)[name]
        parts: list[Tensor] = []
        while (start := sum(part.shape[0] for part in parts)) < math.prod(shape[:-1]):
            body = {"what": "weight", "name": name, "start": start}
            parts.append(self._link.request(Message(Kind.FETCH, layers=(layer.handle,), body=body)).tensors[0])
        return torch.cat(parts).reshape(shape).clone()

    def fetch_row_squares(self, layer: LayerSpec) -> Tensor:
        """The squared norm of each output's weights in float64, [O]."""
        with self._lock:
            if layer.handle not in self._row_squares:
                message = Message(Kind.FETCH, layers=(layer.handle,), body={"what": "row_squares"})
                self._row_squares[layer.handle] = self._link.request(message).tensors[0][0].clone()
            return self._row_squares[layer.handle]

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientSession:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a session with an executor cannot be pickled: connect again in the other process")
