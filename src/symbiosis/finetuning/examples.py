"""Training examples: sequences of tokens with labels."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.errors import OutOfRange

IGNORED = -100
"""The label of a token that is not learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. As in transformers, a label has the position of its own token and is predicted by the token before."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def labelled(self) -> int:
        """Labels as transformers' Trainer counts them: the first is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


def check_examples(examples: Sequence[Example], *, vocabulary: int, longest: int) -> None:
    """Raises `OutOfRange` if an example is invalid."""
    for number, example in enumerate(examples):
        _check_types(number, example)
        if not 1 <= len(example.ids) <= longest:
            raise OutOfRange(f"example {number} has {len(example.ids)} tokens", field="batch", expected=f"1 to {longest}")
        if len(example.labels) != len(example.ids):
            what = f"example {number} has {len(example.ids)} tokens and {len(example.labels)} labels"
            raise OutOfRange(what, field="batch", expected=f"a label for each token, {IGNORED} where there is nothing to learn")
        labels = [label for label in example.labels if type(label) is not int or label != IGNORED]
        in_range = f"an int from 0 to {vocabulary - 1}"
        for kind, values, expected in (
            ("token", example.ids, in_range),
            ("label", labels, f"{in_range}, or {IGNORED} where there is nothing to learn"),
        ):
            if not _are_tokens(values, vocabulary):
                invalid = next(each for each in values if not _are_tokens([each], vocabulary))
                raise OutOfRange(f"example {number} has the {kind} {invalid!r:.80}", field="batch", expected=expected)


def digest_batch(examples: Sequence[Example], items: float) -> bytes:
    """The same for the same batch, and for no other. The examples are checked."""
    digest = hashlib.blake2b(repr(float(items)).encode(), digest_size=32)
    for example in examples:
        digest.update(array("q", (len(example.ids), *example.ids, *example.labels)))
    return digest.digest()


def _check_types(number: int, example: object) -> None:
    if not isinstance(example, Example):
        raise OutOfRange(f"example {number} is {example!r:.80}", field="batch", expected="an Example(ids, labels)")
    for name, values in (("ids", example.ids), ("labels", example.labels)):
        if not isinstance(values, tuple | list):
            what = f"the {name} of example {number} are of type {type(values).__name__}"
            raise OutOfRange(what, field="batch", expected="a tuple of ints: tuple(x.tolist()) of a tensor or an array")


def _are_tokens(values: Sequence[int], vocabulary: int) -> bool:
    """By set and min/max: jobs' batches are checked between the passes of a GPU."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocabulary)
