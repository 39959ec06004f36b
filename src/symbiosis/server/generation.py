"""From requests to deltas of text: what both kinds of completions share, streamed or not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from symbiosis.server.engines.engine_client import ActiveRequests
from symbiosis.server.metrics.counts import Metrics
from symbiosis.serving.detokenizer import TextStream
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token

_MIN_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(frozen=True, slots=True)
class Logprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next text of one completion; the last delta has a `finish` reason."""

    index: int
    text: str
    logprobs: tuple[Logprob, ...] = ()
    finish: str | None = None


@dataclass(slots=True)
class Usage:
    """Numbers of tokens."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Completion:
    stream: TextStream
    text: str = ""
    """Not sent yet, as are `logprobs`."""
    logprobs: list[Logprob] = field(default_factory=list)
    last_token_s: float | None = None
    """Time of its last token."""


class Generation:
    """The completions of one HTTP request. Completion `c` of prompt `p` has the index `p * n + c`."""

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        make_stream: Callable[[], TextStream],
        metrics: Metrics,
        *,
        stream: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream`: yield a delta for each new text; otherwise one delta for each completion."""
        self._n, self._tenant = requests[0].n, requests[0].tenant
        self._completions = [_Completion(make_stream()) for _ in range(len(requests) * self._n)]
        self._metrics, self._clock, self._stream = metrics, clock, stream
        self._start_s = clock()
        self.usage = Usage(prompt=sum(len(request.prompt) for request in requests))

    async def deltas(self, active: ActiveRequests) -> AsyncIterator[list[TextDelta]]:
        """All deltas there are at a time, in the order of their tokens."""
        self._metrics.count_prompt(self._tenant, self.usage.prompt)
        async for events in active.events():
            deltas: list[TextDelta] = []
            now, before = self._clock(), self.usage.completion
            for request_index, event in events:
                index = request_index * self._n + event.number
                completion = self._completions[index]
                if completion.stream.stopped is not None:
                    continue  # sent before the engine knew
                if isinstance(event, Finished):
                    if event.number == 0:
                        self.usage.cached += event.cached
                    completion.text += completion.stream.finish()
                    deltas.append(self._take_delta(index, "length" if event.reason == "length" else "stop"))
                    continue
                self._count(completion, event, now)
                text = completion.stream.push(event.token)
                completion.text += text
                if completion.stream.stopped is not None:
                    deltas.append(self._take_delta(index, "stop"))
                    await active.stop(event)
                elif self._stream and (text or completion.logprobs):
                    deltas.append(self._take_delta(index))
            self._metrics.count_tokens(self._tenant, self.usage.completion - before)
            if deltas:
                yield deltas

    def _take_delta(self, index: int, finish: str | None = None) -> TextDelta:
        completion = self._completions[index]
        delta = TextDelta(index, completion.text, tuple(completion.logprobs), finish)
        completion.text, completion.logprobs = "", []
        return delta

    def _count(self, completion: _Completion, event: Token, now: float) -> None:
        if completion.last_token_s is not None:
            self._metrics.time_next(now - completion.last_token_s)
        elif self.usage.completion == 0:
            self._metrics.time_first(now - self._start_s)
        completion.last_token_s = now
        self.usage.completion += 1
        if event.logprobs is not None:
            top = tuple((token, max(logprob, _MIN_LOGPROB)) for token, logprob in event.logprobs.top)
            completion.logprobs.append(Logprob(event.token, max(event.logprobs.chosen, _MIN_LOGPROB), top))
