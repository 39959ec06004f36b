"""Tokenized training data, as a safetensors file of three lists.

`ids` and `labels` of all examples are concatenated; `ends` holds the end of each. Labels cover the assistant's tokens
of a chat, the completion of a prompt, and all tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from symbiosis.jobs.atomic_files import write_atomic
from symbiosis.jobs.errors import BadTrainingFile
from symbiosis.jobs.jsonl import ChatTurn, JsonlSample, LineErrors, LineKind
from symbiosis.models.chat_encoding import ChatEncoder

IGNORED = -100


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class DatasetSize:
    examples: int
    tokens: int
    longest: int
    """Tokens of its longest example."""


def tokenize_samples(
    samples: Sequence[JsonlSample],
    tokenizer: Any,
    *,
    max_length: int,
    truncate: bool,
    max_tokens: int,
    field: str,
    check: Callable[[], None] = lambda: None,
) -> list[TokenizedExample]:
    """Raises `BadTrainingFile`, or what `check` raises between two samples.

    If the template does not delimit the assistant's tokens in one chat, all tokens of all chats are labels.
    With message weights that is an error.
    """
    if samples[0].kind is LineKind.CHAT and not getattr(tokenizer, "chat_template", None):
        raise BadTrainingFile('the model\'s tokenizer has no chat template: use lines of {"text": …}', field=field)
    chats = ChatEncoder(tokenizer)
    errors, tokenized, tokens = LineErrors(field), list[tuple[JsonlSample, list[int], list[tuple[int, int]] | None]](), 0
    for sample in samples:
        check()
        try:
            ids, spans = _tokenize(sample, tokenizer, chats, max_length)
        except Exception as error:  # noqa: BLE001 - templates may raise anything, e.g. for an invalid order of roles
            errors.add(sample.line, f"the model's chat template rejects it: {str(error)[:120]}")
            continue
        if len(ids) > max_length and not truncate:
            errors.add(sample.line, f"has {len(ids)} tokens, at most {max_length} allowed (or set truncate to true)")
            continue
        tokens += min(len(ids), max_length)
        if tokens > max_tokens:
            raise BadTrainingFile(f"the file has more than the {max_tokens} tokens allowed", field=field)
        tokenized.append((sample, ids[:max_length], spans))
    errors.raise_if_any()
    has_spans = all(spans is not None for _, _, spans in tokenized)
    weighted = [sample.line for sample in samples if any(m.role == "assistant" and not m.is_label for m in sample.messages)]
    if not has_spans and weighted:
        reason = "has a weight, but the model's chat template does not delimit the assistant's messages"
        raise BadTrainingFile(f"line {weighted[0]}: {reason}", field=field)
    examples = [TokenizedExample(ids, _label(ids, spans if has_spans else [(0, len(ids))])) for _, ids, spans in tokenized]
    for (sample, _, _), example in zip(tokenized, examples, strict=True):
        if all(label == IGNORED for label in example.labels[1:]):  # the first token is never predicted
            errors.add(sample.line, f"nothing to learn within its first {max_length} tokens: raise max_length or shorten it")
    errors.raise_if_any()
    return examples


def _label(ids: list[int], spans: list[tuple[int, int]] | None) -> list[int]:
    labels = [IGNORED] * len(ids)
    for start, end in spans or ():
        labels[start:end] = ids[start:end]
    return labels


def _tokenize(
    sample: JsonlSample, tokenizer: Any, chats: ChatEncoder, max_length: int
) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Token ids and the spans of labels; None if the template does not delimit them."""
    if sample.kind is LineKind.CHAT:
        ids = _tokenize_chat(chats, sample.messages)
        return ids, _find_spans(chats, sample.messages, ids, max_length)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if sample.kind is LineKind.TEXT:
        ids = [*tokenizer(sample.text)["input_ids"], *end]
        return ids, [(0, len(ids))]
    prompt = list(tokenizer(sample.prompt)["input_ids"])
    ids = [*prompt, *tokenizer(sample.completion, add_special_tokens=False)["input_ids"], *end]
    return ids, [(len(prompt), len(ids))]


def _tokenize_chat(chats: ChatEncoder, messages: Sequence[ChatTurn], *, add_generation_prompt: bool = False) -> list[int]:
    return chats.encode([message.to_dict() for message in messages], add_generation_prompt=add_generation_prompt)


def _find_spans(
    chats: ChatEncoder, messages: Sequence[ChatTurn], ids: list[int], max_length: int
) -> list[tuple[int, int]] | None:
    spans = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _tokenize_chat(chats, messages[:index], add_generation_prompt=True) if index else []
        if ids[: len(prompt)] != prompt:
            return None
        if len(prompt) >= max_length:
            break  # the rest is truncated
        through = _tokenize_chat(chats, messages[: index + 1])
        if ids[: len(through)] != through:
            return None
        if message.is_label:
            spans.append((len(prompt), len(through)))
    return spans


def write_dataset(path: Path, examples: Sequence[TokenizedExample]) -> DatasetSize:
    """Atomic and synced. Raises `StorageFull`."""
    ends = np.cumsum([len(example.ids) for example in examples], dtype=np.int64)
    ids = np.fromiter((token for example in examples for token in example.ids), np.int32, int(ends[-1]))
    labels = np.fromiter((label for example in examples for label in example.labels), np.int32, int(ends[-1]))
    write_atomic(path, save({"ids": ids, "labels": labels, "ends": ends}))
    return DatasetSize(len(examples), int(ends[-1]), max(len(example.ids) for example in examples))
