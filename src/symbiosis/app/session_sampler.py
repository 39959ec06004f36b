"""Samples from training sessions: an engine completes prompts with a snapshot of a session's adapter, from memory.

The adapter has no name in the engine, so no other request can use it. It is released with its last completion.
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
from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot
from symbiosis.finetuning.sampler_protocol import SampledCompletion
from symbiosis.serving.engine import Completion, tokens_of
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Event, Finished, GenerateRequest, Rejected, Token
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, check_range
from symbiosis.serving.scheduling.sequence import Sequence as EngineSequence

_SETTINGS = [each.name for each in fields(Sampling)]
_DEFAULTS = {"temperature": 0.0, "max_tokens": 32}


@dataclass(slots=True)
class _PartialCompletion:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    reason: FinishReason | None = None


class SamplerRequest:
    """One call of `sample`: `n` completions of each prompt."""

    def __init__(
        self, sampler: SessionSampler, tenant: str, prompts: list[list[int]], n: int, virtual_tokens: int, sampling: Sampling
    ) -> None:
        """Raises `OutOfRange` or `ContextTooLong`."""
        self._sampler, self.tenant, self.prompts, self.n, self.sampling = sampler, tenant, prompts, n, sampling
        self.completions, self.tokens = len(prompts) * n, 0
        digest = hashlib.blake2b(digest_size=32)
        for prompt in prompts:
            whole = EngineSequence(id="", tenant=tenant, prompt=[0] * virtual_tokens + prompt, sampling=sampling, arrival=0.0)
            whole.check(vocab_size=sampler.vocab_size, max_length=sampler.max_model_len)
            max_tokens = sampler.max_model_len - whole.prompt_length if sampling.max_tokens is None else sampling.max_tokens
            self.tokens += n * (whole.prompt_length + max_tokens * (1 + (sampling.logprobs or 0)))
            digest.update(array("q", (len(prompt), *prompt)))
        self.key = (digest.digest(), n, sampling)
        self.ids: list[str] = []
        """Of the engine's requests, one for each prompt."""
        self.future: Future[list[SampledCompletion]] = Future()
        self.partial = [_PartialCompletion() for _ in range(self.completions)]
        self.unfinished = self.completions
        self.is_cancelled = False

    def begin(self, adapter: AdapterSnapshot) -> Future[list[SampledCompletion]]:
        self._sampler.begin(self, adapter)
        return self.future

    def cancel(self) -> None:
        self._sampler.cancel(self)


class SessionSampler:
    """Owns an engine loop, which steps the engine until `close`."""

    def __init__(self, core: EngineCore, tokenizer: Any = None) -> None:
        self._core, self._tokenizer = core, tokenizer
        self.vocab_size, self.max_model_len = core.facts.vocab, core.scheduler.max_model_len
        self._lock = threading.Lock()
        self._requests: dict[str, tuple[SamplerRequest, int]] = {}
        """By the engine's request id: the sampler's request, and the number of its first completion there."""
        self._ids = itertools.count(1)
        # converts adapters and decodes tokens, neither on a thread of passes nor on that of the engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-samples")
        self._loop = EngineLoop(core, self._on_events)

    def check_request(
        self, tenant: str, prompts: Sequence[str | Sequence[int]], n: int, virtual_tokens: int, settings: Mapping[str, Any]
    ) -> SamplerRequest:
        check_range("n", n, 1, 128, integer=True)
        for name in settings:
            if name not in _SETTINGS:
                raise OutOfRange(f"{name!r} is no setting", field=name, expected=f"some of n, number, {', '.join(_SETTINGS)}")
        tokens = [tokens_of(prompt, self._tokenizer) for prompt in prompts]
        return SamplerRequest(self, tenant, tokens, n, virtual_tokens, Sampling(**{**_DEFAULTS, **settings}))

    def begin(self, request: SamplerRequest, adapter: AdapterSnapshot) -> None:
        self._thread.submit(self._begin, request, adapter)

    def cancel(self, request: SamplerRequest) -> None:
        request.is_cancelled = True
        self._drop(request, cancel=True)

    def close(self) -> None:
        """Unfinished requests fail with `Closed`."""
        self._loop.close()
        self._thread.shutdown()

    def _drop(self, request: SamplerRequest, *, cancel: bool) -> None:
        """Ignore further events of a request, and cancel what is left of it in the engine."""
        with self._lock:
            dropped = [id for id in request.ids if self._requests.pop(id, None) is not None]
        for id in dropped if cancel else ():
            self._loop.cancel(id)

    # On the sampler's thread

    def _begin(self, request: SamplerRequest, adapter: AdapterSnapshot) -> None:
        try:
            prepared = self._core.prepare_held(read_adapter_from_memory(adapter.config, adapter.tensors, self._core.facts))
        except Exception as error:  # noqa: BLE001 - the caller waits for an outcome
            request.future.set_exception(error)
            return
        with self._lock:
            if request.is_cancelled:
                return
            for number in range(len(request.prompts)):
                id = str(next(self._ids))
                request.ids.append(id)
                self._requests[id] = (request, number * request.n)
        for id, prompt in zip(list(request.ids), request.prompts, strict=True):
            submitted = GenerateRequest(id=id, prompt=prompt, sampling=request.sampling, tenant=request.tenant, n=request.n)
            self._loop.submit(submitted, prepared)
            if request.is_cancelled:  # `cancel` may have run before the engine knew this id
                self._loop.cancel(id)

    def _end(self, request: SamplerRequest, error: Exception | None) -> None:
        self._drop(request, cancel=error is not None)
        if request.is_cancelled or request.future.done():
            return
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result([self._completion(each) for each in request.partial])

    def _completion(self, partial: _PartialCompletion) -> Completion:
        assert partial.reason is not None, "all have finished"
        text = None if self._tokenizer is None else self._tokenizer.decode(partial.tokens, skip_special_tokens=True)
        return Completion(tokens=partial.tokens, reason=partial.reason, logprobs=partial.logprobs, text=text)

    # On the engine's thread

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            request, first = self._requests.get(event.id, (None, 0))
            if request is None:
                continue
            if isinstance(event, Token):
                partial = request.partial[first + event.number]
                partial.tokens.append(event.token)
                if event.logprobs is not None:
                    partial.logprobs.append(event.logprobs)
            elif isinstance(event, Finished):
                request.partial[first + event.number].reason = event.reason
                request.unfinished -= 1
                if event.error is not None or not request.unfinished:
                    self._thread.submit(self._end, request, event.error)
            elif isinstance(event, Rejected):
                self._thread.submit(self._end, request, event.error)
