"""What training needs from an engine that samples with a session's adapter. The trainer receives an implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from symbiosis.finetuning.adapters.trained_adapter import AdapterSnapshot


class SampledCompletion(Protocol):
    """One completion of one prompt."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def reason(self) -> str:
        """`stop` or `length`."""

    @property
    def logprobs(self) -> Sequence[Any]:
        """Of each token, if requested: `chosen`, and `top` with the likeliest."""

    @property
    def text(self) -> str | None:
        """None without a tokenizer."""


class SampleRequest(Protocol):
    """A checked request. Every method is thread-safe and returns at once."""

    @property
    def tokens(self) -> int:
        """Of all prompts, and at most of all completions; a logprob of another token counts as a token."""

    @property
    def completions(self) -> int: ...

    @property
    def key(self) -> object:
        """Equal for equal requests. It is stored longer than the prompts."""

    def begin(self, adapter: AdapterSnapshot) -> Future[list[SampledCompletion]]:
        """Sample with this adapter. The future is set once, unless `cancel` is called."""

    def cancel(self) -> None:
        """Stop sampling."""


class SamplerProtocol(Protocol):
    def check_request(
        self, tenant: str, prompts: Sequence[str | Sequence[int]], n: int, virtual_tokens: int, settings: Mapping[str, Any]
    ) -> SampleRequest:
        """Nothing is computed yet. `virtual_tokens`: those the adapter puts before each prompt. Raises what is wrong."""
