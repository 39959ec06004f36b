"""Completions that another engine has begun: the same tokens, logprobs and ends as on one engine."""

from __future__ import annotations

import pytest

from symbiosis.errors import BadMessage, OutOfRange
from symbiosis.models.loading import shared_copy
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_loop import EngineLoop
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Rejected, Token
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.serving.test_engine_loop import Inbox

PROMPT = [5, 17, 3, 44, 9, 23, 8]
SETTINGS = {
    "greedy": Sampling(temperature=0, max_tokens=12, ignore_eos=True),
    "seeded": Sampling(seed=3, max_tokens=12, ignore_eos=True),
    "penalties": Sampling(
        seed=4, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, presence_penalty=1.0, frequency_penalty=0.7
    ),
    "logprobs": Sampling(seed=5, max_tokens=12, ignore_eos=True, logprobs=3),
    "nucleus": Sampling(seed=6, max_tokens=12, ignore_eos=True, top_p=0.8, top_k=20, min_p=0.01),
    "stop after eight": Sampling(seed=7, max_tokens=60, min_tokens=8, ignore_eos=True, stop_ids=tuple(range(30))),
}


def outcome(model, request):
    """Tokens with logprobs, and the end, of each completion."""
    inbox = Inbox()
    loop = EngineLoop(EngineCore(shared_copy(model), pages=200, page_size=4), inbox)
    try:
        loop.submit(request)
        events = inbox.wait(request.id, ends=request.num_unfinished)[request.id]
    finally:
        loop.close()
    rejected = [event.error for event in events if isinstance(event, Rejected)]
    if rejected:
        raise rejected[0]
    tokens = {number: [] for number in range(request.n)}
    for event in events:
        if isinstance(event, Token):
            tokens[event.number].append((event.token, event.logprobs))
    return tokens, {event.number: (event.reason, event.tokens) for event in events if isinstance(event, Finished)}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_continues_as_the_first_engine_would_have(tiny, name):
    whole, ends = outcome(tiny, GenerateRequest(id="whole", prompt=PROMPT, sampling=SETTINGS[name], n=3))
    for cut in range(len(whole[0])):
        delivered = [[token for token, _ in whole[number][: max(0, cut - number)]] for number in range(3)]
        resume = [None if len(given) == len(whole[number]) else given for number, given in enumerate(delivered)]
        request = GenerateRequest(id="rest", prompt=PROMPT, sampling=SETTINGS[name], n=3, resume=resume)
        rest, last = outcome(tiny, request)
        for number, given in enumerate(resume):
            if given is None:
                assert number not in last
                continue
            assert [token for token, _ in rest[number]] == [token for token, _ in whole[number][len(given) :]]
            assert last[number] == ends[number]
            for (_, new), (_, old) in zip(rest[number], whole[number][len(given) :], strict=True):
                assert (new is None) == (old is None)
                assert new is None or new.chosen == pytest.approx(old.chosen, abs=1e-4)


@pytest.mark.parametrize("sampling", [SETTINGS["greedy"], Sampling(seed=1, stop_ids=(9,), ignore_eos=True)])
def test_a_completion_that_has_all_its_tokens_finishes_at_once(tiny, sampling):
    is_full = sampling.max_tokens is not None
    delivered = [1] * 12 if is_full else [4, 9]
    tokens, ends = outcome(tiny, GenerateRequest(id="a", prompt=PROMPT, sampling=sampling, resume=[delivered]))
    assert tokens == {0: []}
    assert ends == {0: (FinishReason.LENGTH if is_full else FinishReason.STOP, len(delivered))}


def test_wrong_tokens_are_rejected(tiny):
    request = GenerateRequest(id="a", prompt=PROMPT, sampling=SETTINGS["greedy"], resume=[[10**6]])
    with pytest.raises(OutOfRange):
        outcome(tiny, request)


@pytest.mark.parametrize("resume", [[], [[1]], [None, None], [[1], "2"], [[1], [True]], {"0": [1]}])
def test_a_message_with_wrong_resumed_tokens_is_rejected(resume):
    with pytest.raises(BadMessage, match="resume"):
        messages.decode_request("1", {"prompt": [1], "sampling": {}, "n": 2, "resume": resume})


def test_resumed_tokens_survive_the_message():
    request = GenerateRequest(id="1", prompt=[1, 2], n=2, resume=[[3], None])
    assert messages.decode_request("1", messages.encode_request(request)) == request
