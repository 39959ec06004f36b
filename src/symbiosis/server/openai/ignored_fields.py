"""Fields that clients of OpenAI send and that do not change a completion here.

Most have no effect; a chat template may use some.
Of a feature that this server does not have, only the value that turns it off is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from symbiosis.server.openai.strict_model import NullableModel, Only

Label = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]
Options = Annotated[dict[str, Any], Field(max_length=16)]
_NO_TOOLS = "function calling is not supported: leave it out"
_TEXT_ONLY = "only text is supported: leave it out"


class IgnoredFields(NullableModel):
    """Of completions and chats."""

    add_generation_prompt: Annotated[Any, Only((True,), "the reply is always generated: leave it out")] = None
    audio: Annotated[Any, Only((), _TEXT_ONLY)] = None
    chat_template_kwargs: Annotated[Any, Only(({},), "variables of chat templates are not supported: leave it out")] = None
    continue_final_message: Annotated[Any, Only((False,), "a message cannot be continued: leave it out")] = None
    function_call: Annotated[Any, Only(("none", "auto"), _NO_TOOLS)] = None
    functions: Annotated[Any, Only(([],), _NO_TOOLS)] = None
    metadata: Metadata | None = None
    modalities: Annotated[Any, Only((["text"],), "only text is supported: expected ['text']")] = None
    moderation: Annotated[Any, Only((), "moderation is not supported: leave it out")] = None
    parallel_tool_calls: bool | None = None
    prediction: Options | None = None
    """It would speed up a completion and not change it."""
    prompt_cache_key: Label | None = None
    prompt_cache_options: Options | None = None
    prompt_cache_retention: Label | None = None
    """The prefix cache is automatic."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For chat templates that use it."""
    response_format: Annotated[Any, Only(({"type": "text"},), "JSON modes are not supported: expected the type text")] = None
    safety_identifier: Label | None = None
    service_tier: Annotated[Any, Only(("auto", "default"), "there is one service tier: expected auto or default")] = None
    store: bool | None = None
    """Completions are never stored."""
    tool_choice: Annotated[Any, Only(("none", "auto"), _NO_TOOLS)] = None
    tools: Annotated[Any, Only(([],), _NO_TOOLS)] = None
    user: Label | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """For chat templates that use it."""
    web_search_options: Annotated[Any, Only((), "web search is not supported: leave it out")] = None


class IgnoredMessageFields(NullableModel):
    """Of a message that comes from a response."""

    annotations: Annotated[list[Any], Field(max_length=1024)] | None = None
    audio: Annotated[Any, Only((), _TEXT_ONLY)] = None
    function_call: Annotated[Any, Only((), _NO_TOOLS)] = None
    refusal: Annotated[Any, Only((), "a refusal is not supported: move its text to content")] = None


class IgnoredStreamOptions(NullableModel):
    include_obfuscation: bool | None = None


class IgnoredPartFields(NullableModel):
    """Of a text part."""

    prompt_cache_breakpoint: Options | None = None
