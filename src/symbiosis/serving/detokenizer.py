"""Incremental detokenization: text that was emitted is never taken back.

`Detokenizer` emits only text that later tokens cannot change, so its output concatenates to the text of all tokens decoded
at once. Later tokens can change the bytes of an unfinished character. With byte-fallback tokenizers (sentencepiece) they
can change a whole run of byte tokens, since one invalid byte invalidates the run. `StopStrings` holds back text that may be
the beginning of a stop string. `TextStream` combines both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Any

from symbiosis.errors import OutOfRange
from symbiosis.serving.byte_level import ByteLevelDetokenizer, ByteTable
from symbiosis.serving.scheduling.sequence import check_range

_REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WINDOW = 16
"""Least number of tokens that are decoded again with each new one."""


class Detokenizer:
    """Decodes a window of the last tokens, never all.

    A window's text can differ from the same tokens' text amid others only at its very beginning, where a space is stripped.
    So the window begins with tokens whose text was emitted before, and only the text after them is used. `tokenizer` is a
    transformers tokenizer; its clean-up of spaces is off, since it rewrites earlier text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # the window
        self._num_emitted = 0  # characters of the window's text
        self._num_complete = 0  # tokens of the window whose text was emitted entirely
        self._in_byte_run = False

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        if self._is_in_byte_run(token):
            return ""
        text = self._decode()
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), 3)  # a character has at most four bytes
        new = text[self._num_emitted : len(text) - held]
        self._num_emitted += len(new)
        if not held:
            if new and len(self._ids) - self._num_complete >= _WINDOW:
                self._restart_at(self._num_complete, self._decode(self._num_complete))
            elif new and self._num_complete == 0:
                self._num_complete = len(self._ids)
        elif len(self._ids) > 4 * _WINDOW:
            # Only replacement characters for so long: the last few tokens suffice, if they have text of their own.
            start = len(self._ids) - _WINDOW
            tail = self._decode(start)
            if len(tail) > 2 * 4 and text.endswith(tail[4:]):
                self._restart_at(start, tail, held=held)
        return new

    def flush(self) -> str:
        """The remaining text, when no token follows."""
        new = self._decode()[self._num_emitted :]
        self._ids, self._num_emitted, self._num_complete, self._in_byte_run = [], 0, 0, False
        return new

    def _restart_at(self, start: int, text: str, *, held: int = 0) -> None:
        """Drop the window's first `start` tokens; the others decode to `text`."""
        del self._ids[:start]
        self._num_emitted = len(text) - held
        self._num_complete = 0 if held else len(self._ids)

    def _decode(self, start: int = 0) -> str:
        text = self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _is_in_byte_run(self, token: int) -> bool:
        """Whether the token is a byte, or has no text between bytes."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str) and _BYTE.fullmatch(name):
            self._in_byte_run = True
        elif self._in_byte_run and self._decode(-1):
            self._in_byte_run = False
        return self._in_byte_run


class _StopMatcher:
    """The length of a stop string's prefix that the text ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        for index in range(1, len(text)):
            length = self._fallback[index - 1]
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            self._fallback[index] = length + (text[index] == text[length])

    def advance(self, character: str) -> bool:
        """True if this character completes the stop string."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)


class StopStrings:
    """Emits text up to the first stop string: the one that is complete first; of several, the longest.

    So the output does not depend on how the text was split.
    """

    def __init__(self, stops: Seq[str] = (), *, include: bool = False) -> None:
        """`include`: whether the stop string itself is emitted. Raises `OutOfRange`."""
        if isinstance(stops, str):
            stops = (stops,)
        check_range("len(stop)", len(stops), 0, 16, integer=True)
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= 1024:
                expected = "strings of 1 to 1024 characters"
                raise OutOfRange(f"stop has {stop!r:.80}", field="stop", expected=expected)
        self.stopped: str | None = None
        """The stop string that was found."""
        self._include = include
        self._stops = [_StopMatcher(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be emitted now; none after a stop string."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        buffer, start = self._held + text, len(self._held)
        for index in range(start, len(buffer)):
            found = [stop.text for stop in self._stops if stop.advance(buffer[index])]
            if found:
                self.stopped, self._held = max(found, key=len), ""
                end = index + 1
                return buffer[: end if self._include else end - len(self.stopped)]
        keep = len(buffer) - max(stop.matched for stop in self._stops)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """The text held back, when no text follows."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Tokens of one completion in, its text out, up to the first stop string."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Seq[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        table: ByteTable | None = None,
    ) -> None:
        """`table`: of the tokenizer, if it is a byte-level one."""
        self._detokenizer: Detokenizer | ByteLevelDetokenizer
        if table is None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        else:
            self._detokenizer = ByteLevelDetokenizer(table, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found: the sequence should be cancelled."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """The text that can be emitted now."""
        return "" if self.stopped is not None else self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The remaining text, which may contain a stop string."""
        if self.stopped is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
