"""Where a training session's adapter meets the engine: prompts are answered by it as it was, from memory.

The adapter has no name at the engine, so nobody else can ask for it, and it goes with the last of its answers.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from symbiosis.adapters.reader import read_adapter_from_memory
from symbiosis.errors import OutOfRange
from symbiosis.finetuning.sampler_protocol import SampledAnswer as AnyAnswer
from symbiosis.finetuning.trained_adapter import AdapterSnapshot
from symbiosis.serving.engine import Completion, tokens_of
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Event, Finished, GenerateRequest, Rejected, Token
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, check_range
from symbiosis.serving.scheduling.sequence import Sequence as Request

_SETTINGS = [each.name for each in fields(Sampling)]
_DEFAULTS = {"temperature": 0.0, "max_tokens": 32}


@dataclass(slots=True)
class _Growing:
    """An answer so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: FinishReason | None = None


class SamplerRequest:
    """One call of `sample`: `n` answers to each of its prompts."""

    def __init__(
        self, sampler: SessionSampler, tenant: str, prompts: list[list[int]], n: int, virtual: int, sampling: Sampling
    ) -> None:
        """Raises `OutOfRange` or `ContextTooLong`."""
        self._sampler, self.tenant, self.prompts, self.n, self.sampling = sampler, tenant, prompts, n, sampling
        self.answers, self.tokens = len(prompts) * n, 0
        found = hashlib.blake2b(digest_size=32)
        for prompt in prompts:
            request = Request(id="", tenant=tenant, prompt=[0] * virtual + prompt, sampling=sampling, arrival=0.0)
            request.check(vocab_size=sampler.vocabulary, max_length=sampler.longest)
            most = sampler.longest - request.prompt_length if sampling.max_tokens is None else sampling.max_tokens
            self.tokens += n * (request.prompt_length + most * (1 + (sampling.logprobs or 0)))
            found.update(array("q", (len(prompt), *prompt)))
        self.key = (found.digest(), n, sampling)
        self.ids: list[str] = []
        """Of the orders at the desk, one for each prompt."""
        self.done: Future[list[AnyAnswer]] = Future()
        self.growing = [_Growing() for _ in range(self.answers)]
        self.left = self.answers
        self.cancelled = False

    def begin(self, made: AdapterSnapshot) -> Future[list[AnyAnswer]]:
        self._sampler.begin(self, made)
        return self.done

    def cancel(self) -> None:
        self._sampler.cancel(self)


class SessionSampler:
    """Owns a desk, which steps the core until closed."""

    def __init__(self, core: EngineCore, tokenizer: Any = None) -> None:
        self._core, self._tokenizer = core, tokenizer
        self.vocabulary, self.longest = core.facts.vocab, core.scheduler.max_model_len
        self._lock = threading.Lock()
        self._places: dict[str, tuple[SamplerRequest, int]] = {}  # of an order: whose, and its first answer
        self._ids = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-samples")
        """Makes adapters fit for the engine, and answers of tokens: neither holds up a pass, or a session."""
        self._desk = EngineLoop(core, self._hear)

    def ask(
        self, tenant: str, prompts: Sequence[str | Sequence[int]], n: int, virtual: int, settings: Mapping[str, Any]
    ) -> SamplerRequest:
        check_range("n", n, 1, 128, integer=True)
        for name in settings:
            if name not in _SETTINGS:
                raise OutOfRange(f"{name!r} is no setting", field=name, expected=f"some of n, number, {', '.join(_SETTINGS)}")
        tokens = [tokens_of(prompt, self._tokenizer) for prompt in prompts]
        return SamplerRequest(self, tenant, tokens, n, virtual, Sampling(**{**_DEFAULTS, **settings}))

    def begin(self, asked: SamplerRequest, made: AdapterSnapshot) -> None:
        self._thread.submit(self._begin, asked, made)

    def cancel(self, asked: SamplerRequest) -> None:
        with self._lock:
            asked.cancelled = True
            self._forget(asked)
        for id in asked.ids:
            self._desk.cancel(id)

    def close(self) -> None:
        """What is asked for ends in `Closed`."""
        self._desk.close()
        self._thread.shutdown()

    # On its own thread

    def _begin(self, asked: SamplerRequest, made: AdapterSnapshot) -> None:
        try:
            prepared = self._core.prepare_held(read_adapter_from_memory(made.config, made.tensors, self._core.facts))
        except Exception as error:  # noqa: BLE001 - somebody waits for an answer
            asked.done.set_exception(error)
            return
        with self._lock:
            if asked.cancelled:
                return
            for number in range(len(asked.prompts)):
                id = str(next(self._ids))
                asked.ids.append(id)
                self._places[id] = (asked, number * asked.n)
        for id, prompt in zip(list(asked.ids), asked.prompts, strict=True):
            order = GenerateRequest(id=id, prompt=prompt, sampling=asked.sampling, tenant=asked.tenant, n=asked.n)
            self._desk.submit(order, prepared)
        if asked.cancelled:  # meanwhile: an order that was not there yet could not be cancelled
            self.cancel(asked)

    def _end(self, asked: SamplerRequest, error: Exception | None) -> None:
        with self._lock:
            self._forget(asked)
        if asked.cancelled or asked.done.done():
            return
        if error is not None:
            asked.done.set_exception(error)
        else:
            asked.done.set_result([self._answer(each) for each in asked.growing])

    def _answer(self, made: _Growing) -> Completion:
        assert made.reason is not None, "all have ended"
        text = None if self._tokenizer is None else self._tokenizer.decode(made.tokens, skip_special_tokens=True)
        return Completion(tokens=made.tokens, reason=made.reason, logprobs=made.logprobs, text=text)

    def _forget(self, asked: SamplerRequest) -> None:
        for id in asked.ids:
            self._places.pop(id, None)

    # On the stepping thread

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            asked, first = self._places.get(event.id, (None, 0))
            if asked is None:
                continue
            if isinstance(event, Token):
                growing = asked.growing[first + event.number]
                growing.tokens.append(event.token)
                if event.logprobs is not None:
                    growing.logprobs.append(event.logprobs)
            elif isinstance(event, Finished):
                asked.growing[first + event.number].reason = event.reason
                asked.left -= 1
                if event.error is not None or not asked.left:
                    self._thread.submit(self._end, asked, event.error)
            elif isinstance(event, Rejected):
                self._thread.submit(self._end, asked, event.error)
