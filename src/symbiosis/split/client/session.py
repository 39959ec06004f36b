"""A tenant's session with an executor: layer calls, weights where allowed, tokenizer, figures."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from symbiosis.errors import BadCall, NoTokenizer
from symbiosis.models.client_part import unpack_tokenizer
from symbiosis.split.client.blob_download import download
from symbiosis.transport.base import Link, as_rows, shaped
from symbiosis.transport.messages import Kind, Message
from symbiosis.types import WITH_BIAS, Direction, LayerKind, LayerSpec, Limits, Manifest

_MOST_FORMS = 4096
_SPARE_BYTES = 4096  # alignment of tensors within a message


def answer_widths(layers: tuple[LayerSpec, ...], direction: Direction, rows: tuple[Tensor, ...]) -> list[int]:
    """How wide the tensors are that come back."""
    if direction is Direction.FORWARD:
        return [layer.out_width for layer in layers]
    if layers[0].kind is LayerKind.EXPERTS:
        return [layers[0].in_width, rows[1].shape[-1]]
    return [layers[0].in_width]


@dataclass(frozen=True, slots=True)
class _Form:
    """What all calls of some layers with rows of some widths have in common."""

    handles: tuple[int, ...]
    widths: list[int]
    rows: int
    """The most that one call takes."""


class ClientSession:
    """What stands behind `model.symbiosis`. Copies of a model share it; it cannot be pickled."""

    def __init__(self, link: Link, manifest: Manifest, limits: Limits, model_class: type) -> None:
        self.model_class = model_class
        self.manifest = manifest
        self.limits = limits
        self.defer_training = True
        """Whether half a layer may be one call in training (`half`): False if a step was refused for it each time."""
        self._link = link
        self._forms: dict[Any, _Form] = {}
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
        """The executor's figures: calls, batches, mean batch, tokens, per tenant."""
        return self._link.request(Message(Kind.STATS)).body

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
        """One layer call; cut into several where it is longer than the executor takes.

        Rows are in any shape, the first tensor's; so are those of the answer.
        """
        key = (layers, direction, with_bias, *[(t.shape[-1], t.dtype) for t in rows])
        form = self._forms.get(key)
        if form is None:
            form = self._keep(key, self._form(layers, direction, rows, with_bias))
        return self._in_parts(form, direction, rows, training=training)

    def run_program(
        self, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...], *, training: bool = False
    ) -> tuple[Tensor, ...]:
        """Layers that follow each other, by handles and `Turn`s, as one such call that answers with tensors of these widths."""
        form = self._forms.get(program) or self._keep(program, self._way(program, widths, rows))
        return self._in_parts(form, Direction.ONWARD, rows, training=training)

    def run_program_backward(self, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of such a call, from what it saved and the gradient of its end."""
        key = ("home", *program)
        form = self._forms.get(key) or self._keep(key, self._way(program, widths, rows))
        return self._in_parts(form, Direction.HOMEWARD, rows, training=True)

    def _way(self, program: tuple[int, ...], widths: list[int], rows: tuple[Tensor, ...]) -> _Form:
        most = min(self._most_rows(rows, widths), max(1, self.limits.max_rows // len(program)))
        return _Form(program, widths, most)

    def _keep(self, key: Any, form: _Form) -> _Form:
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        self._forms[key] = form
        return form

    def _in_parts(self, form: _Form, direction: Direction, rows: tuple[Tensor, ...], *, training: bool) -> tuple[Tensor, ...]:
        ahead, device = rows[0].shape[:-1], rows[0].device
        if device.type == "meta":
            raise BadCall("rows on the meta device have no numbers, so the executor cannot compute with them")
        count = math.prod(ahead)
        if count <= form.rows:
            results = self._one(form, direction, rows, training=training)
        else:
            most = -(-count // -(-count // form.rows))  # in as many parts, of about the same length
            flat = zip(*[torch.split(t, most) for t in as_rows(rows)], strict=True)
            parts = [self._one(form, direction, part, training=training) for part in flat]
            results = shaped(tuple([torch.cat(column) for column in zip(*parts, strict=True)]), ahead)
        return results if results[0].device == device else tuple([result.to(device) for result in results])

    def _one(self, form: _Form, direction: Direction, rows: tuple[Tensor, ...], *, training: bool) -> tuple[Tensor, ...]:
        message = Message(Kind.CALL, layers=form.handles, direction=direction, training=training, tensors=rows)
        return self._link.call(message, form.widths)

    def _form(
        self, layers: tuple[LayerSpec, ...], direction: Direction, rows: tuple[Tensor, ...], with_bias: tuple[bool, ...]
    ) -> _Form:
        widths = answer_widths(layers, direction, rows)
        flags = with_bias or (False,) * len(layers)
        handles = tuple(layer.handle | (WITH_BIAS * flag) for layer, flag in zip(layers, flags, strict=True))
        most = self._most_rows(rows, widths)
        if layers[0].kind is LayerKind.EXPERTS:
            most = max(1, min(most, self.limits.max_choices // rows[1].shape[-1]))
        return _Form(handles, widths, most)

    def _most_rows(self, rows: tuple[Tensor, ...], widths: list[int]) -> int:
        """How many rows of such a call and its answer a message takes."""
        sent = sum(t.shape[-1] * t.element_size() for t in rows)
        size = rows[0].element_size() if rows[0].is_floating_point() else 8  # ids are answered in the layer's dtype
        wire = max(sent, size * sum(widths))
        return max(1, min(self.limits.max_rows, (self.limits.max_bytes - _SPARE_BYTES) // wire))

    def fetch_weight(self, layer: LayerSpec, name: str) -> Tensor:
        """A base weight itself. Raises `WeightsWithheld` where the provider does not allow it."""
        shape = dict(layer.weights)[name]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        parts: list[Tensor] = []
        while (start := sum(part.shape[0] for part in parts)) < rows:
            body = {"what": "weight", "name": name, "start": start}
            parts.append(self._link.request(Message(Kind.FETCH, layers=(layer.handle,), body=body)).tensors[0])
        return torch.cat(parts).reshape(shape).clone()

    def row_squares(self, layer: LayerSpec) -> Tensor:
        """Squared norm of each output's weights in float64, [O]."""
        with self._lock:
            if layer.handle not in self._row_squares:
                message = Message(Kind.FETCH, layers=(layer.handle,), body={"what": "row_squares"})
                self._row_squares[layer.handle] = self._link.request(message).tensors[0][0].clone()
            return self._row_squares[layer.handle]

    def __deepcopy__(self, memo: dict[int, Any]) -> ClientSession:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a session with an executor cannot be pickled: connect again in the other process")
