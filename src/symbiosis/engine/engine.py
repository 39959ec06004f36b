"""Hosted serving: many requests with many adapters through one model, in shared passes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from symbiosis.adapters.facts import ModelFacts
from symbiosis.adapters.folder import read
from symbiosis.engine.attention import KeyValues
from symbiosis.engine.bank import Loaded
from symbiosis.engine.loading import load
from symbiosis.engine.pages import PagePool
from symbiosis.engine.runner import Runner
from symbiosis.engine.sampler import Logprobs, sample
from symbiosis.engine.scheduler import Scheduler, SchedulerConfig
from symbiosis.engine.sequences import Reason, Sampling
from symbiosis.engine.sequences import Sequence as Request
from symbiosis.errors import CannotServe, PassFailed, UnknownAdapter

_VIRTUAL = 0  # the token that stands for a virtual one: its row, or its keys, are the adapter's


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one prompt."""

    tokens: list[int]
    reason: Reason
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str | None = None
    """If the engine has a tokenizer."""


class Core:
    """A model, its cache and its adapters; `step` is one pass. Used by one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pages: int = 1024,
        page_size: int = 16,
        max_rows: int = 2048,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `CannotServe` with the reason if this model cannot be served."""
        self.facts = ModelFacts.of(model)
        if not self.facts.decoder_only or not self.facts.kv_heads or not model.can_generate():
            raise CannotServe(
                f"{type(model).__name__} is no decoder whose layers all keep keys and values by head: it cannot be served"
            )
        memory = KeyValues(
            layers=self.facts.layers,
            heads=self.facts.kv_heads,
            width=self.facts.head_dim,
            pages=pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._runner = Runner(model.eval(), memory)
        longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
        config = SchedulerConfig(vocabulary=self.facts.vocab, max_length=longest, max_rows=max_rows)
        self.scheduler = Scheduler(config, PagePool(pages, page_size), self._adapters_loaded)
        self._loaded: dict[str, Loaded] = {}
        self._names: dict[str, str] = {}
        self._users: Counter[str] = Counter()  # requests that have not ended, by their adapter's hash
        self.passes = 0
        self._clock = clock
        self._numbers = itertools.count()
        eos = model.generation_config.eos_token_id
        self._eos = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)

    def _adapters_loaded(self, hash: str) -> bool:
        return not hash or hash in self._loaded

    def prepare(self, folder: str | Path) -> Loaded:
        """Read an adapter and bring it to the device. Any thread may, while another steps. Raises what is wrong with it."""
        return load(read(Path(folder), self.facts), self._runner.model)

    def put_adapter(self, name: str, loaded: Loaded) -> str:
        """Serve what `prepare` gave under `name`; its content hash. Who runs with an older one keeps it."""
        older = self._names.get(name)
        self._loaded.setdefault(loaded.hash, loaded)
        self._names[name] = loaded.hash
        if older is not None:
            self._let_go(older)
        return loaded.hash

    def add_adapter(self, name: str, folder: str | Path) -> str:
        """Serve the PEFT adapter in this folder under `name`; its content hash."""
        return self.put_adapter(name, self.prepare(folder))

    def remove_adapter(self, name: str) -> None:
        """Nobody new gets it; its memory is free when nobody runs with it. Raises `UnknownAdapter`."""
        hash = self._hash(name)
        del self._names[name]
        self._let_go(hash)

    @property
    def adapters(self) -> dict[str, str]:
        """The content hash behind each name."""
        return dict(self._names)

    @property
    def resident(self) -> int:
        """How many adapters have memory, also those without a name that somebody still runs with."""
        return len(self._loaded)

    def _let_go(self, hash: str) -> None:
        if hash and not self._users[hash]:
            del self._users[hash]
            if hash not in self._names.values():
                self._loaded.pop(hash, None)

    def _hash(self, name: str | None) -> str:
        if name is None:
            return ""
        if name not in self._names:
            raise UnknownAdapter(f"there is no adapter {name!r}: {', '.join(sorted(self._names)) or 'none is loaded'}")
        return self._names[name]

    def add(self, prompt: Iterable[int], sampling: Sampling, *, adapter: str | None = None, tenant: str = "") -> Request:
        """Queue a request. Raises what is wrong with it."""
        return self.add_several(1, prompt, sampling, adapter=adapter, tenant=tenant)[0]

    def add_several(
        self, n: int, prompt: Iterable[int], sampling: Sampling, *, adapter: str | None = None, tenant: str = ""
    ) -> list[Request]:
        """Queue `n` answers to one prompt: all, or none and an error."""
        hash = self._hash(adapter)
        virtual = self._loaded[hash].virtual if hash else None
        tokens = [_VIRTUAL] * (virtual.count if virtual else 0) + list(prompt)
        request = Request(
            id=str(next(self._numbers)),
            tenant=tenant,
            prompt=tokens,
            sampling=sampling,
            arrival=self._clock(),
            adapter=hash,
            salt=tenant.encode(),
            eos_ids=self._eos,
        )
        answers = request.siblings(n)
        self.scheduler.add(*answers)
        self._users[hash] += n
        return answers

    def cancel(self, request: Request, reason: Reason = Reason.CANCELLED) -> bool:
        """End a request now; False if it has ended."""
        if not self.scheduler.cancel(request.id, reason):
            return False
        self._ended(request)
        return True

    def _ended(self, request: Request) -> None:
        self._users[request.adapter] -= 1
        self._let_go(request.adapter)

    def step(self) -> list[tuple[Request, int, Logprobs | None]]:
        """One pass: each request that got a token, with that token (-1: there was none to choose, it failed).

        Empty if there was nothing to do. Raises `PassFailed` if the pass itself failed; its requests have ended then.
        """
        made = self.scheduler.plan(self._clock())
        if not made.chunks:
            self.scheduler.done(made, [])
            return []
        self.passes += 1
        try:
            sampled = sample(self._runner.compute(made, self._loaded), made.sampled)
        except Exception as error:
            self.scheduler.abandon(made)
            requests = [chunk.sequence for chunk in made.chunks]
            for request in requests:
                self.cancel(request, Reason.FAILED)
            raise PassFailed(f"the pass that computed this failed: {type(error).__name__}", requests) from error
        for request in self.scheduler.done(made, sampled.tokens):
            self._ended(request)
        return list(zip(made.sampled, sampled.tokens, sampled.logprobs, strict=True))

    def is_sound(self) -> bool:
        """Whether the device still computes: some of a GPU's errors are for ever."""
        try:
            return int(torch.ones(1, device=self._runner.model.device).item()) == 1
        except Exception:  # noqa: BLE001 - whatever it says, it is not sound
            return False

    def is_idle(self) -> bool:
        return self.scheduler.running == 0 and self.scheduler.waiting == 0


class Engine:
    """Offline use: prompts in, answers out.

    `Engine(model).generate(prompts, adapters=["pirate", None, …])` answers all
    prompts in shared passes, each with its own adapter.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, **settings: Any) -> None:
        self._core = Core(model, **settings)
        self._tokenizer = tokenizer

    def add_adapter(self, name: str, folder: str | Path) -> str:
        return self._core.add_adapter(name, folder)

    def remove_adapter(self, name: str) -> None:
        self._core.remove_adapter(name)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        adapters: Sequence[str | None] | None = None,
        sampling: Sampling | Sequence[Sampling] = Sampling(temperature=0.0, max_tokens=32),  # noqa: B008 - frozen
    ) -> list[Answer]:
        """One answer to each prompt, in order."""
        names = adapters or [None] * len(prompts)
        wishes = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        requests = [
            self._core.add(self._tokens(prompt), wish, adapter=name)
            for prompt, name, wish in zip(prompts, names, wishes, strict=True)
        ]
        logprobs: dict[str, list[Logprobs]] = {request.id: [] for request in requests}
        while not self._core.is_idle():
            for request, _, logprob in self._core.step():
                if logprob is not None:
                    logprobs[request.id].append(logprob)
        return [self._answer(request, logprobs[request.id]) for request in requests]

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise CannotServe("this engine has no tokenizer: give it one, or give token ids instead of text")
        return list(self._tokenizer(prompt)["input_ids"])

    def _answer(self, request: Request, logprobs: list[Logprobs]) -> Answer:
        assert request.reason is not None, "idle only when all have ended"
        tokens = request.outputs
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(tokens=tokens, reason=request.reason, logprobs=logprobs, text=text)
