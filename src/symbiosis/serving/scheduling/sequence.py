"""Sampling parameters (`Sampling`) and the state of one completion (`Sequence`). Imports no torch."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from symbiosis.errors import ContextTooLong, OutOfRange

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: dividing by them leaves one token anyway."""


def check_range(name: str, value: object, low: float, high: float, *, integer: bool = False) -> None:
    """Raise `OutOfRange` unless `value` is a number (an integer if `integer`) from `low` to `high`."""
    kinds = (int,) if integer else (int, float)
    expected = f"an integer from {low} to {high}" if integer else f"a number from {low:g} to {high:g}"
    # NaN is in no range; bool is a subclass of int and is rejected
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise OutOfRange(f"{name} is {value!r:.80}", field=name, expected=expected)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the sampled token and of the most likely tokens."""

    chosen: float
    top: Seq[tuple[int, float]]
    """(token, logprob), most likely first; `Sampling.logprobs` of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are sampled, and when to stop. Every value is validated; `OutOfRange` names the field.

    Applied in this order: penalties on the model's logits, `logit_bias`, the ban on stop tokens before `min_tokens`,
    temperature, `min_p`, `top_k`, `top_p`.
    """

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus sampling: the most likely tokens with this share of the probability that `min_p` and `top_k` leave."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all."""
    min_p: float = 0.0
    """Least probability of a token, relative to the most likely one."""
    seed: int | None = None
    """Equal seeds give equal tokens for equal logits, in any batch. None: a random seed."""
    max_tokens: int | None = None
    """Most tokens of the completion. None: up to the context length."""
    min_tokens: int = 0
    """Stop tokens are banned until the completion has this many tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the model's EOS tokens."""
    ignore_eos: bool = False
    """Whether the model's EOS tokens do not end the completion."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the completion."""
    frequency_penalty: float = 0.0
    """Subtracted once for each occurrence of the token in the completion."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt and completion are divided by this if positive, multiplied if negative."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """Number of most likely tokens reported with each token. None: no logprobs."""

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0, 2)
        check_range("top_p", self.top_p, 0, 1)
        check_range("top_k", self.top_k, 0, 1 << 20, integer=True)
        check_range("min_p", self.min_p, 0, 1)
        check_range("min_tokens", self.min_tokens, 0, 1 << 20, integer=True)
        check_range("presence_penalty", self.presence_penalty, -2, 2)
        check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            check_range("seed", self.seed, -(1 << 63), (1 << 63) - 1, integer=True)
        if self.max_tokens is not None:
            check_range("max_tokens", self.max_tokens, 1, 1 << 20, integer=True)
            check_range("min_tokens", self.min_tokens, 0, self.max_tokens, integer=True)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, 20, integer=True)
        if isinstance(self.stop_ids, str) or not isinstance(self.stop_ids, Collection):
            raise OutOfRange(f"stop_ids is {self.stop_ids!r:.80}", field="stop_ids", expected="a list of token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise OutOfRange(f"logit_bias is {self.logit_bias!r:.80}", field="logit_bias", expected="numbers by token id")
        if not isinstance(self.ignore_eos, bool):
            raise OutOfRange(f"ignore_eos is {self.ignore_eos!r:.80}", field="ignore_eos", expected="True or False")
        check_range("len(stop_ids)", len(self.stop_ids), 0, 64, integer=True)
        for token in self.stop_ids:
            check_range("stop_ids", token, 0, (1 << 31) - 1, integer=True)
        check_range("len(logit_bias)", len(self.logit_bias), 0, 1024, integer=True)
        for token, bias in self.logit_bias.items():
            check_range("logit_bias token", token, 0, (1 << 31) - 1, integer=True)
            check_range("logit_bias", bias, -100, 100)
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether the sampled token is the argmax of the unmodified logits."""
        return self.is_greedy and not (self.is_penalised or self.logit_bias or self.min_tokens)


class SequenceState(StrEnum):
    """The state of a sequence. FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its blocks were freed. Its tokens are kept, and their keys and values are recomputed later."""
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence finished."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One completion in progress. Only the scheduler changes its state, only the block manager its block table."""

    id: str
    tenant: str
    prompt: InitVar[Collection[int]]
    sampling: Sampling
    arrival: float
    """Time of arrival, by the scheduler's clock."""
    adapter: str = ""
    """Content hash of the adapter; empty: the base model."""
    chain: str = ""
    """Hash of the chain that computes it; empty: the engine has one model."""
    cache_salt: bytes = b""
    """Set by the server for each tenant: a cached block matches only sequences with the salt it was computed with."""
    weight: float = 1.0
    """The tenant's fair share, relative to other tenants; sequences of less weight are preempted first."""
    eos_ids: tuple[int, ...] = ()
    """The model's EOS tokens."""
    number: int = 0
    """Index among the `n` completions of one prompt."""
    parent: Sequence | None = None
    """The first completion of the same prompt: it prefills the prompt for all."""
    stream: int = -1
    """Set by the engine loop: see `engine_messages.GenerateRequest`."""

    tokens: array[int] = field(init=False, repr=False)
    """Prompt and completion so far."""
    prompt_length: int = field(init=False)
    seed: int = field(init=False, repr=False)
    is_plain: bool = field(init=False, repr=False)
    """As its sampling says: looked up for each token."""
    end_ids: frozenset[int] = field(init=False, repr=False)
    """Tokens that end this completion."""
    max_length: int = field(init=False, default=1 << 40)
    """Number of tokens, prompt and completion, at which it finishes."""
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    reason: FinishReason | None = field(init=False, default=None)
    preemptions: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    """Blocks of the KV cache, in token order."""
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose keys and values are in the blocks."""
    num_cached_tokens: int | None = field(init=False, default=None)
    """Prompt tokens found in the prefix cache; None until admitted."""
    block_hashes: list[bytes] = field(init=False, default_factory=list, repr=False)
    """Hashes of its full blocks, computed on demand by the block manager."""
    received: range = field(init=False, default=range(0), repr=False)
    """Blocks ahead of the computed tokens that another engine has sent: indices in the block table."""
    chunk_limit: int = field(init=False, default=1 << 40, repr=False)
    """Most tokens of its next chunk, at least 1. Set while other blocks of it are fetched (`block_fetches`)."""
    num_hashed_blocks: int = field(init=False, default=0, repr=False)
    """Leading blocks that the prefix cache knows. Maintained by the block manager."""

    def __post_init__(self, prompt: Collection[int]) -> None:
        try:
            self.tokens = array("q", prompt)
        except (TypeError, OverflowError) as error:
            raise OutOfRange(f"prompt: {error}", field="prompt", expected="token ids") from None
        if not self.tokens:
            raise OutOfRange("the prompt has no tokens", field="prompt", expected="at least one")
        check_range("len(prompt)", len(self.tokens), 1, 1 << 24, integer=True)
        check_range("weight", self.weight, 0.001, 1000)
        self.prompt_length, self.is_plain = len(self.tokens), self.sampling.is_plain
        self.seed = secrets.randbits(62) if self.sampling.seed is None else self.sampling.seed
        self.end_ids = frozenset(self.sampling.stop_ids) | frozenset(() if self.sampling.ignore_eos else self.eos_ids)

    @property
    def outputs(self) -> list[int]:
        """The completion so far, including a stop token."""
        return self.tokens[self.prompt_length :].tolist()

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 during decode."""
        return len(self.tokens) - self.num_computed_tokens

    def append_token(self, token: int) -> FinishReason | None:
        """Append a sampled token, -1 if there is none; the reason if it is the last."""
        if token < 0:
            return FinishReason.FAILED
        self.tokens.append(token)
        return self.end_reason(token)

    def end_reason(self, last: int) -> FinishReason | None:
        """Why the completion ends with its last token, if it does."""
        if last in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_length else None

    def resume(self, delivered: Collection[int]) -> None:
        """Continue after these tokens of the completion, before it is queued: as if it had been preempted there."""
        try:
            self.tokens.extend(delivered)
        except (TypeError, OverflowError) as error:
            raise OutOfRange(f"resume: {error}", field="resume", expected="token ids") from None

    def check(self, *, vocab_size: int, max_length: int) -> None:
        """Raise `OutOfRange` for tokens outside the vocabulary, `ContextTooLong` if `max_length` is exceeded."""
        highest = vocab_size - 1
        check_range("prompt", min(self.tokens), 0, highest, integer=True)
        check_range("prompt", max(self.tokens), 0, highest, integer=True)
        for token in self.sampling.stop_ids:
            check_range("stop_ids", token, 0, highest, integer=True)
        for token in self.sampling.logit_bias:
            check_range("logit_bias token", token, 0, highest, integer=True)
        max_tokens = self.sampling.max_tokens or 1
        if self.prompt_length + max_tokens > max_length:
            raise ContextTooLong(
                f"context too long: {self.prompt_length} prompt + {max_tokens} completion tokens > {max_length} allowed. "
                "Shorten the prompt or lower max_tokens"
            )

    def fork(self, n: int) -> list[Sequence]:
        """This sequence and `n` - 1 others of the same prompt, with the same seed and other random numbers."""
        check_range("n", n, 1, 128, integer=True)
        sequences = [self]
        for number in range(1, n):
            prompt = self.tokens[: self.prompt_length]
            sequences.append(replace(self, id=f"{self.id}.{number}", prompt=prompt, number=number, parent=self))
            sequences[-1].seed = self.seed
        return sequences
