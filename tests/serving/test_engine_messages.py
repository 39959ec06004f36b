"""Messages between the engine process and HTTP processes survive encoding, and need no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from symbiosis.errors import BadMessage, ContextTooLong, OutOfRange, SymbiosisError
from symbiosis.serving import engine_messages as messages
from symbiosis.serving.engine_messages import Accepted, Finished, GenerateRequest, JobEvent, Rejected, Result, Token
from symbiosis.serving.scheduling.sequence import FinishReason, Logprobs, Sampling

SAMPLING = Sampling(temperature=0.5, seed=7, max_tokens=9, stop_ids=(1, 2), logit_bias={3: -1.5}, logprobs=2)


def sent(body):
    return json.loads(json.dumps(body))


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling()])
def test_a_request_survives_encoding(sampling):
    request = GenerateRequest(id="4:a", prompt=[1, 2, 3], sampling=sampling, adapter="mine", tenant="ann", n=3)
    assert messages.decode_request("4:a", sent(messages.encode_request(request))) == request


EVENTS = [
    Accepted("a"),
    Finished("a", 1, FinishReason.LENGTH, 16, 5),
    Result("a", {"hash": "x"}),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_encoding(event):
    assert messages.decode_event(sent(messages.encode_event(event, "a"))) == event


def test_tokens_of_a_step_survive_encoding():
    tokens = [(1, 0, 0, 5), (65_000, messages.MAX_ID, 127, 2**31 - 1), (3, 9, 1, 0)]
    values = [(messages.stream_number(peer, id) + number, token) for peer, id, number, token in tokens]
    found = messages.decode_tokens(messages.encode_tokens([each for pair in values for each in pair]))
    assert [(*messages.split_stream(stream), token) for stream, token in found] == tokens
    assert list(messages.decode_tokens(b"")) == []


def test_logprobs_survive_encoding():
    event = messages.decode_event(sent(messages.encode_event(Token("a", 0, 5, Logprobs(-0.5, ((5, -0.5), (6, -2.0)))), "a")))
    assert (event.logprobs.chosen, [tuple(each) for each in event.logprobs.top]) == (-0.5, [(5, -0.5), (6, -2.0)])


FAILURES = [
    Rejected("a", OutOfRange("top_p is 2", field="top_p")),
    Finished("a", 0, FinishReason.FAILED, error=ContextTooLong("too long")),
]


@pytest.mark.parametrize("event", FAILURES, ids=lambda event: type(event).__name__)
def test_errors_survive_with_code_message_and_field(event):
    error = messages.decode_event(sent(messages.encode_event(event, "a"))).error
    assert isinstance(error, SymbiosisError)
    assert (type(error), str(error)) == (type(event.error), str(event.error))
    assert getattr(error, "field", "") == getattr(event.error, "field", "")


def test_events_of_other_services_are_sent_as_they_are():
    raw = sent(messages.encode_event(JobEvent("1:a", {"training": {"step": {}}}), "a"))
    assert raw == {"id": "a", "training": {"step": {}}}
    assert isinstance(messages.decode_event(raw), JobEvent)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prompt": "text"}, BadMessage),
        ({"prompt": [1, True]}, BadMessage),
        ({"sampling": None}, BadMessage),
        ({"sampling": {"unknown": 1}}, BadMessage),
        ({"sampling": {"logit_bias": {"x": 1}}}, BadMessage),
        ({"sampling": {"top_p": 2}}, OutOfRange),
        ({"n": "1"}, BadMessage),
        ({"n": 129}, OutOfRange),
        ({"adapter": ""}, BadMessage),
        ({"tenant": "x" * 300}, BadMessage),
    ],
)
def test_a_wrong_request_is_rejected(changes, error):
    with pytest.raises(error):
        messages.decode_request("a", {"prompt": [1], "sampling": {}, **changes})


def test_messages_and_detokenizer_import_no_torch():
    names = "symbiosis.serving.engine_messages, symbiosis.serving.detokenizer, symbiosis.server.engines.engine_client"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
