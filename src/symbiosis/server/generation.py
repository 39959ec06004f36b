"""Orders in, pieces of text out: what both kinds of completions do, streamed or not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from symbiosis.server.engine_client import ActiveRequests, End, Order, Token
from symbiosis.server.metrics import Metrics
from symbiosis.serving.detokenizer import TextStream

_LEAST = -9999.0  # JSON has no -Infinity


@dataclass(frozen=True, slots=True)
class Logprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of one answer; the last has a `finish`."""

    index: int
    text: str
    logprobs: tuple[Logprob, ...] = ()
    finish: str | None = None


@dataclass(slots=True)
class Usage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Answer:
    text: TextStream
    logprobs: list[Logprob] = field(default_factory=list)
    """Not given out yet."""
    last: float | None = None
    """When its last token came."""


class Generation:
    """The answers of one request. Answer `a` of prompt `p` has the index `p * n + a`."""

    def __init__(
        self,
        orders: Sequence[Order],
        make_stream: Callable[[], TextStream],
        metrics: Metrics,
        *,
        every_piece: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every_piece`: give out pieces as they come; otherwise an answer is one piece."""
        self._n = orders[0].n
        self._answers = [_Answer(make_stream()) for _ in range(len(orders) * self._n)]
        self._tenant = orders[0].tenant
        self._metrics, self._clock, self._every_piece = metrics, clock, every_piece
        self._begun = clock()
        self._whole = [""] * len(self._answers)
        self.usage = Usage(prompt=sum(len(order.prompt) for order in orders))

    async def pieces(self, begun: ActiveRequests) -> AsyncIterator[TextDelta]:
        self._metrics.count_prompt(self._tenant, self.usage.prompt)
        async for event in begun.events():
            index = event.order * self._n + event.number
            answer = self._answers[index]
            if isinstance(event, End):
                if event.number == 0:
                    self.usage.cached += event.cached
                yield self._piece(index, answer.text.finish(), "length" if event.reason == "length" else "stop")
                continue
            self._count(answer, event)
            new = answer.text.push(event.token)
            if answer.text.stopped is not None:
                yield self._piece(index, new, "stop")
                await begun.stop(event.order, event.number)
            elif self._every_piece and (new or answer.logprobs):
                yield self._piece(index, new)
            else:
                self._whole[index] += new

    def _piece(self, index: int, text: str, finish: str | None = None) -> TextDelta:
        answer = self._answers[index]
        logprobs, answer.logprobs = tuple(answer.logprobs), []
        before, self._whole[index] = self._whole[index], ""
        return TextDelta(index, before + text, logprobs, finish)

    def _count(self, answer: _Answer, event: Token) -> None:
        now = self._clock()
        if answer.last is not None:
            self._metrics.time_next(now - answer.last)
        elif self.usage.completion == 0:
            self._metrics.time_first(now - self._begun)
        answer.last = now
        self.usage.completion += 1
        self._metrics.count_token(self._tenant)
        if event.chosen is not None:
            top = tuple((token, max(logprob, _LEAST)) for token, logprob in event.top)
            answer.logprobs.append(Logprob(event.token, max(event.chosen, _LEAST), top))
