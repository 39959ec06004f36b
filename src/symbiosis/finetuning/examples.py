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
        _check_types(number, example)
        if not 1 <= len(example.ids) <= longest:
            raise OutOfRange(f"example {number} has {len(example.ids)} tokens", field="batch", expected=f"1 to {longest}")
        if len(example.labels) != len(example.ids):
            raise OutOfRange(
                f"example {number} has {len(example.ids)} tokens and {len(example.labels)} labels",
                field="batch",
                expected="a label for each token, -100 where there is nothing to learn",
            )
        expected = f"an int from 0 to {vocabulary - 1}"
        if not _are_tokens(example.ids, vocabulary):
            strange = next(each for each in example.ids if not _are_tokens([each], vocabulary))
            raise OutOfRange(f"example {number} has the token {strange!r:.80}", field="batch", expected=expected)
        if not _are_labels(example.labels, vocabulary):
            strange = next(each for each in example.labels if not _are_labels([each], vocabulary))
            expected += f", or {IGNORED} where there is nothing to learn"
            raise OutOfRange(f"example {number} has the label {strange!r:.80}", field="batch", expected=expected)


def digest(examples: Sequence[Example], items: float) -> bytes:
    """The same for the same batch, and for no other; of examples that were checked."""
    found = hashlib.blake2b(repr(float(items)).encode(), digest_size=32)
    for example in examples:
        found.update(array("q", (len(example.ids), *example.ids, *example.labels)))
    return found.digest()


def _check_types(number: int, example: object) -> None:
    if not isinstance(example, Example):
        raise OutOfRange(f"example {number} is {example!r:.80}", field="batch", expected="an Example(ids, labels)")
    for name, values in (("ids", example.ids), ("labels", example.labels)):
        if not isinstance(values, tuple | list):
            raise OutOfRange(
                f"the {name} of example {number} are of type {type(values).__name__}",
                field="batch",
                expected="a tuple of ints; tuple(x.tolist()) makes one of a tensor or an array",
            )


def _are_tokens(values: Sequence[int], vocabulary: int) -> bool:
    """At once: a job's batches are checked between a GPU's passes."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocabulary


def _are_labels(values: Sequence[int], vocabulary: int) -> bool:
    learned = [each for each in values if each != IGNORED] if set(map(type, values)) == {int} else [-1]
    return not learned or (min(learned) >= 0 and max(learned) < vocabulary)
