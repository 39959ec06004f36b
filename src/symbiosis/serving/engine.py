"""Offline serving: `Engine` completes lists of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from symbiosis.errors import BadAdapter, CannotServe, OutOfRange, SymbiosisError
from symbiosis.models.loading import ModelSource, load_for_hosting
from symbiosis.serving.chains.chain import Chain
from symbiosis.serving.deferred_sigint import DeferredSigint
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling, Sequence

_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The completion of one prompt."""

    tokens: list[int]
    reason: FinishReason
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str | None = None
    """None if the engine has no tokenizer."""
    error: SymbiosisError | None = None
    """Why it failed, if it did and the reason is known."""


def tokens_of(prompt: str | Seq[int], tokenizer: Any) -> list[int]:
    """The prompt's token ids. Raises `OutOfRange`, or `CannotServe` for a text without a tokenizer."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Seq):
        raise OutOfRange(f"a prompt is {prompt!r:.80}", field="prompts", expected="a text, or a list of token ids")
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise CannotServe("there is no tokenizer here: pass one to the engine, or token ids instead of text")
    return list(tokenizer(prompt)["input_ids"])


def _check_per_prompt(name: str, values: Any, num_prompts: int) -> Any:
    """Raises `OutOfRange` unless `values` is a list with one for each prompt."""
    if isinstance(values, str | bytes) or not isinstance(values, Seq) or len(values) != num_prompts:
        expected = f"a list with one for each prompt, {num_prompts} here"
        raise OutOfRange(f"{name} is {values!r:.80}", field=name, expected=expected)
    return values


class Engine:
    """Offline serving: prompts in, completions out.

    `Engine(model).generate(prompts, adapters=["pirate", None, …])` completes all prompts in shared batches, each with its
    own adapter. `model` is a transformers model, which the engine owns from now on, a folder, a hub id, or None: the
    default model. Used by one thread.

    `Engine(chains=…)` serves several models by name (`app.served_zoo`): `generate(prompts, models=["mine", None, …])`.
    """

    def __init__(
        self,
        model: ModelSource = None,
        tokenizer: Any = None,
        *,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        chains: Mapping[str, Chain] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """`device` and `dtype` apply to a model that is loaded here; `settings` are those of `EngineCore`."""
        if chains and model is not None:
            raise OutOfRange("a model was given, and chains", field="model", expected="one of the two")
        model = next(iter(chains.values())).model if chains else model
        served, self._tokenizer = load_for_hosting(model, tokenizer, device, dtype)
        self._core = EngineCore(served, chains=chains, **settings)

    def add_adapter(self, name: str, folder: str | Path, model: str | None = None) -> str:
        """Serve the PEFT adapter in this folder under `name`; its content hash.

        Of several models, it is for `model`; None: the one that its config names, or the default.
        """
        if not Path(folder).is_dir():
            raise BadAdapter(f"there is no folder {folder}: expected one as PEFT writes it")
        return self._core.add_adapter(name, folder, model)

    def remove_adapter(self, name: str) -> None:
        """Raises `UnknownAdapter`."""
        self._core.remove_adapter(name)

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        adapters: Seq[str | None] | None = None,
        sampling: Sampling | Seq[Sampling] = Sampling(temperature=0.0, max_tokens=32),  # noqa: B008 - frozen
        models: Seq[str | None] | None = None,
    ) -> list[Completion]:
        """One completion of each prompt, in order. On an error or an interrupt all are cancelled.

        `models`: of several models, which one completes each; None: that of its adapter, or the default.
        """
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Seq):
            expected = "a list of prompts, each a text or a list of token ids"
            raise OutOfRange(f"prompts is {prompts!r:.80}", field="prompts", expected=expected)
        count = len(prompts)
        names = _check_per_prompt("adapters", [None] * count if adapters is None else adapters, count)
        chains = _check_per_prompt("models", [None] * count if models is None else models, count)
        params = _check_per_prompt("sampling", [sampling] * count if isinstance(sampling, Sampling) else sampling, count)
        tokens = [tokens_of(prompt, self._tokenizer) for prompt in prompts]
        sequences: list[Sequence] = []
        with DeferredSigint() as interrupts:  # a step is never interrupted
            try:
                for prompt, name, each, chain in zip(tokens, names, params, chains, strict=True):
                    sequences.append(self._core.add(prompt, each, adapter=name, model=chain))
                return self._complete(sequences, interrupts)
            except BaseException:
                for sequence in sequences:
                    self._core.cancel(sequence)
                raise

    def _complete(self, sequences: list[Sequence], interrupts: DeferredSigint) -> list[Completion]:
        logprobs: dict[str, list[Logprobs]] = {sequence.id: [] for sequence in sequences}
        while not self._core.is_idle():
            num_steps = self._core.num_steps
            for sequence, _, logprob in self._core.step():
                if logprob is not None:
                    logprobs[sequence.id].append(logprob)
            interrupts.deliver()
            if self._core.num_steps == num_steps and not self._core.is_idle():
                self._core.wait(_WAIT_S)  # for an adapter
        errors = {sequence.id: error for sequence, error in self._core.take_failed()}
        return [self._completion(sequence, logprobs[sequence.id], errors.get(sequence.id)) for sequence in sequences]

    def _completion(self, sequence: Sequence, logprobs: list[Logprobs], error: SymbiosisError | None) -> Completion:
        assert sequence.reason is not None, "idle only when all have finished"
        tokens = sequence.outputs
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens=tokens, reason=sequence.reason, logprobs=logprobs, text=text, error=error)
