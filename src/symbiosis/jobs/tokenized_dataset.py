"""From lines to tokens: what the engine trains on, as a safetensors file of three lists.

`ids` and `labels` of all examples lie behind each other, `ends` says where each ends. Labels of chats are the
assistant's tokens, as the template writes them; of prompts with completions the completion's; of texts all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from symbiosis.jobs.atomic_files import written
from symbiosis.jobs.errors import BadTrainingFile
from symbiosis.jobs.jsonl import ChatTurn, JsonlSample, LineErrors, LineKind

IGNORED = -100


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """What became of a file."""

    examples: int
    tokens: int
    cut: int = 0
    """Examples of which something was cut off."""


def encode(
    samples: Sequence[JsonlSample],
    tokenizer: Any,
    *,
    max_length: int,
    truncate: bool,
    max_tokens: int,
    field: str,
    check: Callable[[], None] = lambda: None,
) -> tuple[list[TokenizedExample], int]:
    """Tokens and labels of all samples, and how many were cut off. Raises `BadTrainingFile`, or what `check` raises between.

    One chat whose answers cannot be told apart would be learnt differently from the others: then all tokens are
    learnt, of all chats. With weights that is refused.
    """
    if samples[0].kind is LineKind.CHAT and not getattr(tokenizer, "chat_template", None):
        raise BadTrainingFile(
            'the model\'s tokenizer has no chat template, so it cannot read chats: give lines of {"text": …}', field=field
        )
    faults, made, tokens = LineErrors(field), list[tuple[JsonlSample, list[int], list[tuple[int, int]] | None]](), 0
    cut = 0
    for sample in samples:
        check()
        try:
            ids, spans = _encoded(sample, tokenizer, max_length)
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like, such as for roles in a wrong order
            faults.add(sample.line, f"the model's chat template does not take it: {str(error)[:120]}")
            continue
        if len(ids) > max_length:
            if not truncate:
                faults.add(sample.line, f"has {len(ids)} tokens, at most {max_length} are taken (or set truncate to true)")
                continue
            cut += 1
        tokens += min(len(ids), max_length)
        if tokens > max_tokens:
            raise BadTrainingFile(f"the file has more than the {max_tokens} tokens that are taken", field=field)
        made.append((sample, ids[:max_length], spans))
    faults.check()
    only_some = all(spans is not None for _, _, spans in made)
    weighted = [sample.line for sample in samples if any(m.role == "assistant" and not m.learnt for m in sample.messages)]
    if not only_some and weighted:
        raise BadTrainingFile(
            f"line {weighted[0]}: has a weight, but this model's template does not let the answers be told apart", field=field
        )
    examples = [TokenizedExample(ids, _labels(ids, spans if only_some else [(0, len(ids))])) for _, ids, spans in made]
    for (sample, _, _), example in zip(made, examples, strict=True):
        # the first token is never predicted
        if all(label == IGNORED for label in example.labels[1:]):
            faults.add(sample.line, f"nothing to learn within its first {max_length} tokens: raise max_length or shorten it")
    faults.check()
    return examples, cut


def _labels(ids: list[int], spans: list[tuple[int, int]] | None) -> list[int]:
    labels = [IGNORED] * len(ids)
    for start, end in spans or ():
        labels[start:end] = ids[start:end]
    return labels


def _encoded(sample: JsonlSample, tokenizer: Any, max_length: int) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Its tokens, and where those to learn are; None where the template does not let that be told."""
    if sample.kind is LineKind.CHAT:
        ids = _chat(tokenizer, sample.messages)
        return ids, _answers(tokenizer, sample.messages, ids, max_length)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if sample.kind is LineKind.TEXT:
        ids = [*tokenizer(sample.text)["input_ids"], *end]
        return ids, [(0, len(ids))]
    asked = list(tokenizer(sample.prompt)["input_ids"])
    ids = [*asked, *tokenizer(sample.completion, add_special_tokens=False)["input_ids"], *end]
    return ids, [(len(asked), len(ids))]


def _chat(tokenizer: Any, messages: Sequence[ChatTurn], *, answer_next: bool = False) -> list[int]:
    plain = [message.plain() for message in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=answer_next)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answers(tokenizer: Any, messages: Sequence[ChatTurn], whole: list[int], max_length: int) -> list[tuple[int, int]] | None:
    spans = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = _chat(tokenizer, messages[:index], answer_next=True) if index else []
        if whole[: len(asked)] != asked:
            return None
        if len(asked) >= max_length:
            break  # nothing of it is left, whatever follows
        answered = _chat(tokenizer, messages[: index + 1])
        if whole[: len(answered)] != answered:
            return None
        if message.learnt:
            spans.append((len(asked), len(answered)))
    return spans


def write(path: Path, examples: Sequence[TokenizedExample]) -> TokenizedDataset:
    """The file is there whole, on the disk, or not at all. Raises `StorageFull`."""
    ends = np.cumsum([len(example.ids) for example in examples], dtype=np.int64)
    ids = np.fromiter((token for example in examples for token in example.ids), np.int32, int(ends[-1]))
    labels = np.fromiter((label for example in examples for label in example.labels), np.int32, int(ends[-1]))
    written(path, save({"ids": ids, "labels": labels, "ends": ends}))
    return TokenizedDataset(len(examples), int(ends[-1]))
