"""Detokenization of byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM): each token is a fixed string of bytes.

The text of tokens is the UTF-8 text of their bytes, so a table of bytes and an incremental UTF-8 decoder give the same text
as the tokenizer, at a fraction of its time. `detokenizer.Detokenizer` is the reference, for all other tokenizers too.
"""

from __future__ import annotations

import codecs
import json
from random import Random
from typing import Any

_PROBED = 512
_new_decoder = codecs.getincrementaldecoder("utf-8")


def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves, others moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_of_character()


class ByteTable:
    """The bytes of each token. One per tokenizer; any thread may use it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._special = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    def find(self, token: int) -> bytes:
        """Nothing for a number that is no token."""
        found = self._bytes.get(token)
        if found is None:
            text = self._tokenizer.id_to_token(token) or ""
            try:
                found = bytes(_BYTES[character] for character in text)
            except KeyError:
                found = text.encode()  # an added token that stands for itself
            self._bytes[token] = found
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special


def byte_table(tokenizer: Any) -> ByteTable | None:
    """None if the tokens are not strings of bytes: by the tokenizer's decoder, and by the text of some of its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
        return None
    table, random = ByteTable(tokenizer), Random(0)  # noqa: S311 - a sample
    for skip in (True, False):
        tokens = [random.randrange(len(tokenizer)) for _ in range(_PROBED)]
        detokenizer = ByteLevelDetokenizer(table, skip_special_tokens=skip)
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        if text != tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False):
            return None
    return table


class ByteLevelDetokenizer:
    """As `Detokenizer`: emits only text that later tokens cannot change."""

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool = True) -> None:
        self._table, self._skip = table, skip_special_tokens
        self._decoder = _new_decoder("replace")

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if self._skip and self._table.is_special(token):
            return ""
        return self._decoder.decode(self._table.find(token))

    def flush(self) -> str:
        """The remaining text, when no token follows."""
        return self._decoder.decode(b"", final=True)
