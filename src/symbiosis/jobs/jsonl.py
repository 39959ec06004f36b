"""Strict reader of JSONL training data. An error names several bad lines by number.

A line is a chat (`messages`), a text (`text`) or a `prompt` with its `completion`. All lines of a file are of one kind.
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
MAX_LINE_BYTES = 4 << 20
MAX_MESSAGES = 256
_MAX_SHOWN = 5
"""Bad lines that an error names."""
_MAX_ERRORS = 1000
"""Reading stops after this many bad lines."""


class LineKind(StrEnum):
    CHAT = "messages"
    TEXT = "text"
    PAIR = "prompt"


_FIELDS = ({"messages"}, {"text"}, {"prompt", "completion"})


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    content: str
    is_label: bool
    """Whether it is trained on: the assistant's messages with weight 1."""

    def to_dict(self) -> dict[str, str]:
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
    """Collects errors of lines."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._shown: list[str] = []
        self._count = 0

    def add(self, line: int, message: str) -> None:
        """Raises `BadTrainingFile` after `_MAX_ERRORS` errors."""
        self._count += 1
        if len(self._shown) < _MAX_SHOWN:
            self._shown.append(f"line {line}: {message}")
        if self._count == _MAX_ERRORS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises `BadTrainingFile`."""
        if self._count:
            more = self._count - len(self._shown)
            raise BadTrainingFile("; ".join(self._shown) + (f"; and {more} more" if more else ""), field=self._field)


class _BadLine(ValueError):
    pass


def read_samples(path: Path, *, field: str, max_examples: int, check: Callable[[], None] = lambda: None) -> list[JsonlSample]:
    """Raises `BadTrainingFile`, or what `check` raises between two lines."""
    errors, samples, kind = LineErrors(field), list[JsonlSample](), None
    for number, raw in _read_lines(path):
        check()
        if raw is None:
            errors.add(number, f"has more than {MAX_LINE_BYTES} bytes")
            continue
        if not raw.strip():
            continue
        try:
            sample = parse_line(number, raw)
        except _BadLine as error:
            errors.add(number, str(error))
            continue
        kind = kind or sample.kind
        if sample.kind is not kind:
            errors.add(number, f"has '{sample.kind}', earlier lines have '{kind}': all lines of a file must be of one kind")
            continue
        samples.append(sample)
        if len(samples) > max_examples:
            raise BadTrainingFile(f"the file has more than the {max_examples} examples allowed", field=field)
    errors.raise_if_any()
    if not samples:
        raise BadTrainingFile('the file is empty: expected a line such as {"messages": […]} per example', field=field)
    return samples


def _read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers and bytes, None for a line that is too long. Holds at most one line in memory."""
    with path.open("rb") as file:
        number, is_skipping = 0, False
        while chunk := file.readline(MAX_LINE_BYTES + 1):
            is_complete = chunk.endswith(b"\n")
            if is_skipping:
                is_skipping = not is_complete
                continue
            number += 1
            is_too_long = len(chunk) > MAX_LINE_BYTES
            is_skipping = is_too_long and not is_complete
            yield number, None if is_too_long else chunk


def parse_line(number: int, raw: bytes) -> JsonlSample:
    """Raises `ValueError` with the reason."""
    row = _parse_json(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    if not isinstance(row, dict) or set(row) not in _FIELDS:
        raise _BadLine(
            "expected an object with exactly 'messages', 'text', or 'prompt' and 'completion'; got "
            f"{_show_keys(row) or 'an empty one'}"
        )
    if "messages" in row:
        return JsonlSample(number, messages=_parse_messages(row["messages"]))
    if "text" in row:
        return JsonlSample(number, text=_check_text(row["text"], "'text'"))
    prompt, completion = _check_text(row["prompt"], "'prompt'"), _check_text(row["completion"], "'completion'")
    return JsonlSample(number, prompt=prompt, completion=completion)


def _show_keys(value: Any) -> str:
    return ", ".join(f"{key!r:.40}" for key in list(value)[:6]) if isinstance(value, dict) else type(value).__name__


def _parse_json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_check_keys, parse_constant=_reject_constant)
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


def _check_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _BadLine("has a duplicate key")
    return found


def _reject_constant(name: str) -> NoReturn:
    raise _BadLine(f"has {name}, which is not a JSON number")


def _parse_messages(value: Any) -> tuple[ChatTurn, ...]:
    if not isinstance(value, list) or not value:
        raise _BadLine("'messages' must be a non-empty list")
    if len(value) > MAX_MESSAGES:
        raise _BadLine(f"has {len(value)} messages, at most {MAX_MESSAGES} allowed")
    messages = tuple(_parse_message(number, each) for number, each in enumerate(value, 1))
    if not any(message.is_label for message in messages):
        raise _BadLine("has no assistant message with weight 1, so there is nothing to learn")
    return messages


def _parse_message(number: int, value: Any) -> ChatTurn:
    where = f"message {number}"
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= {"role", "content", "weight"}:
        raise _BadLine(f"{where} must have 'role', 'content' and optionally 'weight', got {_show_keys(value) or 'nothing'}")
    if value["role"] not in ROLES:
        raise _BadLine(f"{where} has the role {value['role']!r:.40}, expected one of {', '.join(ROLES)}")
    weight = value.get("weight", 1)
    if "weight" in value and (value["role"] != "assistant" or isinstance(weight, bool) or weight not in (0, 1)):
        raise _BadLine(f"{where} has the weight {weight!r:.40}: expected 0 or 1, on assistant messages only")
    content = _check_text(value["content"], f"'content' of {where}")
    return ChatTurn(value["role"], content, value["role"] == "assistant" and weight == 1)


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadLine(f"{name} must be a non-empty string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"{name} has a lone surrogate") from None
    return value
