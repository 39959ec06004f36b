"""What is trained on: sequences of tokens, each with the tokens to learn."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.errors import OutOfRange

IGNORED = -100
"""A label that says: nothing to learn here."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. As everywhere in transformers, a label stands beside its own token and is predicted by the one before."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def labelled(self) -> int:
        """Tokens to learn, as transformers' Trainer counts them: the first is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


def check(examples: Sequence[Example], *, vocabulary: int, longest: int) -> None:
    """Raises `OutOfRange`, before anything meets another tenant's rows."""
    for number, example in enumerate(examples):
        if not 1 <= len(example.ids) <= longest:
            raise OutOfRange(f"example {number} has {len(example.ids)} tokens", field="batch", expected=f"1 to {longest}")
        if len(example.labels) != len(example.ids):
            raise OutOfRange(
                f"example {number} has {len(example.ids)} tokens and {len(example.labels)} labels",
                field="batch",
                expected="a label for each token, -100 where there is nothing to learn",
            )
        if _are_tokens(example.ids, vocabulary) and _are_tokens([n for n in example.labels if n != IGNORED], vocabulary):
            continue
        strange = [token for token in example.ids if not _is_token(token, vocabulary)]
        strange += [label for label in example.labels if label != IGNORED and not _is_token(label, vocabulary)]
        if strange:
            raise OutOfRange(f"example {number} has the token {strange[0]!r}", field="batch", expected=f"0 to {vocabulary - 1}")


def digest(examples: Sequence[Example], items: float) -> bytes:
    """The same for the same batch, and for no other; of examples that were checked."""
    found = hashlib.blake2b(repr(float(items)).encode(), digest_size=32)
    for example in examples:
        found.update(array("q", (len(example.ids), *example.ids, *example.labels)))
    return found.digest()


def _are_tokens(values: Sequence[object], vocabulary: int) -> bool:
    """At once: a job's batches are checked between a GPU's passes."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocabulary)  # type: ignore[type-var,operator]


def _is_token(value: object, vocabulary: int) -> bool:
    return type(value) is int and 0 <= value < vocabulary
