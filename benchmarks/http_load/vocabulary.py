"""A tokenizer for models with random weights: every token is a space and a word of four letters.

So any token that such a model samples is text, the number of tokens follows from the length of a text, and a text has the
token ids it was made of. It is a byte-level BPE tokenizer whose words need no merges.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

TOKEN_BYTES = 5
_SPACE = "Ġ"  # as byte-level tokenizers write it
_TEXTS = re.compile(rb'"text": ?"((?: [a-z]{4})*)"')


def words(size: int) -> list[str]:
    return ["".join(letters) for letters in islice(product(string.ascii_lowercase, repeat=TOKEN_BYTES - 1), size)]


def save_tokenizer(size: int, folder: Path) -> None:
    """A transformers tokenizer of this many tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"{_SPACE}{word}": token for token, word in enumerate(words(size))}
    tokenizer = Tokenizer(BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(folder))


def text_of(tokens: Sequence[int], vocabulary: Sequence[str]) -> str:
    return "".join(f" {vocabulary[token]}" for token in tokens)


def streamed_text(body: bytes) -> bytes:
    """The text of all frames of an answer in such words."""
    return b"".join(_TEXTS.findall(body))
