"""A slow block while a model generates: its surrogate's outputs stand in for those that have not arrived yet.

Each row is sent to the true block when it is first seen, and computed there in a thread of its own while the model goes on. A
row of a later pass, at the same position, has the true output if that has arrived.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from symbiosis.zoo.surrogates.block_modules import Piece, PieceKind, first_tensor

# n = rows of a pass, D = model width
_CACHE = "past_key_values"
_CALLS_IN_FLIGHT = 4


class SpeculatedBlock(nn.Module):
    """In the place of the true block for the time of one call of `generate`. A context manager."""

    def __init__(self, piece: Piece, true: nn.Module, surrogate: nn.Module, window: int) -> None:
        super().__init__()
        self.true, self.surrogate = true, surrogate
        self._piece, self._window = piece, window
        # An attention writes its keys and values in order; rows of an FFN are independent.
        self._threads = ThreadPoolExecutor(_CALLS_IN_FLIGHT if piece.kind is PieceKind.FFN else 1, "true-block")
        self._true_cache = DynamicCache()
        self._arrivals: dict[int, Future[Tensor]] = {}
        self._guesses: dict[int, Tensor] = {}
        self._start: int | None = None
        self.verified = 0
        """Leading rows of the last pass that had their true outputs."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("true"), name)  # such as a layer's type of attention

    def __enter__(self) -> SpeculatedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def begin_pass(self, start: int) -> None:
        """The next pass has rows from this position on. Passes before the first call are prefills, with true outputs only."""
        self._start = start

    def cosine(self, position: int) -> float | None:
        """Of the surrogate's output with the true one; None if that has not arrived."""
        arrival = self._arrivals[position]
        if not arrival.done():
            return None
        return float(torch.cosine_similarity(arrival.result().float(), self._guesses[position].float(), dim=-1))

    def wait(self, position: int) -> None:
        """For a true output. Raises what the true block raised."""
        self._arrivals[position].result()

    def drop(self, start: int) -> None:
        """Forget rows from this position on: their tokens were wrong."""
        for position in [each for each in self._arrivals if each >= start]:
            self._arrivals.pop(position).cancel()
            self._guesses.pop(position)
        if self._piece.kind is not PieceKind.FFN:
            self._threads.submit(self._crop, start)  # after those that are in flight

    def forget(self, position: int) -> None:
        """A row that is settled."""
        self._arrivals.pop(position, None)
        self._guesses.pop(position, None)

    def take_true_cache(self, cache: Cache, length: int) -> None:
        """Put the true block's keys and values into a cache of the model, up to this length."""
        if self._piece.kind is PieceKind.FFN:
            return
        self._threads.submit(self._crop, length).result()
        cache.layers[self._piece.layer] = self._true_cache.layers[self._piece.layer]

    def _crop(self, length: int) -> None:
        layer: Any = self._true_cache.layers[self._piece.layer]
        if (spare := layer.get_seq_length() - length) > 0:
            layer.crop(-spare)

    def forward(self, *args: Any, **named: Any) -> Any:
        if self._start is None:
            self.surrogate(*args, **named)  # for its keys and values
            return self.true(*args, **self._with_true_cache(named))
        rows = named["hidden_states"] if "hidden_states" in named else args[0]
        count, start = rows.shape[-2], self._start
        for row in range(count):
            if start + row not in self._arrivals:
                assert row == count - 1, "one new row in each pass"
                self._arrivals[start + row] = self._threads.submit(self._compute, *self._last_row(args, named))
        output = self.surrogate(*args, **named)
        guesses = first_tensor(output)
        if count >= self._window:
            self.wait(start)
        hidden = guesses.clone()
        self.verified, is_leading = 0, True
        for row in range(count):
            self._guesses[start + row] = guesses[:, row]
            arrival = self._arrivals[start + row]
            if arrival.done():
                hidden[:, row] = arrival.result()
                self.verified += is_leading
            else:
                is_leading = False
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _with_true_cache(self, named: dict[str, Any]) -> dict[str, Any]:
        return {**named, _CACHE: self._true_cache} if named.get(_CACHE) is not None else named

    def _last_row(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the true block with the last row alone."""
        first = tuple(each[:, -1:] if isinstance(each, Tensor) else each for each in args)
        return first, self._with_true_cache({name: _last_row_of(name, value) for name, value in named.items()})

    @torch.no_grad()
    def _compute(self, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        return first_tensor(self.true(*args, **named))[:, 0].clone()


def _last_row_of(name: str, value: Any) -> Any:
    if name == "position_embeddings":
        return tuple(each[:, -1:] for each in value)
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask":
        return value[:, :, -1:] if value.dim() == 4 else value
    return value[-1:] if name == "cache_position" else value[:, -1:]
