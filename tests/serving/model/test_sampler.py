"""A row's token depends only on its logits and its sequence."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.kernels import token_draw_reference
from symbiosis.serving.model import sampler
from symbiosis.serving.model.sampler import noise_keys, sample
from symbiosis.serving.scheduling.sequence import Sampling
from tests.serving.scheduling.test_sequence import sequence

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def one(prompt=(1, 2, 3), outputs=(), number=0, **sampling):
    made = sequence(prompt, Sampling(**sampling), number=number, eos_ids=(0,))
    made.tokens.extend(outputs)
    return made


def logits(rows=4, vocabulary=50, seed=0, spread=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def draws(row, count=4000, **sampling):
    """How often each token is drawn from a row."""
    rows = torch.as_tensor(row).float().expand(count, -1).contiguous()
    tokens = sample(rows, [one(seed=number, **sampling) for number in range(count)]).tokens
    return torch.bincount(torch.tensor(tokens), minlength=rows.shape[1]) / count


def test_temperature_0_takes_the_most_likely_and_of_equals_the_first():
    rows = logits()
    rows[1, [7, 30, 31]] = 99.0
    tokens = sample(rows, [one(temperature=0) for _ in range(4)]).tokens
    assert tokens == rows.argmax(-1).tolist()
    assert tokens[1] == 7


def test_a_greedy_batch_is_one_argmax(monkeypatch):
    for name in ("_apply_penalties_and_bias", "_draw", "_top"):
        monkeypatch.setattr(sampler, name, None)
    assert sample(logits(), [one(temperature=0) for _ in range(4)]).logprobs == [None] * 4


def test_tokens_are_drawn_as_often_as_they_are_likely():
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, -math.inf])
    for temperature in (0.5, 1.0, 2.0):
        often = draws(row, temperature=temperature)
        assert torch.allclose(often, (row / temperature).softmax(-1), atol=0.03)
        assert often[4] == 0


def test_top_k_keeps_k_tokens_and_of_equals_the_first():
    often = draws([1.0, 1.0, 2.0, 1.0, 0.0], top_k=3)
    expected = torch.tensor([1.0, 1.0, 2.0, -math.inf, -math.inf]).softmax(-1)
    assert torch.allclose(often, expected, atol=0.03)


def test_top_p_keeps_the_tokens_that_reach_it():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (draws(row, top_p=0.4) > 0).tolist() == [True, False, False, False]
    assert (draws(row, top_p=0.6) > 0).tolist() == [True, True, False, False]
    assert torch.allclose(draws(row, top_p=0.94), torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95, atol=0.03)
    assert (draws(row, top_p=0) > 0).tolist() == [True, False, False, False]


def test_top_p_is_a_share_of_what_top_k_left():
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (draws(row, top_k=2, top_p=0.57) > 0).tolist() == [True, False, False, False]
    assert (draws(row, top_k=2, top_p=0.58) > 0).tolist() == [True, True, False, False]


def test_min_p_is_a_share_of_the_most_likely():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (draws(row, min_p=0.5) > 0).tolist() == [True, True, False, False]
    assert (draws(row, min_p=1) > 0).tolist() == [True, False, False, False]


def test_top_k_of_one_is_the_most_likely_at_any_temperature():
    rows = logits(50, 5000, spread=1e-6)
    assert sample(rows, [one(temperature=2.0, top_k=1) for _ in range(50)]).tokens == rows.argmax(-1).tolist()


def test_a_bias_bans_and_forces_tokens():
    row = logits(1)[0]
    best = int(row.argmax())
    banned = one(temperature=0, logit_bias={best: -100})
    forced = one(temperature=0, logit_bias={5: 100})
    assert sample(row.expand(2, -1), [banned, forced]).tokens == [int(row.topk(2).indices[1]), 5]


def test_penalties_follow_the_openai_and_hugging_face_formulas():
    row = torch.tensor([[1.0, 2.0, -1.0, 0.5, 3.0]])
    params = one((1, 2), (4, 4, 2), temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    edited = row.clone()
    sampler._apply_penalties_and_bias(edited, [params])
    assert edited[0].tolist() == pytest.approx([1.0, 1.0, -2.0 - 0.75, 0.5, 1.5 - 1.0])
    assert row[0, 4] == 3.0


def test_penalties_affect_only_their_rows():
    rows = logits(3)
    edited = rows.clone()
    sampler._apply_penalties_and_bias(edited, [one(), one(outputs=(4, 4), frequency_penalty=1.0), one()])
    assert torch.equal(edited[[0, 2]], rows[[0, 2]])
    assert edited[1, 4] == rows[1, 4] - 2
    assert (edited[1] != rows[1]).sum() == 1


def test_no_stop_token_before_min_tokens():
    row = torch.tensor([[9.0, 8.0, 7.0]])
    settings = {"temperature": 0, "min_tokens": 2, "stop_ids": (1,)}
    assert sample(row, [one(outputs=(2,), **settings)]).tokens == [2]
    assert sample(row, [one(outputs=(2, 2), **settings)]).tokens == [0]


def test_rows_of_nan_fail_alone():
    rows = logits(4)
    alone = sample(rows, [one(seed=3, logprobs=1) for _ in range(4)])
    bad = rows.clone()
    bad[0], bad[2, 3], bad[3] = math.nan, math.inf, -math.inf
    together = sample(bad, [one(seed=3, logprobs=1), one(seed=3, logprobs=1), one(seed=3, top_p=0.5), one(temperature=0)])
    assert together.tokens == [-1, alone.tokens[1], -1, -1]
    assert together.logprobs[0] is None
    assert together.logprobs[1] == alone.logprobs[1]


def test_logprobs_are_those_of_the_raw_logits():
    row = logits(1)
    params = one(temperature=0.3, top_k=1, logit_bias={9: 100}, logprobs=3)
    sampled = sample(row, [params])
    plain = row[0].log_softmax(-1)
    assert sampled.tokens == [9]
    assert sampled.logprobs[0].chosen == pytest.approx(plain[9].item())
    assert [token for token, _ in sampled.logprobs[0].top] == plain.topk(3).indices.tolist()
    assert [value for _, value in sampled.logprobs[0].top] == pytest.approx(plain.topk(3).values.tolist())


def test_logprobs_are_reported_where_and_as_many_as_requested():
    got = sample(logits(4), [one(), one(logprobs=0), one(logprobs=5), one(logprobs=20, temperature=0)]).logprobs
    assert [None if each is None else len(each.top) for each in got] == [None, 0, 5, 20]


def test_top_logprobs_are_ordered_and_ties_go_by_id():
    row = torch.tensor([[0.0, -0.0, 1.0, -2.0, 1.0, -math.inf, -2.0]])
    (got,) = sample(row, [one(temperature=0, logprobs=7)]).logprobs
    assert [token for token, _ in got.top] == [2, 4, 0, 1, 3, 6, 5]


def test_keys_of_noise_never_change():
    assert noise_keys(42, 0, 0) == (-1158011463, -1149684161)
    assert noise_keys(-1, 3, 7) == (-1685490006, 667380309)
    keys = {noise_keys(seed, number, position) for seed in range(20) for number in range(5) for position in range(100)}
    assert len(keys) == 10_000


def test_noise_is_exponential_and_independent_of_its_neighbours():
    """Over token ids, positions and completions; a race of equals is won equally often by each."""
    keys = torch.tensor([noise_keys(1, number, position) for number in range(4) for position in range(500)], dtype=torch.int32)
    key_b1, factor_b1 = keys.unsqueeze(-1).unbind(1)
    times_bn = token_draw_reference._race_times(torch.arange(200, dtype=torch.int32), key_b1, factor_b1).double().exp()
    assert times_bn.mean().item() == pytest.approx(1, abs=0.01)
    uniform_bn = 1 - (-times_bn).exp()
    shares = uniform_bn.float().histc(50, 0, 1) / uniform_bn.numel()
    assert torch.allclose(shares, torch.full((50,), 0.02), atol=1e-3)
    centred_bn = uniform_bn - 0.5
    for a, b in ((centred_bn[:, 1:], centred_bn[:, :-1]), (centred_bn[1:], centred_bn[:-1])):
        assert abs((a * b).mean().item() * 12) < 0.01
    wins = times_bn.argmin(-1).bincount(minlength=200).double()
    assert ((wins - 10) ** 2 / 10).sum().item() < 270  # chi square of 199 degrees of freedom: 1 in 1,700


def test_rounding_of_logits_changes_a_token_only_where_two_are_that_close():
    """A flat row of a large vocabulary, where rounding in cumulative probabilities would add up."""
    row = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)) * 0.1
    nearly = row + 1e-5 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    sequences = [one(seed=seed) for seed in range(2000)]
    drawn, again = (
        [token for part in range(0, 2000, 100) for token in sample(x.expand(100, -1), sequences[part : part + 100]).tokens]
        for x in (row, nearly)
    )
    assert len(set(drawn)) > 1900
    assert sum(a != b for a, b in zip(drawn, again, strict=True)) <= 1


def test_equal_seeds_draw_equally_and_forks_and_positions_do_not():
    row = torch.zeros(1, 1000)
    same = [sample(row, [one(seed=5)]).tokens[0] for _ in range(2)]
    assert same[0] == same[1]
    different = [one(seed=6), one(seed=5, number=1), one(seed=5, outputs=(1,))]
    assert len({same[0], *(sample(row, [each]).tokens[0] for each in different)}) == 4


def requests(rng):
    return {
        "temperature": rng.choice([0, 0.001, 0.7, 1.0, 2.0]), "top_p": rng.choice([1, 1, 0.9, 0.3]), "seed": rng.randrange(9),
        "top_k": rng.choice([0, 0, 1, 5, 4000]), "min_p": rng.choice([0, 0, 0.1]), "presence_penalty": rng.choice([0, 0, 1.0]),
        "frequency_penalty": rng.choice([0, 0, -1.0]), "repetition_penalty": rng.choice([1, 1, 1.3]),
        "logit_bias": rng.choice([{}, {}, {3: 5.0, 4: -100.0}]), "min_tokens": rng.choice([0, 0, 5]),
        "logprobs": rng.choice([None, 0, 4]),
    }  # fmt: skip


def check_any_batch(seed, device, dtype, vocabulary, most=12):
    rng = random.Random(seed)
    count = rng.randrange(1, most)
    rows = logits(count, vocabulary, seed).to(dtype)
    rows = (rows * 4).round() / 4 if rng.random() < 0.5 else rows  # many ties
    rows = rows.to(device)
    sequences = [
        one(outputs=[rng.randrange(vocabulary) for _ in range(rng.randrange(9))], **requests(rng)) for _ in range(count)
    ]
    together = sample(rows, sequences)
    order = rng.sample(range(count), count)
    shuffled = sample(rows[order], [sequences[row] for row in order])
    alone = [sample(rows[row : row + 1], [sequences[row]]) for row in range(count)]
    assert together.tokens == [each.tokens[0] for each in alone]
    assert [together.tokens[row] for row in order] == shuffled.tokens
    for row in range(count):
        if together.logprobs[row] is not None:
            assert together.logprobs[row].chosen == pytest.approx(alone[row].logprobs[0].chosen, abs=1e-5)
            assert [t for t, _ in together.logprobs[row].top] == [t for t, _ in alone[row].logprobs[0].top]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([7, 50, 1001]))
def test_a_row_draws_the_same_token_in_any_batch(seed, dtype, vocabulary):
    check_any_batch(seed, "cpu", dtype, vocabulary)


def test_a_row_draws_the_same_token_when_rows_are_split(monkeypatch):
    monkeypatch.setattr(sampler, "_MAX_LOGITS", 100)
    for seed in range(20):
        check_any_batch(seed, "cpu", torch.float32, 50)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_sorting_only_the_most_likely_changes_nothing(seed):
    rng = random.Random(seed)
    rows = logits(8, 60, seed, spread=rng.choice([0.1, 3.0, 30.0]))
    rows = (rows * 2).round() / 2 if rng.random() < 0.7 else rows
    rows[rng.randrange(8)] = rng.choice([math.nan, -math.inf, 0.0])
    sequences = [one(**{**requests(rng), "top_k": rng.choice([0, 1, 3, 5, 59, 60, 61])}) for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_draw_reference, "NUM_LIKELY", 1000)
        everything = sample(rows, sequences).tokens
        for few in (1, 2, 5, 30, 59):
            patch.setattr(token_draw_reference, "NUM_LIKELY", few)
            assert sample(rows, sequences).tokens == everything


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50, 1001, 32_000, 50_257, 128_256])
def test_a_row_draws_the_same_token_in_any_batch_on_a_gpu(vocabulary):
    for seed in range(20):
        check_any_batch(seed, "cuda", torch.bfloat16 if seed % 2 else torch.float32, vocabulary, most=100)


@pytest.mark.gpu
def test_a_gpu_and_a_cpu_choose_the_same_but_for_rounding():
    rng = random.Random(0)
    rows = logits(200, 5000)
    sequences = [one(outputs=(1, 2, 2), **requests(rng)) for _ in range(200)]
    there, here = sample(rows.cuda(), sequences).tokens, sample(rows, sequences).tokens
    assert sum(a != b for a, b in zip(there, here, strict=True)) <= 1


def test_shapes_are_checked_and_nothing_is_changed():
    with pytest.raises(ValueError, match="2 sequences"):
        sample(logits(3), [one(), one()])
    assert sample(logits(0), []).tokens == []
    rows = logits(2)
    before = rows.clone()
    sample(rows, [one(logit_bias={1: 1.0}, repetition_penalty=2.0), one(temperature=0, presence_penalty=1.0, outputs=(3,))])
    assert torch.equal(rows, before)
