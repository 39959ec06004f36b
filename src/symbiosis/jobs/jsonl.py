"""Training data as it comes: JSONL, read strictly. What is wrong is said of several lines at once, by their numbers.

A line is a chat (`messages`), a text (`text`) or a `prompt` with its `completion`; all lines of a file are of one kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from symbiosis.jobs.errors import BadTrainingFile

ROLES = ("system", "user", "assistant")
MAX_LINE = 4 << 20
MAX_MESSAGES = 256
_SHOWN = 5
"""Lines that an error names."""
_ENOUGH = 1000
"""Faults, after which no more are looked for."""


class LineKind(StrEnum):
    CHAT = "messages"
    TEXT = "text"
    PAIR = "prompt"


_FIELDS = {LineKind.CHAT: {"messages"}, LineKind.TEXT: {"text"}, LineKind.PAIR: {"prompt", "completion"}}


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    content: str
    learnt: bool
    """The assistant's, unless its weight is 0."""

    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class JsonlSample:
    """One line."""

    line: int
    messages: tuple[ChatTurn, ...] = ()
    text: str = ""
    prompt: str = ""
    completion: str = ""

    @property
    def kind(self) -> LineKind:
        return LineKind.CHAT if self.messages else LineKind.TEXT if self.text else LineKind.PAIR


class LineErrors:
    """Gathers what is wrong with lines."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._found: list[str] = []
        self.count = 0

    def add(self, line: int, what: str) -> None:
        """Raises `BadTrainingFile` once there are so many that more would tell nothing."""
        self.count += 1
        if len(self._found) < _SHOWN:
            self._found.append(f"line {line}: {what}")
        if self.count == _ENOUGH:
            self.check()

    def check(self) -> None:
        """Raises `BadTrainingFile` if anything was added."""
        if self.count:
            more = self.count - len(self._found)
            raise BadTrainingFile("; ".join(self._found) + (f"; and {more} more" if more else ""), field=self._field)


class _BadLine(ValueError):
    pass


def read(path: Path, *, field: str, max_examples: int, check: Callable[[], None] = lambda: None) -> list[JsonlSample]:
    """All of a file. Raises `BadTrainingFile`, or what `check` raises between two lines."""
    faults, samples, kind = LineErrors(field), list[JsonlSample](), None
    for number, raw in _lines(path):
        check()
        if raw is None:
            faults.add(number, f"has more than {MAX_LINE} bytes")
            continue
        if not raw.strip():
            continue
        try:
            sample = parse(number, raw)
        except _BadLine as error:
            faults.add(number, str(error))
            continue
        kind = kind or sample.kind
        if sample.kind is not kind:
            faults.add(number, f"has '{sample.kind}', lines before it have '{kind}': all lines of a file are of one kind")
            continue
        samples.append(sample)
        if len(samples) > max_examples:
            raise BadTrainingFile(f"the file has more than the {max_examples} examples that are taken", field=field)
    faults.check()
    if not samples:
        raise BadTrainingFile('the file is empty: expected a line such as {"messages": […]} per example', field=field)
    return samples


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Numbers and bytes of lines, None for one that is too long; never more than one line in memory."""
    with path.open("rb") as file:
        number, skipping = 0, False
        while piece := file.readline(MAX_LINE + 1):
            ends = piece.endswith(b"\n")
            if skipping:
                skipping = not ends
                continue
            number += 1
            skipping = not ends and len(piece) > MAX_LINE
            yield number, None if len(piece) > MAX_LINE else piece


def parse(number: int, raw: bytes) -> JsonlSample:
    """Raises `ValueError` with what is wrong."""
    row = _json(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    if not isinstance(row, dict) or set(row) not in _FIELDS.values():
        found = ", ".join(f"{key!r:.40}" for key in list(row)[:5]) if isinstance(row, dict) else type(row).__name__
        raise _BadLine(
            f"expected an object with 'messages', with 'text', or with 'prompt' and 'completion', and nothing else; got "
            f"{found or 'an empty one'}"
        )
    if "messages" in row:
        return JsonlSample(number, messages=_messages(row["messages"]))
    if "text" in row:
        return JsonlSample(number, text=_text(row["text"], "'text'"))
    return JsonlSample(number, prompt=_text(row["prompt"], "'prompt'"), completion=_text(row["completion"], "'completion'"))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except UnicodeDecodeError:
        raise _BadLine("is not UTF-8") from None
    except RecursionError:
        raise _BadLine("is nested too deeply") from None
    except _BadLine:
        raise
    except json.JSONDecodeError as error:
        raise _BadLine(f"is not JSON ({error.msg} at character {error.pos + 1})") from None
    except ValueError as error:
        raise _BadLine(f"is not JSON ({str(error)[:80]})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _BadLine("has a key twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise _BadLine(f"has {name}, which is no number of JSON")


def _messages(value: Any) -> tuple[ChatTurn, ...]:
    if not isinstance(value, list) or not value:
        raise _BadLine("'messages' must be a list that is not empty")
    if len(value) > MAX_MESSAGES:
        raise _BadLine(f"has {len(value)} messages, at most {MAX_MESSAGES} are taken")
    messages = tuple(_message(number, each) for number, each in enumerate(value, 1))
    if not any(message.learnt for message in messages):
        raise _BadLine("has no message of the assistant with a weight above 0, so there is nothing to learn")
    return messages


def _message(number: int, value: Any) -> ChatTurn:
    where = f"message {number}"
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= {"role", "content", "weight"}:
        found = ", ".join(f"{key!r:.40}" for key in list(value)[:6]) if isinstance(value, dict) else type(value).__name__
        raise _BadLine(f"{where} must have 'role' and 'content' (and 'weight' if you like), got {found or 'nothing'}")
    if value["role"] not in ROLES:
        raise _BadLine(f"{where} has the role {value['role']!r:.40}, expected one of {', '.join(ROLES)}")
    weight = value.get("weight", 1)
    if "weight" in value and (value["role"] != "assistant" or isinstance(weight, bool) or weight not in (0, 1)):
        raise _BadLine(f"{where} has the weight {weight!r:.40}: only the assistant's have one, and it is 0 or 1")
    content = _text(value["content"], f"'content' of {where}")
    return ChatTurn(value["role"], content, value["role"] == "assistant" and weight == 1)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadLine(f"{what} must be a text that is not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"{what} has half a character (a lone surrogate)") from None
    return value
