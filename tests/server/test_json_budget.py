"""The count of values equals the parsed one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.errors import TooLarge
from symbiosis.server.requests import json_budget
from symbiosis.server.requests.json_budget import check_values

TEXT = st.text(alphabet='ab"\\,:[]{}\n\u00e4', max_size=8)
ANYTHING = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int, int]:
    """Strings, keys, containers and commas of a parsed value."""
    if isinstance(value, str):
        return 1, 0, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    keys = len(value) if isinstance(value, dict) else 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    texts, more_keys, groups, commas = (sum(column) for column in zip((0, 0, 0, 0), *inner, strict=True))
    return keys + texts, keys + more_keys, 1 + groups, max(0, len(value) - 1) + commas


@given(ANYTHING, st.booleans())
def test_the_limits_are_exact(value, ascii):
    body = json.dumps(value, ensure_ascii=ascii).encode()
    texts, keys, groups, commas = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        found = {"_MAX_STRINGS": texts, "_MAX_KEYS": keys, "_MAX_CONTAINERS": groups, "_MAX_VALUES": commas + 1}
        for name, most in found.items():
            patch.setattr(json_budget, name, most)
        check_values(body)
        for name, most in found.items():
            if most:
                patch.setattr(json_budget, name, most - 1)
                with pytest.raises(TooLarge, match=f"at most {most - 1} allowed"):
                    check_values(body)
                patch.setattr(json_budget, name, most)


@given(st.binary())
def test_any_bytes_are_accepted(body):
    check_values(body)
