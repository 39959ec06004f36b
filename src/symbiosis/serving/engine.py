"""Hosted serving: many requests with many adapters through one model, in shared passes."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from symbiosis import kernels
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import Adapter
from symbiosis.errors import BadAdapter, CannotServe, OutOfRange, PassFailed, SymbiosisError
from symbiosis.models.device_dtype import device_of, dtype_of
from symbiosis.models.fuse_projections import join
from symbiosis.models.loading import ModelSource, check_plain, load_both
from symbiosis.models.max_length import most_tokens
from symbiosis.serving.deferred_sigint import DeferredSigint
from symbiosis.serving.lora.adapter_cache import AdapterCache, AdapterCacheConfig, AdapterCacheStats
from symbiosis.serving.lora.adapter_registry import AdapterRecord, AdapterVersion, PreparedAdapter
from symbiosis.serving.model.async_decode import AsyncDecoder
from symbiosis.serving.model.model_runner import ModelRunner
from symbiosis.serving.model.paged_attention import PagedKVCache
from symbiosis.serving.model.sampler import Logprobs, Sampled, choose, is_reported, report, sample
from symbiosis.serving.scheduling.batch import Batch, Chunk
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.scheduler import Scheduler, SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling, within
from symbiosis.serving.scheduling.sequence import Sequence as Request

_log = logging.getLogger("symbiosis")
_WAIT_S = 1.0
_MAX_ADAPTERS = 64  # in one pass
_GRAPH_PAGES = 512  # of one sequence: with more it decodes without a CUDA graph, whose table of pages goes to the GPU whole
_UNNAMED = ""  # for no longer than it takes to queue a request
_LIMITS = sorted({each.name for each in fields(SchedulerConfig)} - {"vocabulary", "max_length", "max_adapters"})
_VIRTUAL = 0  # the token that stands for a virtual one: its row, or its keys, are the adapter's


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came of one prompt."""

    tokens: list[int]
    reason: FinishReason
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str | None = None
    """If the engine has a tokenizer."""
    error: SymbiosisError | None = None
    """Why it failed, if it did and the reason is known."""


class EngineCore:
    """A model, its cache and its adapters; `step` is one pass. Used by one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pages: int = 1024,
        page_size: int = 16,
        cache_bytes: int | None = None,
        residency: AdapterCacheConfig = AdapterCacheConfig(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        turns: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - keeps nothing
        **limits: int,
    ) -> None:
        """`cache_bytes`, if given, says how many pages there are. `limits` are the scheduler's.

        Every pass is computed within `turns`, which others on the same cores may share.

        Raises `CannotServe` with the reason if this model cannot be served, `OutOfRange` if a setting is wrong.
        """
        _check(pages, page_size, cache_bytes, residency, limits)
        self.facts = ModelFacts.of(model)
        if not self.facts.decoder_only or not self.facts.kv_heads or not model.can_generate():
            raise CannotServe(
                f"{type(model).__name__} is no decoder whose layers all keep keys and values by head: it cannot be served"
            )
        if cache_bytes is not None:
            pages = self._pages(cache_bytes, page_size, model.dtype.itemsize)
        memory = PagedKVCache(
            layers=self.facts.layers,
            heads=self.facts.kv_heads,
            width=self.facts.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._runner = ModelRunner(model.eval(), memory)
        longest = most_tokens(model.config.get_text_config())
        config = SchedulerConfig(
            vocabulary=self.facts.vocab, max_length=longest, max_adapters=min(_MAX_ADAPTERS, residency.slots), **limits
        )
        self._residency = AdapterCache(
            model, self.facts, residency, running=lambda: self.scheduler.adapters, on_evict=self._runner.forget
        )
        if kernels.run_on(model.device):
            self._runner.use_kernels(self._residency.slots, min(pages, -(-longest // page_size), _GRAPH_PAGES))
        self.scheduler = Scheduler(config, BlockManager(pages, page_size), self._residency.touch)
        self._forerunner = AsyncDecoder(self._runner, self.scheduler.pool)
        self._requests: dict[str, dict[str, Request]] = {}  # those that have not ended, by their adapter's hash
        self._failed: list[tuple[Request, SymbiosisError]] = []
        self.passes = 0
        self._clock, self._turns = clock, turns
        self._numbers = itertools.count()
        eos = model.generation_config.eos_token_id
        self._eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)

    def _pages(self, cache_bytes: int, page_size: int, itemsize: int) -> int:
        each = self.facts.layers * 2 * self.facts.kv_heads * self.facts.head_dim * page_size * itemsize
        if cache_bytes < 8 * each:
            raise CannotServe(f"a cache of {cache_bytes} bytes is too small: {page_size} tokens of this model take {each}")
        return cache_bytes // each

    def prepare(self, folder: str | Path) -> PreparedAdapter:
        """Read and check an adapter. Any thread may, while another steps. Raises what is wrong with it."""
        return self._residency.prepare(Path(folder))

    def prepare_held(self, adapter: Adapter, folder: Path | None = None) -> PreparedAdapter:
        """The same for an adapter in memory, which may lie in a folder too: nothing is read. Any thread may."""
        return self._residency.prepare_loaded(adapter, folder)

    def put_adapter(self, name: str, prepared: PreparedAdapter) -> AdapterVersion:
        """Serve what `prepare` gave under `name` from now on. Who was accepted with an older version keeps that."""
        return self._residency.register(name, prepared)

    def add_adapter(self, name: str, folder: str | Path) -> str:
        """Serve the PEFT adapter in this folder under `name`; its content hash."""
        return self.put_adapter(name, self.prepare(folder)).hash

    def remove_adapter(self, name: str) -> None:
        """Nobody new gets it; its memory is free when nobody runs with it. Raises `UnknownAdapter`."""
        self._residency.unregister(name)

    def pin_adapter(self, name: str, pinned: bool = True) -> None:
        """Let it stay on the device though nobody asks for it, if possible at all. Raises `UnknownAdapter`."""
        self._residency.registry.pin(name, pinned)

    @property
    def adapters(self) -> dict[str, str]:
        """The content hash behind each name."""
        return {name: version.hash for name, version in self._residency.registry.versions.items()}

    @property
    def pinned(self) -> frozenset[str]:
        """Names of adapters that stay on the device."""
        return self._residency.registry.pinned

    def figures(self) -> AdapterCacheStats:
        """Where adapters are, and what was moved so far."""
        return self._residency.stats()

    def add(self, prompt: Iterable[int], sampling: Sampling, *, adapter: str | None = None, tenant: str = "") -> Request:
        """Queue a request. Raises what is wrong with it."""
        return self.add_several(1, prompt, sampling, adapter=adapter, tenant=tenant)[0]

    def add_several(
        self, n: int, prompt: Iterable[int], sampling: Sampling, *, adapter: str | None = None, tenant: str = ""
    ) -> list[Request]:
        """Queue `n` answers to one prompt: all, or none and an error."""
        record = None if adapter is None else self._residency.lookup(adapter)
        return self._queue(n, prompt, sampling, record, tenant)

    def add_unnamed(
        self, n: int, prompt: Iterable[int], sampling: Sampling, prepared: PreparedAdapter, *, tenant: str
    ) -> list[Request]:
        """The same by an adapter without a name, which nobody else can ask for; it goes with the last of its requests."""
        self._residency.register(_UNNAMED, prepared)
        try:
            return self._queue(n, prompt, sampling, self._residency.lookup(_UNNAMED), tenant)
        finally:
            self._residency.unregister(_UNNAMED)

    def _queue(
        self, n: int, prompt: Iterable[int], sampling: Sampling, record: AdapterRecord | None, tenant: str
    ) -> list[Request]:
        tokens = [_VIRTUAL] * (record.virtual_tokens if record else 0) + list(prompt)
        request = Request(
            id=str(next(self._numbers)),
            tenant=tenant,
            prompt=tokens,
            sampling=sampling,
            arrival=self._clock(),
            adapter=record.hash if record else "",
            salt=tenant.encode(),
            eos_ids=self._eos,
        )
        answers = request.siblings(n)
        self.scheduler.add(*answers)
        if record is not None:
            self._residency.registry.acquire(record.hash, n)
            self._requests.setdefault(record.hash, {}).update((answer.id, answer) for answer in answers)
        return answers

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request now; False if it has ended."""
        if not self.scheduler.cancel(request.id, reason):
            return False
        self._ended(request)
        return True

    def _ended(self, request: Request) -> None:
        if request.adapter:
            del self._requests[request.adapter][request.id]
            if not self._requests[request.adapter]:
                del self._requests[request.adapter]
            self._residency.release(request.adapter)

    def take_up(self) -> None:
        """What other threads have brought; those who wait for what could not be brought end. `step` does it too."""
        for hash, error in self._residency.poll_loads():
            for request in list(self._requests.get(hash, {}).values()):
                self.cancel(request, FinishReason.FAILED)
                self._failed.append((request, error))

    def take_failed(self) -> list[tuple[Request, SymbiosisError]]:
        """Who ended since the last time because an adapter could not be had or its pass failed, and why."""
        failed, self._failed = self._failed, []
        return failed

    def call_on_news(self, action: Callable[[], None]) -> None:
        """Have this called, by other threads, when there is something to take up."""
        self._residency.set_load_callback(action)

    def wait(self, seconds: float) -> None:
        """Nothing can be computed now: return when that may have changed, or after so long."""
        self._residency.wait(seconds)

    def step(self) -> list[tuple[Request, int, Logprobs | None]]:
        """One pass: each request that got a token, with that token (-1: there was none to choose, it failed).

        Empty if there was nothing to do. If the pass fails, its chunks are computed one by one, and only those at
        fault end, for `take_failed`. Raises `PassFailed` if nothing can be computed any more; its requests have ended then.
        """
        self.take_up()
        now = self._clock()
        made = self.scheduler.plan(now)
        self._residency.start_loads(made.missing, now)
        self.scheduler.draining = self._residency.draining
        if not made.chunks:
            self.scheduler.done(made, [])
            return []
        self.passes += 1
        with self._turns:
            sampled = self._sampled(made)
        lost = {request.id for request, _ in self._failed}
        for request in self.scheduler.done(made, sampled.tokens):
            self._ended(request)
        results = zip(made.sampled, sampled.tokens, sampled.logprobs, strict=True)
        return [each for each in results if each[0].id not in lost]

    def _sampled(self, made: Batch) -> Sampled:
        """The next tokens; of who is at fault if it fails, none."""
        copied = False
        try:
            self._runner.memory.copy(made.copies)  # once: later, what they copy from may be another's
            copied = True
            return self._computed(replace(made, copies=()))
        except Exception as error:
            self._forerunner.forget()
            if not copied or not self.is_sound():
                raise self._all_failed(made, error) from error
            _log.exception("a pass failed; its %d sequences are computed one by one", len(made.chunks))
            return self._one_by_one(made, error)

    def _computed(self, made: Batch) -> Sampled:
        adapters, sequences = self._residency.resident, made.sampled
        logits_BV = self._forerunner.compute(made, adapters)
        chosen = choose(logits_BV, sequences)
        if self._decodes_on(made):
            logits_BV = logits_BV.clone() if is_reported(sequences) else logits_BV
            self._forerunner.run_ahead(made, chosen.tokens_B, adapters)
        return report(logits_BV, sequences, chosen)

    def _decodes_on(self, made: Batch) -> bool:
        """Whether the next pass can be launched now: it will likely have the same sequences, with the tokens chosen."""
        if not self._runner.can_run_ahead:
            return False
        everybody = not self.scheduler.waiting and len(made.chunks) == self.scheduler.running
        return everybody and all(chunk.samples for chunk in made.chunks)

    def _one_by_one(self, made: Batch, error: Exception) -> Sampled:
        """What each chunk gives alone, which is what it gives with others; who fails alone as well has failed."""
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        for chunk in made.chunks:
            found = error if len(made.chunks) == 1 else self._alone(chunk)
            if isinstance(found, Exception):
                if not self.is_sound():
                    raise self._all_failed(made, found) from found
                self.cancel(chunk.sequence, FinishReason.FAILED)
                self._failed.append((chunk.sequence, _failure(found)))
                found = Sampled([-1], [None])
            if chunk.samples:
                tokens += found.tokens
                logprobs += found.logprobs
        return Sampled(tokens, logprobs)

    def _alone(self, chunk: Chunk) -> Sampled | Exception:
        try:
            made = Batch(chunks=(chunk,))
            return sample(self._runner.compute(made, self._residency.resident), made.sampled)
        except Exception as error:  # noqa: BLE001 - the first failure was logged, and its request is told of this one
            return error

    def _all_failed(self, made: Batch, error: Exception) -> PassFailed:
        self.scheduler.abandon(made)
        requests = [chunk.sequence for chunk in made.chunks]
        for request in requests:
            self.cancel(request, FinishReason.FAILED)
        return PassFailed(str(_failure(error)), requests)

    def is_sound(self) -> bool:
        """Whether the device still computes: some of a GPU's errors are for ever."""
        try:
            return int(torch.ones(1, device=self._runner.model.device).item()) == 1
        except Exception:  # noqa: BLE001 - whatever it says, it is not sound
            return False

    def is_idle(self) -> bool:
        return self.scheduler.running == 0 and self.scheduler.waiting == 0


def _failure(error: Exception) -> PassFailed:
    """What happened inside is for the log."""
    return PassFailed(f"the pass that computed this failed: {type(error).__name__}")


def _check(pages: Any, page_size: Any, cache_bytes: Any, residency: Any, limits: Iterable[str]) -> None:
    """Settings of a `EngineCore`. Those that have a config are checked there."""
    for name in limits:
        if name not in _LIMITS:
            expected = f"pages, page_size, cache_bytes, residency, {', '.join(_LIMITS)}"
            raise OutOfRange(f"{name!r} is no setting of the engine", field=name, expected=f"some of {expected}")
    within("pages", pages, 1, 1 << 31, whole=True)
    within("page_size", page_size, 1, 1 << 16, whole=True)
    if cache_bytes is not None:
        within("cache_bytes", cache_bytes, 0, 1 << 50, whole=True)
    if not isinstance(residency, AdapterCacheConfig):
        raise OutOfRange(f"residency is {residency!r:.80}", field="residency", expected="a ResidencyConfig")


def tokens_of(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    """Raises `OutOfRange`, or `CannotServe` for a text without a tokenizer."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise OutOfRange(f"a prompt is {prompt!r:.80}", field="prompts", expected="a text, or a list of token ids")
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise CannotServe("there is no tokenizer here: give one, or give token ids instead of text")
    return list(tokenizer(prompt)["input_ids"])


def _for_each(what: str, given: Any, prompts: int) -> Any:
    """As many as there are prompts. Raises `OutOfRange`."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or len(given) != prompts:
        raise OutOfRange(f"{what} is {given!r:.80}", field=what, expected=f"a list with one for each prompt, {prompts} here")
    return given


class Engine:
    """Offline use: prompts in, answers out.

    `Engine(model).generate(prompts, adapters=["pirate", None, …])` answers all
    prompts in shared passes, each with its own adapter. `model` is a transformers
    model, which is the engine's from now on, a folder, a hub id, or nothing: the default model. Used by one thread.
    """

    def __init__(
        self,
        model: ModelSource = None,
        tokenizer: Any = None,
        *,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        """`device` and `dtype` are for a model that is loaded here; `settings` are `EngineCore`'s."""
        if not isinstance(model, PreTrainedModel):
            model, found = load_both(model, device=device_of(device), dtype=dtype_of(dtype))
            tokenizer = tokenizer or found
        served: PreTrainedModel = model
        check_plain(served)
        join(served)
        self._core = EngineCore(served, **settings)
        self._tokenizer = tokenizer

    def add_adapter(self, name: str, folder: str | Path) -> str:
        if not Path(folder).is_dir():
            raise BadAdapter(f"there is no folder {folder}: expected one as PEFT writes it")
        return self._core.add_adapter(name, folder)

    def remove_adapter(self, name: str) -> None:
        self._core.remove_adapter(name)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        adapters: Sequence[str | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = Sampling(temperature=0.0, max_tokens=32),  # noqa: B008 - frozen
    ) -> list[Completion]:
        """One answer to each prompt, in order. Raises what is wrong with any of them; then, or if interrupted, none goes on."""
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            expected = "a list of prompts, each a text or a list of token ids"
            raise OutOfRange(f"prompts is {prompts!r:.80}", field="prompts", expected=expected)
        names = _for_each("adapters", [None] * len(prompts) if adapters is None else adapters, len(prompts))
        wishes = [sampling] * len(prompts) if isinstance(sampling, Sampling) else _for_each("sampling", sampling, len(prompts))
        tokens = [tokens_of(prompt, self._tokenizer) for prompt in prompts]
        requests: list[Request] = []
        with DeferredSigint() as interrupts:  # a pass is computed to its end
            try:
                for prompt, name, wish in zip(tokens, names, wishes, strict=True):
                    requests.append(self._core.add(prompt, wish, adapter=name))
                return self._answers(requests, interrupts)
            except BaseException:
                for request in requests:
                    self._core.cancel(request)
                raise

    def _answers(self, requests: list[Request], interrupts: DeferredSigint) -> list[Completion]:
        logprobs: dict[str, list[Logprobs]] = {request.id: [] for request in requests}
        while not self._core.is_idle():
            passes = self._core.passes
            for request, _, logprob in self._core.step():
                if logprob is not None:
                    logprobs[request.id].append(logprob)
            interrupts.take()
            if self._core.passes == passes and not self._core.is_idle():
                self._core.wait(_WAIT_S)  # for an adapter
        errors = {request.id: error for request, error in self._core.take_failed()}
        return [self._answer(request, logprobs[request.id], errors.get(request.id)) for request in requests]

    def _answer(self, request: Request, logprobs: list[Logprobs], error: SymbiosisError | None) -> Completion:
        assert request.reason is not None, "idle only when all have ended"
        tokens = request.outputs
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens=tokens, reason=request.reason, logprobs=logprobs, text=text, error=error)
