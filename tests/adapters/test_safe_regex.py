"""Untrusted regular expressions match as in Python, in bounded time."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.adapters.safe_regex import MatchBudget, SafePattern, _Matcher
from symbiosis.errors import UnsupportedAdapter

PATHS = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.vision_tower.layers.3.mlp.fc1",
    "transformer.h.2.attn.c_attn",
]
COMMON = [
    r".*\.(?:q_proj|v_proj)",
    r"^(?!.*vision_tower).*(?:q_proj|down_proj).*",
    r"(?:.*?(?:language|text|layers).*?(?:self_attn|mlp).*?(?:q_proj|down_proj|fc1).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:up))",
    r"model\.layers\.(?:0|1\d)\.[a-z_]+\.\w+",
    r"[^.]*\.h\.\d+\.attn\.c_[^.]+$",
    r"lm_head",
    r"lm.head",
]


@pytest.mark.parametrize("pattern", COMMON)
def test_common_patterns_match_as_in_python(pattern):
    for path in PATHS:
        assert SafePattern(pattern, "target_modules", MatchBudget()).matches(path) == bool(re.fullmatch(pattern, path)), path


patterns = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", r"\b", "^", "$", ""]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda two: f"(?:{two[0]}){two[1]}"),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(patterns, st.text("ab.1", max_size=7))
def test_any_pattern_matches_as_in_python(pattern, text):
    ours = SafePattern(pattern, "target_modules", MatchBudget())
    assert ours.matches(text) == bool(re.fullmatch(pattern, text))
    assert ours.matches_suffix(text) == bool(re.match(rf"(.*\.)?({pattern})$", text))


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*b", r"(a|aa)+c", r"(.*)*x", r"(?:a?){50}a{50}b", r"(a*)*(a*)*(a*)*b"])
def test_patterns_that_backtrack_exponentially_elsewhere_take_few_steps(pattern):
    assert not SafePattern(pattern, "target_modules", MatchBudget()).matches("a" * 60 + "!")


def test_an_exhausted_budget_is_an_error():
    pattern = SafePattern(r"(.{0,40}){0,40}!", "target_modules", MatchBudget(1000))
    with pytest.raises(UnsupportedAdapter, match="too long"):
        pattern.matches("a" * 60)


@pytest.mark.parametrize("choice", ["m{60}", "(?:m{60}){60}", "(?=m{0}y{60})"])
def test_every_attempt_spends_steps(choice, monkeypatch):
    """Failed attempts too: there are no more calls than steps."""
    calls = Counter[str]()

    def counted(name: str):
        plain = getattr(_Matcher, name)

        def call(*args):
            calls[name] += 1
            return plain(*args)

        return call

    for name in ("match_sequence", "_match_item", "_union"):
        monkeypatch.setattr(_Matcher, name, counted(name))
    pattern = SafePattern(f"(?:{'|'.join([choice] * 1000)})", "target_modules", MatchBudget(200_000))
    with pytest.raises(UnsupportedAdapter, match="too long"):
        any(pattern.matches(f"model.layers.{layer}.self_attn.q_proj") for layer in range(1000))
    assert 0 < calls.total() < 200_000
