"""What is asked for (`Sampling`) and how far it has come (`Sequence`)."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from symbiosis.errors import ContextTooLong, OutOfRange

GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing by it would leave one token anyway."""


def within(name: str, value: object, least: float, most: float, *, whole: bool = False) -> None:
    """Raise `OutOfRange` unless `value` is a number (an integer if `whole`) from `least` to `most`."""
    kinds = (int,) if whole else (int, float)
    expected = f"an integer from {least} to {most}" if whole else f"a number from {least:g} to {most:g}"
    # NaN is in no range; a bool is an int to Python, not to us
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise OutOfRange(f"{name} is {value!r:.80}", field=name, expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen, and when to stop. Every value is checked; `OutOfRange` names the field.

    The order: penalties on the model's logits, then `logit_bias`, then the ban
    on stop tokens before `min_tokens`, then temperature, `min_p`, `top_k`, `top_p`.
    """

    temperature: float = 1.0
    """0: the likeliest token, always."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this share of what `min_p` and `top_k` left."""
    top_k: int = 0
    """Only this many of the likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least so likely, as a share of the likeliest."""
    seed: int | None = None
    """Equal seeds give equal tokens for equal logits, whoever else is in the batch. None: a random one."""
    max_tokens: int | None = None
    """Most tokens of the answer. None: as many as the context takes."""
    min_tokens: int = 0
    """No stop token before so many others."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end of text."""
    ignore_eos: bool = False
    """Whether the model's own end of text is a token like any other."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the answer has already."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the answer has the token."""
    repetition_penalty: float = 1.0
    """Logits of tokens of prompt and answer are divided by this if positive, multiplied if not."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each token. None: no logprobs at all."""

    def __post_init__(self) -> None:
        within("temperature", self.temperature, 0, 2)
        within("top_p", self.top_p, 0, 1)
        within("top_k", self.top_k, 0, 1 << 20, whole=True)
        within("min_p", self.min_p, 0, 1)
        within("min_tokens", self.min_tokens, 0, 1 << 20, whole=True)
        within("presence_penalty", self.presence_penalty, -2, 2)
        within("frequency_penalty", self.frequency_penalty, -2, 2)
        within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            within("seed", self.seed, -(1 << 63), (1 << 63) - 1, whole=True)
        if self.max_tokens is not None:
            within("max_tokens", self.max_tokens, 1, 1 << 20, whole=True)
            within("min_tokens", self.min_tokens, 0, self.max_tokens, whole=True)
        if self.logprobs is not None:
            within("logprobs", self.logprobs, 0, 20, whole=True)
        if isinstance(self.stop_ids, str) or not isinstance(self.stop_ids, Collection):
            raise OutOfRange(f"stop_ids is {self.stop_ids!r:.80}", field="stop_ids", expected="a list of token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise OutOfRange(f"logit_bias is {self.logit_bias!r:.80}", field="logit_bias", expected="numbers by token id")
        if not isinstance(self.ignore_eos, bool):
            raise OutOfRange(f"ignore_eos is {self.ignore_eos!r:.80}", field="ignore_eos", expected="True or False")
        within("len(stop_ids)", len(self.stop_ids), 0, 64, whole=True)
        for token in self.stop_ids:
            within("stop_ids", token, 0, (1 << 31) - 1, whole=True)
        within("len(logit_bias)", len(self.logit_bias), 0, 1024, whole=True)
        for token, bias in self.logit_bias.items():
            within("logit_bias token", token, 0, (1 << 31) - 1, whole=True)
            within("logit_bias", bias, -100, 100)
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
        """Whether the argmax of the model's own logits is all that is wanted."""
        return self.is_greedy and not (self.is_penalised or self.logit_bias or self.min_tokens)


class SequenceState(StrEnum):
    """Where a sequence is. It is DONE exactly once and for ever."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its pages were given to others; what it has said is kept and will be computed again."""
    DONE = "done"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One answer in the making. The scheduler changes its state, the page pool its pages, nobody else anything."""

    id: str
    tenant: str
    prompt: InitVar[Collection[int]]
    sampling: Sampling
    arrival: float
    """The scheduler's clock when it came."""
    adapter: str = ""
    """Hash of the adapter's content; empty: the base model alone."""
    salt: bytes = b""
    """Set by the server for each tenant: cached pages are found only with the salt they were made with."""
    weight: float = 1.0
    """The tenant's share against others', and who makes room for whom."""
    eos_ids: tuple[int, ...] = ()
    """The model's own ends of text."""
    number: int = 0
    """Which of the `n` answers to one prompt this is."""
    parent: Sequence | None = None
    """The first of the answers to the same prompt: it computes the prompt for all."""

    tokens: array[int] = field(init=False, repr=False)
    """Prompt and answer so far."""
    prompt_length: int = field(init=False)
    seed: int = field(init=False, repr=False)
    end_ids: frozenset[int] = field(init=False, repr=False)
    """Tokens that end this answer."""
    limit: int = field(init=False, default=1 << 40)
    """Number of tokens, prompt and answer, at which it ends."""
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    reason: FinishReason | None = field(init=False, default=None)
    preemptions: int = field(init=False, default=0)
    pages: list[int] = field(init=False, default_factory=list)
    """Pages of the cache, in the order of its tokens."""
    computed: int = field(init=False, default=0)
    """How many tokens have their keys and values in those pages."""
    cached: int | None = field(init=False, default=None)
    """How many tokens of the prompt were found in the cache; None until admitted."""
    keys: list[bytes] = field(init=False, default_factory=list, repr=False)
    """Names of its full pages, as far as they were needed: the page pool's note."""
    committed: int = field(init=False, default=0, repr=False)
    """How many of its pages others may find: the page pool's note."""

    def __post_init__(self, prompt: Collection[int]) -> None:
        try:
            self.tokens = array("q", prompt)
        except (TypeError, OverflowError) as error:
            raise OutOfRange(f"prompt: {error}", field="prompt", expected="token ids") from None
        if not self.tokens:
            raise OutOfRange("the prompt has no tokens", field="prompt", expected="one at least")
        within("len(prompt)", len(self.tokens), 1, 1 << 24, whole=True)
        within("weight", self.weight, 0.001, 1000)
        self.prompt_length = len(self.tokens)
        self.seed = secrets.randbits(62) if self.sampling.seed is None else self.sampling.seed
        self.end_ids = frozenset(self.sampling.stop_ids) | frozenset(() if self.sampling.ignore_eos else self.eos_ids)

    @property
    def outputs(self) -> list[int]:
        """The answer so far, with the token that ended it."""
        return self.tokens[self.prompt_length :].tolist()

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """How many tokens are still to be computed before the next one can be chosen; 1 while it decodes."""
        return len(self.tokens) - self.computed

    def check(self, *, vocabulary: int, longest: int) -> None:
        """Raise unless every token is one of the model's and prompt and answer fit into `longest` tokens."""
        most = vocabulary - 1
        within("prompt", min(self.tokens), 0, most, whole=True)
        within("prompt", max(self.tokens), 0, most, whole=True)
        for token in self.sampling.stop_ids:
            within("stop_ids", token, 0, most, whole=True)
        for token in self.sampling.logit_bias:
            within("logit_bias token", token, 0, most, whole=True)
        wanted = self.prompt_length + (self.sampling.max_tokens or 1)
        if wanted > longest:
            raise ContextTooLong(
                f"the prompt has {self.prompt_length} tokens and the answer may have {self.sampling.max_tokens or 1}: "
                f"{wanted} together, at most {longest} are taken. Shorten the prompt or lower max_tokens"
            )

    def siblings(self, n: int) -> list[Sequence]:
        """This one and `n` - 1 others that answer the same prompt, each with random numbers of its own."""
        within("n", n, 1, 128, whole=True)
        made = [self]
        for number in range(1, n):
            prompt = self.tokens[: self.prompt_length]
            other = replace(self, id=f"{self.id}.{number}", prompt=prompt, number=number, parent=self)
            other.seed = self.seed
            made.append(other)
        return made
