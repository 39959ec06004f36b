"""What may be asked. Every number and list is bounded; a field that is not here, or a value we do not act on, is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from symbiosis.errors import OutOfRange

MAX_TEXT = 8 << 20
_MAX_TOKENS = 1 << 20

Text = Annotated[str, Field(max_length=MAX_TEXT)]
# a list ends at its first fault: an error for each of a million tokens would keep everybody waiting
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Answers = Annotated[int, Field(ge=1, le=128)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    include_usage: bool = False


class SamplingFields(Strict):
    """What completions and chats have in common. `null` is as good as leaving a field out."""

    model: Name
    """The base model, an adapter's name, or `base:name`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    """-1 or 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    n: Answers | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    """A note of the caller's own: it asks nothing of the answer."""

    @model_validator(mode="after")
    def _agrees(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave it out")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """As the engine takes it."""
        wanted = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "seed": self.seed,
            "max_tokens": max_tokens,
            "min_tokens": self.min_tokens,
            "stop_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": logprobs,
        }
        return {name: value for name, value in wanted.items() if value is not None}


class CompletionRequest(SamplingFields):
    """/v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=64, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=64, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [list(self.prompt)] if isinstance(self.prompt[0], int) else list(self.prompt)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256, fail_fast=True)]
    name: Name | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                raise ValueError(f"a part of the type {kind!a:.60} is not supported here: expected text")
        return value

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        made = {"role": self.role, "content": content}
        return made if self.name is None else {**made, "name": self.name}


class ResponseFormat(Strict):
    type: Literal["text"]


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatRequest(SamplingFields):
    """/v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one")
        return self


class TokenizeRequest(Strict):
    """/tokenize: of a text, or of a chat as the template writes it."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """/detokenize: the text of tokens, special ones too."""

    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=_MAX_TOKENS, fail_fast=True)]


AdapterName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


class LoadAdapterRequest(Strict):
    """/v1/load_lora_adapter, as vLLM has it."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    lora_name: AdapterName


class PinAdapterRequest(Strict):
    """/v1/pin_lora_adapter."""

    lora_name: AdapterName
    pinned: bool = True
    owner: Annotated[str, Field(max_length=64)] | None = None
    """Whose it is; None: everybody's."""


class Named(Strict):
    """An adapter by the last part of a path."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def adapter_of(model: str, base: str) -> str | None:
    """The adapter that the `model` field names; None: the base model itself."""
    return None if model == base else model.removeprefix(f"{base}:")


def check_n(prompts: int, n: int) -> None:
    """One request is one request: its prompts times answers are bounded together."""
    if prompts * n > 128:
        raise OutOfRange(f"{prompts} prompts with n={n} are {prompts * n} answers, at most 128 are given", field="n")
