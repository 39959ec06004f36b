"""Passes that are computed before they are planned change nothing but the time they take."""

from __future__ import annotations

import random

import pytest
import torch

from symbiosis.serving.engine import EngineCore
from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.parity.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES[0]


class Nothing:
    """No graphs."""

    def compute(self, *_):
        return None


class Launches:
    """Computes ahead without a GPU, and counts."""

    def __init__(self, core):
        self.core, self.rows = core, 0
        core._runner.compute_next = self.compute_next
        core._runner._decoder = Nothing()

    def compute_next(self, chunks, tokens_B, adapters):
        self.rows += len(chunks)
        for chunk, token in zip(chunks, tokens_B.tolist(), strict=True):
            chunk.sequence.tokens.append(token)
        found = self.core._runner.compute(Batch(chunks=tuple(chunks)), adapters)
        for chunk in chunks:
            chunk.sequence.tokens.pop()
        return found


def make(pages=64, **limits):
    torch.manual_seed(0)
    return EngineCore(LLAMA.model().eval(), pages=pages, page_size=4, **limits)


def wishes():
    yield Sampling(temperature=0.0, max_tokens=9, ignore_eos=True)
    yield Sampling(temperature=1.0, seed=3, max_tokens=12)
    yield Sampling(temperature=0.8, top_p=0.7, seed=4, max_tokens=5, logprobs=2)
    yield Sampling(temperature=0.0, max_tokens=15, repetition_penalty=1.3, logit_bias={5: 3.0}, ignore_eos=True)
    yield Sampling(temperature=1.0, seed=5, max_tokens=7, stop_ids=tuple(range(40)))


def talk(core, *, late, cancels=()):
    """Requests in two waves; what each said, with logprobs."""
    said, reports, requests, step = {}, {}, [], 0
    waves = {0: list(wishes()), late: list(wishes())}
    while step <= late or not core.is_idle():
        for number, wish in enumerate(waves.get(step, ())):
            prompt = [7 + number, *range(1, 4 + 2 * number)]
            requests.append(core.add(prompt, wish, tenant=f"t{number % 2}"))
        for request, token, logprobs in core.step():
            said.setdefault(request.id, []).append(token)
            reports.setdefault(request.id, []).append(logprobs)
        for number in cancels:
            if step == late + 1:
                core.cancel(requests[number])
        core.scheduler.check_integrity()
        step += 1
    return said, reports, [request.reason for request in requests]


@pytest.mark.parametrize("late", [1, 4, 8])
@pytest.mark.parametrize("pages", [64, 14])
def test_answers_are_the_same(late, pages):
    plain, ahead = make(pages), make(pages)
    launches = Launches(ahead)
    expected, found = talk(plain, late=late), talk(ahead, late=late)
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
    expected, found = talk(plain, late=3, cancels=[0, 6]), talk(ahead, late=3, cancels=[0, 6])
    assert expected[0] == found[0]
    assert found[2][0] is FinishReason.CANCELLED


def test_a_failed_pass_forgets_what_was_computed_ahead(monkeypatch):
    plain, ahead = make(), make()
    Launches(ahead)
    wish = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    for core in (plain, ahead):
        core.add([1, 2, 3], wish)
        core.add([4, 5], wish)
    compute, calls = ahead._forerunner.compute, iter(range(100))

    def fails_once(made, adapters):
        if next(calls) == 3:
            raise RuntimeError("once")
        return compute(made, adapters)

    monkeypatch.setattr(ahead._forerunner, "compute", fails_once)
    answers = [{}, {}]
    for core, said in zip((plain, ahead), answers, strict=True):
        while not core.is_idle():
            for request, token, _ in core.step():
                said.setdefault(request.id, []).append(token)
    assert answers[0] == answers[1]


def test_random_traffic_gives_the_same_answers():
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
    answers = [{}, {}]
    for core, said in zip(cores, answers, strict=True):
        waiting, step = list(plans), 0
        while waiting or not core.is_idle():
            while waiting and waiting[0][0] <= step:
                core.add(*waiting.pop(0)[1:])
            for request, token, _ in core.step():
                said.setdefault(request.id, []).append(token)
            core.scheduler.check_integrity()
            step += 1
    assert answers[0] == answers[1]
