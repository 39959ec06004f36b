"""A talk of several turns, whoever answers: a connected model (`chatting`) or a server (`site`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from symbiosis.cli.http_client import HttpClient
from symbiosis.errors import SymbiosisError

Write = Callable[[str], None]


class BadPrompt(SymbiosisError):
    """A prompt the model cannot take."""

    code = "bad_prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling:
    """How answers are drawn."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0: the likeliest token each time."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadPrompt(f"max new tokens is {self.max_new_tokens}: expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise BadPrompt(f"temperature is {self.temperature}: expected 0 (greedy) or more")


class ChatBackend(Protocol):
    """Who can answer a chat."""

    def answer(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Write | None = None) -> str:
        """The assistant's answer. Pieces go to `write` as they come."""
        ...


class HttpChat:
    """A server that answers: with its base model, or with one of its adapters by name."""

    def __init__(self, site: HttpClient, adapter: str | None, seed: int | None) -> None:
        self._site = site
        self._model = adapter or site.models()[0]["id"]
        self._more: dict[str, Any] = {} if seed is None else {"seed": seed}

    def answer(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Write | None = None) -> str:
        pieces: list[str] = []
        options = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, **self._more}
        for piece in self._site.chat(self._model, messages, **options):
            pieces.append(piece)
            if write is not None:
                write(piece)
        return "".join(pieces)


def chat(speaker: ChatBackend, lines: Iterator[str], sampling: ChatSampling, write: Write, system: str | None = None) -> None:
    """Answer line after line, remembering the talk, until `/exit` or the end of the lines."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for line in lines:
        asked = line.strip()
        if asked == "/exit":
            return
        if not asked:
            continue
        messages.append({"role": "user", "content": asked})
        answer = speaker.answer(messages, sampling, write)
        write("\n")
        messages.append({"role": "assistant", "content": answer})
