"""Validates layer calls: everything about a call is checked here, before its rows share a batch with other tenants'."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from symbiosis.common.cost_model import CostModel
from symbiosis.errors import BadCall, TooLarge, UnknownLayer
from symbiosis.split.executor.batch import BatchCall
from symbiosis.split.executor.layer_program import LayerProgram, LayerProgramBackward, is_program_op
from symbiosis.split.executor.layers import BaseLayer, Matrix, Rows
from symbiosis.split.executor.sessions import BatchKey
from symbiosis.transport.base import Peer
from symbiosis.transport.messages import Message
from symbiosis.types import WITH_BIAS, Direction, LayerKind, LayerSpec, Limits

_MAX_CACHED = 4096  # tenants choose programs and keys: the caches are bounded


class CallValidator:
    """Converts CALL messages to work for a batch."""

    def __init__(self, layers: Sequence[BaseLayer], limits: Limits, costs: CostModel) -> None:
        self._layers, self._limits, self._costs = layers, limits, costs
        cached = lru_cache(maxsize=_MAX_CACHED)  # a decorator: each use makes a cache of its own
        self._make_key = cached(self._new_key)
        self._program = cached(lambda handles: LayerProgram(handles, self.layer))
        self._program_backward = cached(lambda handles: LayerProgramBackward(self._program(handles)))

    def layer(self, reference: int) -> BaseLayer:
        """The layer of a handle, with its bias if the reference has `WITH_BIAS`. Raises `UnknownLayer`, `BadCall`."""
        handle = reference & ~WITH_BIAS
        if not 0 <= handle < len(self._layers):
            raise UnknownLayer(f"no layer {handle}: this model has layers 0 to {len(self._layers) - 1}")
        layer = self._layers[handle]
        return layer.with_bias() if reference & WITH_BIAS else layer

    def validate(self, peer: Peer, message: Message) -> BatchCall:
        """The work of a call; cached on the message if no later check is needed. Raises `SymbiosisError`."""
        if message.direction is Direction.PROGRAM:
            layers: tuple[BaseLayer, ...] = (self._program(message.layers),)
        elif message.direction is Direction.PROGRAM_BACKWARD:
            layers = (self._program_backward(message.layers),)
        else:
            layers = tuple(self.layer(handle) for handle in message.layers)
        rows = self._check(layers, message)
        key = self._make_key(message.layers, message.direction, tuple(t.shape[1] for t in rows))
        places = None
        if all(t.dtype is layers[0].input_dtype(i) and t.device == layers[0].device for i, t in enumerate(rows)):
            widths = _result_widths(layers, message.direction)
            places = peer.port.reply_buffers(peer, [(rows[0].shape[0], width) for width in widths], layers[0].dtype)
        # Rows of tenants on this host lie in the memory of their channel, queued or not.
        queued_bytes = 0 if peer.port.same_host else sum(t.nbytes for t in rows)
        work = BatchCall(layers, key, rows, places, queued_bytes)
        if all(t.is_floating_point() for t in rows):  # a tenant can change integers before it repeats the call
            message.receiver_state = work
        return work

    def _check(self, layers: tuple[BaseLayer, ...], message: Message) -> Rows:
        # Integers decide which memory is read: copy them out of the tenant's reach before checking them.
        rows = tuple(t if t.is_floating_point() else t.clone() for t in message.tensors)
        if not layers or not rows:
            raise BadCall("a call names at least one layer and carries rows")
        count, limits, direction = rows[0].shape[0], self._limits, message.direction
        if any(t.shape[0] != count for t in rows):
            raise BadCall(f"all tensors of a call have the same number of rows, got {[t.shape[0] for t in rows]}")
        if not 1 <= count <= limits.max_rows:
            raise TooLarge(f"a call carries 1 to {limits.max_rows} rows, got {count}: split the call")
        indices = max((t.numel() for t in rows if not t.is_floating_point()), default=0)
        if indices > limits.max_choices:
            raise TooLarge(f"a call carries at most {limits.max_choices} expert indices, got {indices}: split the call")
        if direction.is_program:
            if message.training and direction is Direction.PROGRAM and not cast(LayerProgram, layers[0]).saves:
                raise BadCall("a layer program without SAVE has no backward: expected training=False")
            steps = len(message.layers)
            if count * steps > limits.max_rows:
                most = limits.max_rows // steps
                raise TooLarge(f"a layer program of {steps} steps takes at most {most} rows, got {count}: split the call")
        size = rows[0].element_size() if rows[0].is_floating_point() else layers[0].dtype.itemsize
        if count * sum(_result_widths(layers, direction)) * size > limits.max_bytes:
            raise TooLarge(f"the reply to {count} rows exceeds the {limits.max_bytes} bytes of a message: split the call")
        if len(layers) == 1:
            layers[0].check(direction, rows)
        else:
            _check_group(layers, direction, rows)
        return rows

    def single_key(self, spec: LayerSpec, direction: Direction) -> BatchKey:
        """The key of a call of this layer by itself."""
        widths = tuple(width or 0 for width in self.layer(spec.handle).input_widths(direction))
        key: BatchKey = self._make_key((spec.handle,), direction, widths)
        return key

    def _new_key(self, handles: tuple[int, ...], direction: Direction, widths: tuple[int, ...]) -> BatchKey:
        specs = [self.layer(handle).spec for handle in handles if not (direction.is_program and is_program_op(handle))]
        shape = (direction, *(x for spec in specs for x in (spec.kind, spec.in_width, spec.out_width)), *widths)
        if len(specs) > 1:  # estimated by its layers until it was measured; norms have no backward calls
            back = Direction.BACKWARD if direction.is_backward else Direction.FORWARD
            single = (self.single_key(s, Direction.FORWARD if s.kind is LayerKind.NORM else back) for s in specs)
            self._costs.set_parts(shape, [key.shape for key in single])
        return BatchKey(handles, direction, shape)


def _result_widths(layers: Sequence[BaseLayer], direction: Direction) -> list[int]:
    if direction.is_backward:
        return layers[0].gradient_widths()
    return [width for layer in layers for width in layer.result_widths()]


def _check_group(layers: Sequence[BaseLayer], direction: Direction, rows: Rows) -> None:
    """Raise `BadCall` unless these layers can run as one call with these rows."""
    if not all(isinstance(layer, Matrix) for layer in layers) or len({layer.spec.in_width for layer in layers}) > 1:
        raise BadCall("only matrices that read rows of one width can be called together")
    if direction is Direction.FORWARD:
        layers[0].check(direction, rows)
        return
    if len(rows) != len(layers):
        raise BadCall(f"backward of {len(layers)} layers takes as many gradients, got {len(rows)}")
    for layer, grad in zip(layers, rows, strict=True):
        layer.check(direction, (grad,))
