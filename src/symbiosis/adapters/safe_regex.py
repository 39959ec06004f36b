"""Untrusted regular expressions, matched in bounded time.

An adapter's config may select modules by regular expressions. Python's own matcher backtracks, which takes exponential time
on some patterns (`(a+)+$`). This matcher tracks sets of positions instead, which is polynomial, and counts its steps. It
only decides whether a whole text matches, so greedy and lazy repetitions are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from re import _parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from symbiosis.errors import BadAdapter, UnsupportedAdapter

MAX_PATTERN = 16_384
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_SEQUENCE_STEPS = 6
"""Steps charged for entering a group, a branch or a repetition, whatever it matches."""

Item: TypeAlias = tuple[Any, ...]
"""(kind, operands): text, one (character), any (run of any characters), at, look, branch, repeat, group."""


class MatchBudget:
    """The steps that all patterns of one adapter may take together."""

    def __init__(self, steps: int = 3_000_000) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Raises `UnsupportedAdapter` when the budget is exhausted."""
        self._left -= steps
        if self._left < 0:
            raise UnsupportedAdapter(
                "adapter_config.json: its regular expressions take too long to match; list the modules' names instead"
            )


class SafePattern:
    """A regular expression in the config's field `where`. Raises `BadAdapter` or `UnsupportedAdapter` if it is not usable."""

    def __init__(self, text: str, where: str, budget: MatchBudget) -> None:
        self.text = text
        self._budget = budget
        self._plain = bool(_PLAIN.fullmatch(text))
        self._items: tuple[Item, ...] = ()
        if self._plain:
            return
        if len(text) > MAX_PATTERN:
            raise BadAdapter(f"adapter_config.json: a pattern of {len(text)} characters in {where}; {MAX_PATTERN} are allowed")
        try:
            tree = _parser.parse(text)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise BadAdapter(f"adapter_config.json: {where} is not a regular expression: {ascii(str(error))[:100]}") from None
        if tree.state.flags & ~re.UNICODE:
            raise UnsupportedAdapter(f"adapter_config.json: {where} sets flags in its regular expression; leave them out")
        try:
            self._items = _compile(tree, where)
        except RecursionError:
            raise BadAdapter(f"adapter_config.json: {where} is nested too deeply") from None

    def matches(self, text: str) -> bool:
        """Whether the whole text matches, as with `re.fullmatch`."""
        if self._plain:
            return len(text) == len(self.text) and _matches_plain(self.text, text)
        return len(text) in _Matcher(text, self._budget).match_sequence(self._items, 0)

    def matches_suffix(self, path: str) -> bool:
        """Whether the whole path, or the rest after one of its dots, matches."""
        if self._plain:
            rest = len(path) - len(self.text)
            return rest >= 0 and (rest == 0 or path[rest - 1] == ".") and _matches_plain(self.text, path[rest:])
        starts = [0, *(at + 1 for at, letter in enumerate(path) if letter == ".")]
        matcher = _Matcher(path, self._budget)
        return any(len(path) in matcher.match_sequence(self._items, start) for start in starts)


def _matches_plain(plain: str, text: str) -> bool:
    return plain == text or all(expected in (".", letter) for expected, letter in zip(plain, text, strict=True))


def _compile(tree: Iterable[Any], where: str) -> tuple[Item, ...]:
    items: list[Item] = []
    for op, argument in tree:
        name = str(op)
        if name == "LITERAL":
            if items and items[-1][0] == "text":
                items[-1] = ("text", items[-1][1] + chr(argument))
            else:
                items.append(("text", chr(argument)))
        elif name in ("ANY", "NOT_LITERAL", "IN"):
            items.append(("one", _character_test(name, argument)))
        elif name == "FAILURE":  # (?!)
            items.append(("branch", ()))
        elif name == "AT":
            items.append(("at", str(argument)))
        elif name == "BRANCH":
            items.append(("branch", tuple(_compile(choice, where) for choice in argument[1])))
        elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
            items.append(("group", _compile(argument[3], where)))
        elif name in ("ASSERT", "ASSERT_NOT") and argument[0] == 1:
            items.append(("look", name == "ASSERT", _compile(argument[1], where)))
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = argument
            inner = _compile(body, where)
            is_any_run = (least, str(most)) == (0, "MAXREPEAT") and [str(part) for part, _ in body] == ["ANY"]
            items.append(("any",) if is_any_run else ("repeat", int(least), int(most), inner))
        else:
            raise UnsupportedAdapter(
                f"adapter_config.json: {where} uses {name.lower()} in a regular expression, which is not supported; "
                "list the modules' names instead"
            )
    return tuple(items)


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda letter: letter.isalnum() or letter == "_",
}


def _character_test(name: str, argument: Any) -> Callable[[str], bool]:
    """A predicate for one character."""
    if name == "ANY":
        return lambda letter: letter != "\n"
    if name == "NOT_LITERAL":
        return lambda letter: ord(letter) != argument
    expected, codes, ranges, categories = True, set(), [], []
    for op, value in argument:
        if str(op) == "NEGATE":
            expected = False
        elif str(op) == "LITERAL":
            codes.add(value)
        elif str(op) == "RANGE":
            ranges.append(value)
        else:
            categories.append((_CATEGORIES[str(value).replace("_NOT_", "_")], "_NOT_" not in str(value)))

    def test(letter: str) -> bool:
        code = ord(letter)
        found = code in codes or any(low <= code <= high for low, high in ranges)
        return (found or any(category(letter) == yes for category, yes in categories)) == expected

    return test


class _Matcher:
    """Matches one text: for each item and position, the positions at which the item can end."""

    def __init__(self, text: str, budget: MatchBudget) -> None:
        self._text = text
        self._budget = budget
        self._ends: dict[tuple[int, int], frozenset[int]] = {}

    def match_sequence(self, items: tuple[Item, ...], at: int) -> frozenset[int]:
        known = self._ends.get((id(items), at))
        if known is None:
            self._budget.spend(_SEQUENCE_STEPS)
            positions = {at}
            for item in items:
                positions = self._union(self._match_item(item, position) for position in positions)
                if not positions:
                    break
            known = self._ends[id(items), at] = frozenset(positions)
        return known

    def _union(self, found: Iterable[Collection[int]]) -> set[int]:
        union: set[int] = set()
        for positions in found:
            self._budget.spend(1 + len(positions))
            union.update(positions)
        return union

    def _match_item(self, item: Item, at: int) -> Collection[int]:
        text, kind = self._text, item[0]
        if kind == "text":
            return (at + len(item[1]),) if text.startswith(item[1], at) else ()
        if kind == "one":
            return (at + 1,) if at < len(text) and item[1](text[at]) else ()
        if kind == "any":
            stop = text.find("\n", at)
            stop = len(text) if stop < 0 else stop
            return range(at, stop + 1)
        if kind == "at":
            return (at,) if self._is_at(item[1], at) else ()
        if kind == "look":
            return (at,) if bool(self.match_sequence(item[2], at)) == item[1] else ()
        if kind == "branch":
            return self._union(self.match_sequence(choice, at) for choice in item[1])
        if kind == "group":
            return self.match_sequence(item[1], at)
        return self._match_repeat(item[1], item[2], item[3], at)

    def _match_repeat(self, least: int, most: int, items: tuple[Item, ...], at: int) -> set[int]:
        # Positions never decrease, so more rounds than characters only repeat rounds that matched nothing.
        rounds = len(self._text) + 1
        positions = {at}
        for _ in range(min(least, rounds)):
            if not positions:  # the remaining rounds would take time and no steps
                break
            positions = self._union(self.match_sequence(items, position) for position in positions)
        reached, positions = set(positions), set(positions)
        for _ in range(min(most - least, rounds)):
            positions = self._union(self.match_sequence(items, position) for position in positions) - reached
            if not positions:
                break
            reached |= positions
        return reached

    def _is_at(self, where: str, at: int) -> bool:
        text = self._text
        if where in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return at == 0
        if where == "AT_END_STRING":
            return at == len(text)
        if where == "AT_END":
            return at == len(text) or (at == len(text) - 1 and text[at] == "\n")
        word = _CATEGORIES["CATEGORY_WORD"]
        boundary = (at > 0 and word(text[at - 1])) != (at < len(text) and word(text[at]))
        return boundary == (where == "AT_BOUNDARY")
