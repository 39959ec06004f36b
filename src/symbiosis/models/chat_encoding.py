"""Encodes chats by a tokenizer's template. Special tokens come from the template only: in a message they stay text.

Messages without special tokens are rendered and encoded as a whole. Otherwise special tokens in messages are hidden from
the template and its own are renamed. A copy of the tokenizer knows the new names and takes the old ones as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from symbiosis.errors import OutOfRange

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Private-use characters around a random name: no message contains it."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    renamed: str | None = None
    """The text with renamed special tokens of the template; None: no message has a special token."""


class ChatEncoder:
    """`tokenizer` is a transformers tokenizer with a chat template. As thread-safe as the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = _match_any(token.content for token in added.values())
        self._special_ids = {token.content: id for id, token in added.items() if token.special}
        self._special = _match_any(self._special_ids)
        self._starts = {content[:size] for content in self._special_ids for size in range(1, len(content))}
        self._ends = {content[size:] for content in self._special_ids for size in range(1, len(content))}
        self._max_part = max(map(len, self._special_ids), default=1) - 1
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_normalized = any(token.special and token.normalized for token in added.values())
        self._normalizer = backend.normalizer if is_normalized and backend is not None else None

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render and tokenize. Raises what the template raises, or `OutOfRange`."""
        return self.tokenize(self.render(messages, **options))

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
        """`options` are those of `apply_chat_template`. Raises what the template raises, or `OutOfRange`."""
        hidden = _HiddenTexts()
        hides = [self._hide(message, hidden) for message in messages]
        text = str(self._tokenizer.apply_chat_template(hides, tokenize=False, **options))
        if not hidden.texts:
            return RenderedChat(text)
        plain, renamed = list[str](), list[str]()
        for index, part in enumerate(hidden.split(text)):
            if index % 2:  # a hidden text
                original = hidden.texts[int(part)]
                plain.append(original)
                renamed.append(original)
            else:
                plain.append(part)
                renamed.append(self._added.sub(self._rename, part))
        return RenderedChat("".join(plain), "".join(renamed))

    def tokenize(self, chat: RenderedChat) -> list[int]:
        """Raises `OutOfRange` if the tokenizer has no way to take a special token as text."""
        if chat.renamed is None:
            return list(self._tokenizer(chat.text, add_special_tokens=False)["input_ids"])
        tokenizer, original_ids = self._text_tokenizer
        ids: list[int] = tokenizer.encode(chat.renamed, add_special_tokens=False).ids
        specials = set(self._special_ids.values())
        if not specials.isdisjoint(ids):  # the template's own have other ids here
            raise self._refuse()
        return [original_ids.get(id, id) for id in ids]

    def _hide(self, message: Mapping[str, Any], hidden: _HiddenTexts) -> dict[str, Any]:
        return {key: value if key == "role" else self._hide_all(value, hidden) for key, value in message.items()}

    def _hide_all(self, value: Any, hidden: _HiddenTexts) -> Any:
        """In texts at any depth: arguments of function calls are objects."""
        if isinstance(value, str):
            return self._hide_special(value, hidden)
        if isinstance(value, list):
            return [self._hide_all(each, hidden) for each in value]
        if isinstance(value, dict):
            return {self._hide_all(key, hidden): self._hide_all(each, hidden) for key, each in value.items()}
        return value

    def _hide_special(self, text: str, hidden: _HiddenTexts) -> str:
        """Hide special tokens, and separate the text from the template where both together could form one."""
        if self._special.search(text):
            if getattr(self._tokenizer, "backend_tokenizer", None) is None:
                raise self._refuse()
            text = self._special.sub(lambda found: hidden.add(found[0]), text)
        if self._normalizer is not None and self._special.search(self._normalizer.normalize_str(text)):
            raise self._refuse()  # a special token in other letters
        # Templates may strip a message: the separator is next to the text, not to the whitespace around it.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(1, min(self._max_part, end - start) + 1)
        if any(text[end - size : end] in self._starts for size in sizes):
            text = text[:end] + hidden.add("") + text[end:]
        if any(text[start : start + size] in self._ends for size in sizes):
            text = text[:start] + hidden.add("") + text[start:]
        return text

    def _rename(self, found: re.Match[str]) -> str:
        return self._new_names.get(found[0], found[0])

    @cached_property
    def _new_names(self) -> dict[str, str]:
        secret = secrets.token_hex(16)
        return {content: f"{_OPEN}{secret}-{index}{_CLOSE}" for index, content in enumerate(self._special_ids)}

    @cached_property
    def _text_tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that knows special tokens by their new names only, and the original ids by its ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise self._refuse()
        tokenizer: Tokenizer = Tokenizer.from_str(backend.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # special tokens in a text are text; the new ones are not special here
        flags = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        tokenizer.add_tokens(
            [
                AddedToken(name, lstrip=flags[content].lstrip, rstrip=flags[content].rstrip, normalized=False)
                for content, name in self._new_names.items()
            ]
        )
        vocabulary = tokenizer.get_vocab()
        return tokenizer, {vocabulary[name]: self._special_ids[content] for content, name in self._new_names.items()}

    def _refuse(self) -> OutOfRange:
        return OutOfRange("a message has a special token of this model as text, which its tokenizer cannot encode: remove it")


@dataclass(slots=True)
class _HiddenTexts:
    """Texts that placeholders replace while the template is rendered."""

    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> str:
        self.texts.append(text)
        return f"{_OPEN}{self.secret}-{len(self.texts) - 1}{_CLOSE}"

    def split(self, rendered: str) -> list[str]:
        """Texts and, at odd places, the index of the hidden text between them."""
        return re.split(f"{_OPEN}{self.secret}-([0-9]+){_CLOSE}", rendered)


def _match_any(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these strings at a place, like the tokenizer; nothing if there are none."""
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
