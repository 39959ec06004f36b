"""Multi-turn chat over a backend: a connected model (`local_chat`) or a server (`http_client`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from symbiosis.adapters.files import CONFIG, TENSORS, parse_strict_json
from symbiosis.cli.http_client import HttpClient
from symbiosis.errors import BadAdapter, SymbiosisError

Write = Callable[[str], None]


class BadPrompt(SymbiosisError):
    """A prompt that the model cannot process."""

    code = "bad_prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling:
    """Sampling settings of a chat."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """0: greedy decoding."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadPrompt(f"max new tokens is {self.max_new_tokens}: expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise BadPrompt(f"temperature is {self.temperature}: expected 0 (greedy) or more")


def check_adapter_files(folder: Path) -> None:
    """Raise `BadAdapter` if a file is missing: before torch is imported, which takes seconds."""
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise BadAdapter(f"{folder} has no {file}: expected a folder as `symbiosis finetune --out` or PEFT writes it")
    parse_strict_json((folder / CONFIG).read_bytes(), str(folder / CONFIG))


class ChatBackend(Protocol):
    """Generates the reply to a chat."""

    def reply(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Write | None = None) -> str:
        """The reply of the assistant. Text is passed to `write` as it is generated."""
        ...


class HttpChat:
    """Chat over HTTP with the base model of a server, or with one of its adapters by name. Raises `HttpError` without it."""

    def __init__(self, client: HttpClient, adapter: str | None, seed: int | None) -> None:
        self._client = client
        self._model = client.models()[0]["id"] if adapter is None else client.model(adapter)["id"]
        self._more: dict[str, Any] = {} if seed is None else {"seed": seed}

    def reply(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Write | None = None) -> str:
        parts: list[str] = []
        options = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, **self._more}
        for part in self._client.chat(self._model, messages, **options):
            parts.append(part)
            if write is not None:
                write(part)
        return "".join(parts)


def chat(backend: ChatBackend, lines: Iterator[str], sampling: ChatSampling, write: Write, system: str | None = None) -> None:
    """Reply to each line, keeping the history, until `/exit` or the end of the input."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for line in lines:
        prompt = line.strip()
        if prompt == "/exit":
            return
        if not prompt:
            continue
        messages.append({"role": "user", "content": prompt})
        reply = backend.reply(messages, sampling, write)
        write("\n")
        messages.append({"role": "assistant", "content": reply})
