"""Steps that are launched before they are scheduled change nothing but the time they take."""

from __future__ import annotations

import random

import pytest
import torch

from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.parity.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES[0]


class NoGraphs:
    """Replaces CUDA graphs."""

    def compute(self, *_):
        return None


class Launches:
    """Computes ahead without a GPU, and counts rows."""

    def __init__(self, core):
        self.core, self.rows = core, 0
        core._runner.compute_next = self.compute_next
        core._runner._decode_graphs = NoGraphs()

    def compute_next(self, chunks, tokens_B, adapters):
        self.rows += len(chunks)
        for chunk, token in zip(chunks, tokens_B.tolist(), strict=True):
            chunk.sequence.tokens.append(token)
        found = self.core._runner.compute(Batch(chunks=tuple(chunks)), adapters)
        for chunk in chunks:
            chunk.sequence.tokens.pop()
        return found


def make(num_blocks=64, **limits):
    torch.manual_seed(0)
    return EngineCore(LLAMA.model().eval(), pages=num_blocks, page_size=4, **limits)


def sampling_params():
    yield Sampling(temperature=0.0, max_tokens=9, ignore_eos=True)
    yield Sampling(temperature=1.0, seed=3, max_tokens=12)
    yield Sampling(temperature=0.8, top_p=0.7, seed=4, max_tokens=5, logprobs=2)
    yield Sampling(temperature=0.0, max_tokens=15, repetition_penalty=1.3, logit_bias={5: 3.0}, ignore_eos=True)
    yield Sampling(temperature=1.0, seed=5, max_tokens=7, stop_ids=tuple(range(40)))


def complete(core, *, late, cancels=()):
    """Requests in two waves; the tokens, logprobs and finish reason of each."""
    tokens, reports, requests, step = {}, {}, [], 0
    waves = {0: list(sampling_params()), late: list(sampling_params())}
    while step <= late or not core.is_idle():
        for number, sampling in enumerate(waves.get(step, ())):
            prompt = [7 + number, *range(1, 4 + 2 * number)]
            requests.append(core.add(prompt, sampling, tenant=f"t{number % 2}"))
        for request, token, logprobs in core.step():
            tokens.setdefault(request.id, []).append(token)
            reports.setdefault(request.id, []).append(logprobs)
        for number in cancels:
            if step == late + 1:
                core.cancel(requests[number])
        core.scheduler.check_integrity()
        step += 1
    return tokens, reports, [request.reason for request in requests]


@pytest.mark.parametrize("late", [1, 4, 8])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_completions_are_the_same(late, num_blocks):
    plain, ahead = make(num_blocks), make(num_blocks)
    launches = Launches(ahead)
    expected, found = complete(plain, late=late), complete(ahead, late=late)
    assert expected[0] == found[0]
    assert expected[2] == found[2]
    for id, reports in expected[1].items():
        for one, other in zip(reports, found[1][id], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
    assert launches.rows > 0


def test_a_cancelled_sequence_leaves_the_others_alone():
    plain, ahead = make(), make()
    Launches(ahead)
    expected, found = complete(plain, late=3, cancels=[0, 6]), complete(ahead, late=3, cancels=[0, 6])
    assert expected[0] == found[0]
    assert found[2][0] is FinishReason.CANCELLED


def test_a_failed_step_discards_what_was_computed_ahead(monkeypatch):
    plain, ahead = make(), make()
    Launches(ahead)
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    for core in (plain, ahead):
        core.add([1, 2, 3], sampling)
        core.add([4, 5], sampling)
    compute, calls = ahead._async_decoder.compute, iter(range(100))

    def fails_once(batch, adapters):
        if next(calls) == 3:
            raise RuntimeError("once")
        return compute(batch, adapters)

    monkeypatch.setattr(ahead._async_decoder, "compute", fails_once)
    completions = [{}, {}]
    for core, tokens in zip((plain, ahead), completions, strict=True):
        while not core.is_idle():
            for request, token, _ in core.step():
                tokens.setdefault(request.id, []).append(token)
    assert completions[0] == completions[1]


def test_random_traffic_gives_the_same_completions():
    numbers, cores = random.Random(1), (make(24), make(24))
    Launches(cores[1])
    plans = [
        (
            step,
            [numbers.randrange(1, 90) for _ in range(numbers.randrange(1, 9))],
            Sampling(temperature=numbers.choice([0.0, 1.0]), seed=numbers.randrange(9), max_tokens=numbers.randrange(1, 14)),
        )
        for step in sorted(numbers.randrange(60) for _ in range(30))
    ]
    completions = [{}, {}]
    for core, tokens in zip(cores, completions, strict=True):
        waiting, step = list(plans), 0
        while waiting or not core.is_idle():
            while waiting and waiting[0][0] <= step:
                core.add(*waiting.pop(0)[1:])
            for request, token, _ in core.step():
                tokens.setdefault(request.id, []).append(token)
            core.scheduler.check_integrity()
            step += 1
    assert completions[0] == completions[1]
