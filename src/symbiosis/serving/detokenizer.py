"""Tokens in, text out, piece by piece: what was given out never has to be taken back.

`Detokenizer` gives out what later tokens cannot change, so the pieces together
are the text that the tokenizer makes of all tokens at once. What later tokens
can change: the bytes of an unfinished character, and with tokenizers that fall
back to bytes (sentencepiece) a whole run of byte tokens, since one bad byte
spoils the run. `StopStrings` holds back what could be the beginning of a stop string.
`TextStream` is both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Any

from symbiosis.errors import OutOfRange
from symbiosis.serving.scheduling.sequence import within

_BROKEN = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WINDOW = 16
"""So many tokens are decoded again with each new one, at least."""


class Detokenizer:
    """Decodes a window of tokens, never all of them; the window begins where text was given out whole.

    A window's text can differ from the same tokens' text in the middle of others
    only at its very beginning (a space is stripped there), so the window begins
    with tokens whose text was given out before, and only what follows is used.
    `tokenizer` is a transformers tokenizer; its clean-up of spaces is off, as it
    rewrites what was given out.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # of the window
        self._given = 0  # characters of the window's text
        self._clean = 0  # tokens of the window whose text was given out whole
        self._in_run = False  # of byte tokens

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        self._ids.append(token)
        if self._is_in_run(token):
            return ""
        text = self._decode()
        held = min(len(text) - len(text.rstrip(_BROKEN)), 3)  # a character has four bytes at most
        new = text[self._given : len(text) - held]
        self._given += len(new)
        if not held:
            if new and len(self._ids) - self._clean >= _WINDOW:
                self._begin_at(self._clean, self._decode(self._clean))
            elif new and self._clean == 0:
                self._clean = len(self._ids)
        elif len(self._ids) > 4 * _WINDOW:
            # Nothing but broken characters for so long: the last few tokens suffice, if they have text of their own.
            start = len(self._ids) - _WINDOW
            tail = self._decode(start)
            if len(tail) > 2 * 4 and text.endswith(tail[4:]):
                self._begin_at(start, tail, held=held)
        return new

    def flush(self) -> str:
        """What is left when no token follows."""
        new = self._decode()[self._given :]
        self._ids, self._given, self._clean, self._in_run = [], 0, 0, False
        return new

    def _begin_at(self, start: int, text: str, *, held: int = 0) -> None:
        """Let the window begin so many tokens later, where all that follows is `text`."""
        del self._ids[:start]
        self._given = len(text) - held
        self._clean = 0 if held else len(self._ids)

    def _decode(self, start: int = 0) -> str:
        text = self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _is_in_run(self, token: int) -> bool:
        """Whether the token is a byte, or nothing at all between bytes."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and _BYTE.fullmatch(piece):
            self._in_run = True
        elif self._in_run and self._decode(-1):
            self._in_run = False
        return self._in_run


class _Stop:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

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
        """True if this character completes it."""
        matched = self.matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        self.matched = matched + (self.text[matched] == character)
        return self.matched == len(self.text)


class StopStrings:
    """Gives text out up to the first stop string. The first is the one complete first; of these, the longest.

    So what is given out does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Seq[str] = (), *, include: bool = False) -> None:
        """`include`: whether the stop string itself is given out. Raises `OutOfRange`."""
        if isinstance(stops, str):
            stops = (stops,)
        within("len(stop)", len(stops), 0, 16, whole=True)
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= 1024:
                expected = "strings of 1 to 1024 characters"
                raise OutOfRange(f"stop has {stop!r:.80}", field="stop", expected=expected)
        self.stopped: str | None = None
        """The stop string that was met."""
        self._include = include
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> str:
        """What can be given out now; nothing after a stop string was met."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        buffer, start = self._held + text, len(self._held)
        for place in range(start, len(buffer)):
            met = [stop.text for stop in self._stops if stop.advance(buffer[place])]
            if met:
                self.stopped, self._held = max(met, key=len), ""
                end = place + 1
                return buffer[: end if self._include else end - len(self.stopped)]
        keep = len(buffer) - max(stop.matched for stop in self._stops)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Tokens of one answer in, its text out, up to the first stop string."""

    def __init__(
        self, tokenizer: Any, stops: Seq[str] = (), *, include_stop: bool = False, skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was met: the sequence should be ended."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """The text that can be given out now."""
        return "" if self.stopped is not None else self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest; a stop string may still be met in it."""
        if self.stopped is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
