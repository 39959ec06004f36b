"""Workloads: requests with their lengths and adapters, and when they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from benchmarks.http_load import lengths
from benchmarks.http_load.vocabulary import text_of, words

BASE = "base"
"""Name of the base model."""
ZIPF = 1.5  # as in Punica


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    new: int
    """Tokens of the answer."""
    adapter: str | None = None
    text: str | None = None
    """The prompt as text, if it is sent as one."""
    arrival_s: float | None = None
    """After the start; None: when a connection is free."""
    key: str | None = None

    def body(self, *, stream: bool) -> dict[str, Any]:
        """Of a request to /v1/completions."""
        body: dict[str, Any] = {
            "model": self.adapter or BASE,
            "prompt": list(self.prompt) if self.text is None else self.text,
            "max_tokens": self.new,
            "temperature": 0,
            "ignore_eos": True,
        }
        return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`concurrency` requests at a time, in order (a closed loop); with None each at its arrival (an open loop)."""

    requests: Sequence[Request]
    concurrency: int | None
    stream: bool = True

    @property
    def tokens(self) -> int:
        return sum(request.new for request in self.requests)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What requests look like."""

    vocabulary: int
    prompt: int
    new: int
    lengths: str = lengths.FIXED
    longest: int = 2048
    """Most tokens of a request whose lengths follow a trace."""
    adapters: int = 0
    base_share: float = 0.25
    """Share of the requests without an adapter, if there are any."""
    text: Any = None
    """A function from random token ids to a text and its token ids; None: prompts are sent as token ids."""

    def requests(self, count: int, seed: object) -> list[Request]:
        """Others for each seed, so that no prompt is in the prefix cache."""
        random = Random(repr(seed))
        sizes = [(self.prompt, self.new)] * count
        if self.lengths != lengths.FIXED:
            sizes = lengths.sample(self.lengths, count, self.longest, random)
        names = choose_adapters(count, self.adapters, self.base_share, random)
        return [
            self._request(random.choices(range(1, self.vocabulary), k=prompt), new, name)
            for (prompt, new), name in zip(sizes, names, strict=True)
        ]

    def _request(self, tokens: list[int], new: int, adapter: str | None) -> Request:
        if self.text is None:
            return Request(prompt=tuple(tokens), new=new, adapter=adapter)
        text, tokens = self.text(tokens)
        return Request(prompt=tuple(tokens), new=new, adapter=adapter, text=text)

    def closed(self, concurrency: int, rounds: int, seed: object, *, stream: bool = True) -> Workload:
        requests = self.requests(rounds * concurrency, seed)
        return Workload(requests=requests, concurrency=concurrency, stream=stream)

    def burst(self, count: int, seed: object) -> Workload:
        """All at once."""
        return Workload(requests=[replace(each, arrival_s=0.0) for each in self.requests(count, seed)], concurrency=count)

    def open(self, rate: float, count: int, seed: object) -> Workload:
        """Poisson arrivals, `rate` a second on average."""
        random = Random(repr((seed, "arrivals")))
        times = accumulate(random.expovariate(rate) for _ in range(count))
        requests = zip(self.requests(count, seed), times, strict=True)
        return Workload(requests=[replace(each, arrival_s=time) for each, time in requests], concurrency=None)


def choose_adapters(count: int, adapters: int, base_share: float, random: Random) -> list[str | None]:
    """Adapters by a Zipf law, and for a share of the requests the base model."""
    if not adapters:
        return [None] * count
    weights = [(rank + 1) ** -ZIPF for rank in range(adapters)]
    names = random.choices([f"a{number}" for number in range(adapters)], weights, k=count)
    return [None if random.random() < base_share else name for name in names]


def made_of_words(vocabulary: int) -> Any:
    """From token ids to their text, for `vocabulary.save_tokenizer`."""
    texts = words(vocabulary)
    return lambda tokens: (text_of(tokens, texts), tokens)


def made_by(tokenizer_file: str) -> Any:
    """From token ids to their text and the ids that the tokenizer gives it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)

    def text(tokens: list[int]) -> tuple[str, list[int]]:
        decoded = tokenizer.decode(tokens)
        return decoded, tokenizer.encode(decoded).ids

    return text
