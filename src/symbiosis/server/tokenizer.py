"""Text to tokens and back, by the model's own tokenizer and chat template; a template never comes from a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from symbiosis.errors import ContextTooLong, NoTokenizer, OutOfRange
from symbiosis.server.keyed_locks import KeyedLocks
from symbiosis.server.openai.errors import BadRequest
from symbiosis.serving.detokenizer import TextStream

_Made = TypeVar("_Made")


class ServerTokenizer:
    """Long texts take long: all are encoded on one thread beside the event loop, where tenants take turns."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        """`longest`: most tokens a request may have. What certainly has more is not even encoded."""
        self._tokenizer, self._longest = tokenizer, longest
        self._widest = 1 if tokenizer is None else max(len(piece) for piece in tokenizer.get_vocab())
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-tokenizer")
        self._turns = KeyedLocks()
        """A tenant has one text on the thread or before it; its others wait behind that."""
        self.shown = lru_cache(maxsize=65536)(self._shown)

    @property
    def tokenizer(self) -> Any:
        """None if the model has none. For others to copy: this one has its thread."""
        return self._tokenizer

    async def encode(self, tenant: str, text: str, *, special: bool = True) -> list[int]:
        """Raises `NoTokenizer` or `ContextTooLong`."""
        return await self._run(tenant, lambda: self._ids(text, special))

    def _ids(self, text: str, special: bool) -> list[int]:
        if len(text) > self._longest * self._widest:
            raise ContextTooLong(
                f"a text of {len(text)} characters has more tokens than the {self._longest} that are taken. Shorten the prompt"
            )
        return list(self._known()(text, add_special_tokens=special)["input_ids"])

    async def encode_chat(self, tenant: str, messages: Sequence[dict[str, str]], *, answer: bool = True) -> list[int]:
        """A chat as the tokenizer's template writes it; with `answer`, up to where the assistant begins."""
        return await self._run(tenant, lambda: self._chat(messages, answer))

    def _chat(self, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
        tokenizer = self._known()
        if not getattr(tokenizer, "chat_template", None):
            raise NoTokenizer("this model's tokenizer has no chat template: use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like, such as for roles in a wrong order
            raise BadRequest(f"the model's chat template does not take these messages: {error}", field="messages") from None
        return self._ids(text, False)

    async def decode(self, tenant: str, ids: list[int]) -> str:
        """Raises `NoTokenizer`, or `OutOfRange` for what is no token."""

        def text() -> str:
            tokenizer = self._known()
            if max(ids, default=0) >= len(tokenizer):
                raise OutOfRange(f"tokens: {max(ids)} is no token, expected less than {len(tokenizer)}", field="tokens")
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        return await self._run(tenant, text)

    def stream(self, stops: Sequence[str], *, include_stop: bool, skip_special: bool) -> TextStream:
        return TextStream(self._known(), stops, include_stop=include_stop, skip_special_tokens=skip_special)

    def _shown(self, token: int) -> str:
        """One token by itself; with � where it is not whole characters."""
        text: str = self._known().decode([token], skip_special_tokens=False)
        return text

    def _known(self) -> Any:
        if self._tokenizer is None:
            raise NoTokenizer("this model was served without a tokenizer: neither text nor chats can be read")
        return self._tokenizer

    async def _run(self, tenant: str, work: Callable[[], _Made]) -> _Made:
        async with self._turns.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
