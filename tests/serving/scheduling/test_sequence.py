"""Validation of sampling parameters, and the state of a sequence."""

from __future__ import annotations

import dataclasses

import pytest

from symbiosis.errors import ContextTooLong, OutOfRange, from_code
from symbiosis.serving.scheduling.sequence import Sampling, Sequence


def sequence(prompt=(1, 2, 3), sampling=None, **changes):
    given = {"id": "a", "tenant": "ann", "arrival": 0.0, **changes}
    return Sequence(prompt=prompt, sampling=sampling or Sampling(), **given)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-0.1, 2.1, float("nan"), float("inf"), "1", True, None]),
        ("top_p", [-0.1, 1.1, float("nan")]),
        ("top_k", [-1, 1.5, 1 << 21]),
        ("min_p", [-0.1, 1.01]),
        ("seed", [1 << 63, 0.5]),
        ("max_tokens", [0, -1, 1 << 21, 1.0]),
        ("min_tokens", [-1, 0.5]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, 101]),
        ("logprobs", [-1, 21, True]),
        ("stop_ids", [(-1,), ("x",)]),
        ("logit_bias", [{1: 101}, {1: float("nan")}]),
    ],
)
def test_every_number_has_a_range_and_the_error_names_the_field(field, bad):
    for value in bad:
        with pytest.raises(OutOfRange) as caught:
            Sampling(**{field: value})
        assert caught.value.field.startswith(field)
        assert "from" in caught.value.expected
        assert caught.value.expected in str(caught.value)


def test_lists_have_a_maximum_length():
    with pytest.raises(OutOfRange, match="stop_ids"):
        Sampling(stop_ids=tuple(range(65)))
    with pytest.raises(OutOfRange, match="logit_bias"):
        Sampling(logit_bias=dict.fromkeys(range(1025), 0.0))


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(OutOfRange, match="min_tokens"):
        Sampling(max_tokens=3, min_tokens=4)


def test_sampling_is_immutable():
    bias = {1: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[2] = 2.0
    assert dict(sampling.logit_bias) == {1: 1.0}
    with pytest.raises(TypeError):
        sampling.logit_bias[3] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3


def test_the_error_crosses_a_link():
    assert isinstance(from_code("out_of_range", "what"), OutOfRange)


@pytest.mark.parametrize("prompt", [(), (1, "x"), (1 << 70,), (1.5,)])
def test_a_prompt_is_at_least_one_token_id(prompt):
    with pytest.raises(OutOfRange, match="prompt"):
        sequence(prompt)


def test_tokens_outside_the_vocabulary_are_rejected_everywhere():
    sequence((0, 9)).check(vocab_size=10, max_length=100)
    for bad in (
        sequence((1, 10)),
        sequence((-1, 1)),
        sequence(sampling=Sampling(stop_ids=(10,))),
        sequence(sampling=Sampling(logit_bias={10: 1.0})),
    ):
        with pytest.raises(OutOfRange, match="from 0 to 9"):
            bad.check(vocab_size=10, max_length=100)


def test_prompt_and_completion_must_fit_into_the_context():
    sequence(range(8), Sampling(max_tokens=2)).check(vocab_size=10, max_length=10)
    with pytest.raises(ContextTooLong, match=r"8 prompt \+ 3 completion tokens > 10 allowed"):
        sequence(range(8), Sampling(max_tokens=3)).check(vocab_size=10, max_length=10)
    with pytest.raises(ContextTooLong):
        sequence(range(10)).check(vocab_size=10, max_length=10)


def test_end_of_text_ends_unless_ignored():
    assert sequence(sampling=Sampling(stop_ids=(4,)), eos_ids=(2,)).end_ids == {2, 4}
    assert sequence(sampling=Sampling(stop_ids=(4,), ignore_eos=True), eos_ids=(2,)).end_ids == {4}


def test_forks_share_prompt_and_seed_and_have_their_own_numbers():
    first, second, third = sequence(sampling=Sampling(seed=7)).fork(3)
    assert [s.id for s in (first, second, third)] == ["a", "a.1", "a.2"]
    assert [s.number for s in (first, second, third)] == [0, 1, 2]
    assert second.tokens == first.tokens
    assert second.tokens is not first.tokens
    assert second.block_table is not first.block_table
    assert second.parent is third.parent is first
    unseeded, other = sequence().fork(2)
    assert unseeded.seed == other.seed


def test_without_a_seed_every_request_has_its_own():
    assert sequence().seed != sequence().seed
