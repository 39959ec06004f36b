"""Chat with a connected model: the base model, or a PEFT adapter on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, PeftType
from safetensors import SafetensorError
from transformers import TextStreamer

from symbiosis.adapters.files import CONFIG, TENSORS, parse_strict_json
from symbiosis.app.connect import connect
from symbiosis.cli.chat import BadPrompt, ChatSampling, check_adapter_files
from symbiosis.errors import BadAdapter, SymbiosisError


def _options(sampling: ChatSampling) -> dict[str, Any]:
    mode = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {"do_sample": False}
    return {"max_new_tokens": sampling.max_new_tokens, **mode}


class _CallbackStreamer(TextStreamer):  # type: ignore[misc]  # transformers has no types
    """Passes text to a callback as soon as its tokens form whole words."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


@dataclass(slots=True)
class LocalChat:
    """Generates text with a model in this process: plain completion, or with the chat template."""

    model: Any
    tokenizer: Any

    def complete(self, prompt: str, sampling: ChatSampling, write: Callable[[str], None] | None = None) -> str:
        """Complete `prompt` without a chat template. Text is passed to `write` as it is generated."""
        return self._generate(self.tokenizer(prompt, return_tensors="pt"), sampling, write)

    def reply(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Callable[[str], None] | None = None) -> str:
        """The reply of the assistant to a chat. Text is passed to `write` as it is generated."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise BadPrompt("the model's tokenizer has no chat template: use `symbiosis generate --raw`")
        inputs = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return self._generate(inputs, sampling, write)

    def _generate(self, inputs: Any, sampling: ChatSampling, write: Callable[[str], None] | None) -> str:
        length = inputs["input_ids"].shape[1]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if length == 0:
            raise BadPrompt("the prompt is empty")
        if limit is not None and length + sampling.max_new_tokens > limit:
            raise BadPrompt(
                f"{length} prompt tokens + {sampling.max_new_tokens} new tokens > {limit}, the maximum length of the model: "
                "shorten the prompt or lower --max-new-tokens"
            )
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        generated = self.model.generate(
            input_ids=inputs["input_ids"].to(self.model.device),
            attention_mask=inputs["attention_mask"].to(self.model.device),
            streamer=_CallbackStreamer(self.tokenizer, write) if write else None,
            pad_token_id=pad,
            **_options(sampling),
        )
        return str(self.tokenizer.decode(generated[0, length:], skip_special_tokens=True))


@contextmanager
def open_local_chat(
    address: str, *, token: str | None, name: str, adapter: Path | None = None, seed: int | None = None
) -> Iterator[LocalChat]:
    """Connect, load the adapter, and close the session at the end. Raises `BadAdapter`."""
    if adapter is not None:
        check_adapter(adapter)  # before connecting
    model = connect(address, token=token, name=name)
    session: Any = model.symbiosis
    try:
        tokenizer = session.tokenizer()
        if seed is not None:
            torch.manual_seed(seed)
        yield LocalChat(with_adapter(model, adapter) if adapter is not None else model, tokenizer)
    finally:
        session.close()


def check_adapter(folder: Path) -> None:
    check_adapter_files(folder)
    kind = parse_strict_json((folder / CONFIG).read_bytes(), str(folder / CONFIG)).get("peft_type")
    if not isinstance(kind, str) or kind not in set(PeftType):
        raise BadAdapter(f"{folder / CONFIG} sets peft_type to {kind!r:.60}: expected one of {', '.join(PeftType)}")


def with_adapter(model: Any, folder: Path) -> Any:
    """Load a saved adapter onto a model, connected or plain. Raises `BadAdapter`."""
    check_adapter(folder)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except SafetensorError as error:
        raise BadAdapter(f"{folder / TENSORS} cannot be read ({error}): is the file complete?") from None
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        if isinstance(error, SymbiosisError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = (
            lines[1].strip() if lines[0].endswith(":") and lines[1:] else lines[0]
        )  # torch puts the mismatch on the second line
        raise BadAdapter(f"the adapter in {folder} does not fit this model: {reason}") from error
