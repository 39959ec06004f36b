"""Tokenizes text and chats with the model's tokenizer and chat template. A template never comes from a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from symbiosis.common.fair_executor import FairExecutor
from symbiosis.errors import ContextTooLong, NoTokenizer, OutOfRange
from symbiosis.models.chat_encoding import ChatEncoder
from symbiosis.server.openai.errors import BadRequest
from symbiosis.serving.byte_level import byte_table
from symbiosis.serving.detokenizer import TextStream


class ServerTokenizer:
    """Encodes on one thread, outside the event loop, fairly among tenants."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """`max_tokens`: a text that certainly has more is rejected without encoding it."""
        self.tokenizer, self._max_tokens = tokenizer, max_tokens  # copy it for use on another thread
        self._max_token_chars = 1 if tokenizer is None else max(len(token) for token in tokenizer.get_vocab())
        self._byte_table = byte_table(tokenizer)
        self._chats = None if tokenizer is None else ChatEncoder(tokenizer)
        self._worker = FairExecutor("symbiosis-tokenizer")
        self.token_text = lru_cache(maxsize=65536)(self._decode_token)

    async def encode(self, tenant: str, text: str, *, special: bool = True) -> list[int]:
        """Raises `NoTokenizer` or `ContextTooLong`."""
        return await self._worker.run(tenant, lambda: self._encode(text, special))

    def _encode(self, text: str, special: bool) -> list[int]:
        self._check_length(text)
        return list(self._require()(text, add_special_tokens=special)["input_ids"])

    def _check_length(self, text: str) -> None:
        if len(text) > self._max_tokens * self._max_token_chars:
            raise ContextTooLong(f"{len(text)} characters exceed the {self._max_tokens} tokens allowed. Shorten the prompt")

    async def encode_chat(
        self,
        tenant: str,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> list[int]:
        """`variables` are for the template; one that it does not use has no effect. Special tokens in messages are text.

        Raises `NoTokenizer`, `ContextTooLong`, or `BadRequest` if the template rejects the messages.
        """
        return await self._worker.run(tenant, lambda: self._encode_chat(messages, add_generation_prompt, variables or {}))

    def _encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, str]
    ) -> list[int]:
        template = getattr(self._require(), "chat_template", None)
        if not template or self._chats is None:
            raise NoTokenizer("this model's tokenizer has no chat template: use /v1/completions")
        _check_tools(messages, str(template))
        try:
            chat = self._chats.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        except OutOfRange as error:
            raise BadRequest(str(error), field="messages") from None
        except Exception as error:  # noqa: BLE001 - templates may raise anything, e.g. for an invalid order of roles
            raise BadRequest(f"the model's chat template rejects these messages: {error}", field="messages") from None
        self._check_length(chat.text)
        return self._chats.tokenize(chat)

    async def decode(self, tenant: str, ids: list[int]) -> str:
        """Raises `NoTokenizer`, or `OutOfRange` for an invalid token."""

        def decode() -> str:
            tokenizer = self._require()
            if max(ids, default=0) >= len(tokenizer):
                raise OutOfRange(f"tokens: {max(ids)} is not a token, expected less than {len(tokenizer)}", field="tokens")
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        return await self._worker.run(tenant, decode)

    def make_stream(self, stops: Sequence[str], *, include_stop: bool, skip_special: bool) -> TextStream:
        return TextStream(
            self._require(), stops, include_stop=include_stop, skip_special_tokens=skip_special, table=self._byte_table
        )

    def _decode_token(self, token: int) -> str:
        """The text of one token, with � for incomplete characters."""
        return str(self._require().decode([token], skip_special_tokens=False))

    def _require(self) -> Any:
        if self.tokenizer is None:
            raise NoTokenizer("this model is served without a tokenizer: text and chats are not supported")
        return self.tokenizer


def _check_tools(messages: Sequence[dict[str, Any]], template: str) -> None:
    """Raise `BadRequest` for a function call in the history that the template would drop without a word."""
    for index, message in enumerate(messages):
        field, what, instead = f"messages.{index}.", "", ""
        if "tool_calls" in message and "tool_calls" not in template:
            field, what, instead = f"{field}tool_calls", "function calls", "into content"
        elif message["role"] == "tool" and not re.search(r"""['"]tool['"]""", template):
            field, what, instead = f"{field}role", "results of function calls", "into a message of the user"
        if what:
            raise BadRequest(
                f"{field}: {what} are not supported by this model's chat template: write them {instead} as text",
                field=field,
                code="unsupported_parameter",
            )
