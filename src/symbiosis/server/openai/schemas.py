"""Schemas of request bodies. Every number and list is bounded; unknown fields and unsupported values are rejected."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from symbiosis.errors import OutOfRange
from symbiosis.server.openai.ignored_fields import (
    IgnoredFields,
    IgnoredMessageFields,
    IgnoredPartFields,
    IgnoredStreamOptions,
)
from symbiosis.server.openai.strict_model import UNSUPPORTED, NullableModel, Only, StrictModel

_MAX_CHARACTERS = 8 << 20
_MAX_TOKENS = 1 << 20

Text = Annotated[str, Field(max_length=_MAX_CHARACTERS)]
# fail_fast: an error for each of a million tokens would block the event loop.
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_MAX_CHOICES = 128


class StreamOptions(IgnoredStreamOptions):
    include_usage: bool | None = None


class SamplingFields(IgnoredFields):
    """Fields of completions and chats. `null` equals an absent field."""

    model: Name
    """The base model, an adapter's name, or `base:name`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    """-1 or 0: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """Default: true."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true: set it, or leave stream_options out")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def sampling(self, defaults: dict[str, float], *, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """Sampling parameters as the engine accepts them."""
        params = {name: getattr(self, name) for name in _ENGINE_FIELDS} | {
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "max_tokens": max_tokens,
            "stop_ids": self.stop_token_ids,
            "logprobs": logprobs,
        }
        return defaults | {name: value for name, value in params.items() if value is not None}


_ENGINE_FIELDS = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields with the same name in the engine."""


class CompletionRequest(SamplingFields):
    """/v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=64, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=64, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    suffix: Annotated[Any, Only(("",), "the model cannot insert text before a suffix: leave it out")] = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, info.data.get("n") or 1):
            raise PydanticCustomError(UNSUPPORTED, "choosing the best of several is not supported: leave best_of out")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [list(self.prompt)] if isinstance(self.prompt[0], int) else list(self.prompt)


class TextPart(IgnoredPartFields):
    type: Literal["text"]
    text: Text


class CalledFunction(NullableModel):
    name: Name
    arguments: Annotated[str, Field(max_length=1 << 20)]
    """JSON, as the model wrote it."""


class ToolCall(NullableModel):
    """A function call in the history of a chat. This server makes none."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_dict(self) -> dict[str, Any]:
        """Chat templates expect the arguments as an object. Arguments that are not JSON stay a text."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(IgnoredMessageFields):
    """A message of a request, or one of a response as `model_dump` gives it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`tool` and `tool_calls` are for chat templates that use them."""
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256, fail_fast=True)] | None = None
    """Null only for the assistant."""
    name: Name | None = None
    reasoning_content: Text | None = None
    """Of the assistant, for templates that use it."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _check_role(cls, value: Any) -> Any:
        if value == "function":
            raise PydanticCustomError(
                UNSUPPORTED, "results of function calls are not supported: write them as text of the user"
            )
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _check_parts(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                raise ValueError(f"a part of type {kind!a:.60} is not supported: expected text")
        return value

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"the {self.role}'s message has no content: expected a text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"the {self.role}'s message has tool_calls: expected them in messages of the assistant")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        optional = {"name": self.name, "reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id}
        calls = {"tool_calls": [call.to_dict() for call in self.tool_calls]} if self.tool_calls else {}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": content, **given, **calls}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatRequest(SamplingFields):
    """/v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one")
        return self


class TokenizeRequest(StrictModel):
    """/tokenize: a text, or a chat rendered by the template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """/detokenize: special tokens are included."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=_MAX_TOKENS, fail_fast=True)]


ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
AdapterName = Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]


class LoadAdapterRequest(StrictModel):
    """/v1/load_lora_adapter, as in vLLM."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    load_inplace: bool = False


class UnloadAdapterRequest(StrictModel):
    lora_name: AdapterName


class PinAdapterRequest(StrictModel):
    """/v1/pin_lora_adapter."""

    lora_name: AdapterName
    pinned: bool = True
    owner: Annotated[str, Field(max_length=64)] | None = None
    """None: a shared adapter."""


class AdapterPath(StrictModel):
    """The last part of /v1/adapters/{name}."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def check_n(prompts: int, n: int) -> None:
    """Raises `OutOfRange` if one request has too many choices."""
    if prompts * n > _MAX_CHOICES:
        raise OutOfRange(f"{prompts} prompts with n={n} are {prompts * n} choices, at most {_MAX_CHOICES} allowed", field="n")
