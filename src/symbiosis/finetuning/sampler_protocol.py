"""Answers by a session's adapter: what training knows of them. Who computes them stands above it, and is given to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from symbiosis.finetuning.trained_adapter import AdapterSnapshot


class SampledAnswer(Protocol):
    """What came of one prompt."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def reason(self) -> str:
        """`stop` or `length`."""

    @property
    def logprobs(self) -> Sequence[Any]:
        """Of each token, if they were asked for: `chosen`, and `top` with the likeliest."""

    @property
    def text(self) -> str | None:
        """If there is a tokenizer."""


class PendingAnswers(Protocol):
    """Answers that were asked for. Each method may be called by any thread, and returns at once."""

    @property
    def tokens(self) -> int:
        """Of all prompts, and the most that all answers can have; a logprob of another token counts like a token."""

    @property
    def answers(self) -> int: ...

    @property
    def key(self) -> object:
        """Equal if the same was asked for; it is remembered longer than the prompts."""

    def begin(self, made: AdapterSnapshot) -> Future[list[SampledAnswer]]:
        """Compute them by this adapter. The future ends once, unless `cancel` was called: nobody waits for it then."""

    def cancel(self) -> None:
        """Nobody wants them any more."""


class SamplerProtocol(Protocol):
    def ask(
        self, tenant: str, prompts: Sequence[str | Sequence[int]], n: int, virtual: int, settings: Mapping[str, Any]
    ) -> PendingAnswers:
        """Nothing is computed yet. `virtual`: tokens that the adapter puts in front. Raises what is wrong with it."""
