"""Invalid requests are rejected by field, in OpenAI's format."""

from __future__ import annotations

import asyncio

import openai
import pytest
from pydantic import ValidationError

from symbiosis.server.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest
from tests.server.conftest import CHAT

JSON = {"Content-Type": "application/json"}
BAD = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"best_of": 4}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_json": {}}, "guided_json"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, None),
    ({"seed": 1 << 70}, "seed"),
    ({"prompt": [127, 128]}, "prompt"),  # not a token of this model: checked by the engine
    ({"stop_token_ids": [500]}, "stop_ids"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda value: str(value)[:40])
def test_an_error_names_the_invalid_field(server, change, field):
    answer = server.ask("POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    if field is not None:
        assert error["param"].split(".")[0] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"chat_template": "{{ messages }}"},
        {"response_format": {"type": "json_object"}},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"top_logprobs": 2},
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"web_search_options": {}},
        {"moderation": {"model": "omni-moderation-latest"}},
        {"verbosity": "loud"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"service_tier": "priority"},
        {"reasoning_effort": "most"},
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}]},
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        {"messages": [{"role": "assistant", "content": None, "refusal": "no"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user"}]},
    ],
    ids=str,
)
def test_unsupported_chat_fields_are_rejected(server, change):
    answer = server.ask("POST", "/v1/chat/completions", json={"model": "tiny", "messages": CHAT, **change})
    assert answer.status_code == 400, answer.text
    assert next(iter(change)) in answer.json()["error"]["message"]


def test_an_image_part_is_rejected(server):
    picture = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    asked = {"model": "tiny", "messages": [*CHAT, {"role": "user", "content": picture}]}
    said = server.ask("POST", "/v1/chat/completions", json=asked).json()["error"]["message"]
    assert said == f"messages.{len(CHAT)}.content: a part of type 'image_url' is not supported: expected text"


def test_an_unknown_model_is_404(server):
    for model in ("unknown", "tiny:unknown", "PIRATE", "../pirate", "tiny:", ":", "tiny:tiny", "a:pirate", "x/tiny"):
        with pytest.raises(openai.NotFoundError) as caught:
            server.client().completions.create(model=model, prompt="x")
        assert caught.value.code == "model_not_found"


def test_a_long_prompt_is_400_with_the_limit(server):
    for ask in ({"prompt": "x" * 300}, {"prompt": "x" * 3_000_000}, {"prompt": "x", "max_tokens": 256}):
        with pytest.raises(openai.BadRequestError, match="256") as caught:
            server.client().completions.create(model="tiny", **ask)
        assert caught.value.code == "context_length_exceeded"


def test_long_prompts_are_rejected_before_the_engine(server):
    with pytest.raises(openai.BadRequestError, match="a prompt has 300 tokens, at most 256") as caught:
        server.client().completions.create(model="tiny", prompt=[[1], [1] * 300])
    assert caught.value.code == "context_length_exceeded"


def test_embeddings_are_rejected(server):
    with pytest.raises(openai.BadRequestError, match="does not support embeddings") as caught:
        server.client().embeddings.create(model="tiny", input="x")
    assert caught.value.code == "unsupported_model"


def test_errors_precede_the_stream(server):
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="unknown", prompt="x", stream=True)


def test_invalid_bodies_and_methods_are_rejected(server):
    broken = server.ask("POST", "/v1/completions", content=b"{", headers=JSON)
    assert broken.status_code == 400
    assert broken.json()["error"]["message"] == "the body is not JSON: EOF while parsing an object at line 1 column 1"
    assert server.ask("POST", "/v1/completions", content=b"[1]", headers=JSON).status_code == 400
    assert server.ask("POST", "/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    huge = b'{"model": "' + b"x" * (17 << 20) + b'"}'
    assert server.ask("POST", "/v1/completions", content=huge, headers=JSON).status_code == 413
    assert server.ask("GET", "/v1/completions").status_code == 405
    nothing = server.ask("GET", "/v1/nothing").json()["error"]
    assert nothing["code"] == "not_found"
    assert nothing["message"] == "there is no /v1/nothing: GET /openapi.json lists the paths of this server"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": ...}, "model is missing: add it; /openapi.json describes the fields of each route"),
        ({"messages": []}, "messages has 0 items: expected at least 1"),
        ({"model": ""}, "model is too short: expected at least 1 characters"),
        ({"model": "x" * 300}, "model is too long: expected at most 256 characters"),
        ({"stop": ["x"] * 17}, "stop has too many items: expected at most 16"),
    ],
    ids=["missing", "empty", "short", "long", "many"],
)
def test_an_error_says_what_was_expected(server, change, said):
    body = {key: value for key, value in {"model": "tiny", "messages": CHAT, **change}.items() if value is not ...}
    assert server.ask("POST", "/v1/chat/completions", json=body).json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, b'{"model": "tiny", "prompt": [' + b",".join([b"1.5"] * 50_000) + b"]}"),
        (CompletionRequest, b'{"model": "tiny", "prompt": [' + b",".join([b"[[]]"] * 50_000) + b"]}"),
        (ChatRequest, b'{"model": "tiny", "messages": [' + b",".join([b"{}"] * 50_000) + b"]}"),
        (DetokenizeRequest, b'{"tokens": [' + b",".join([b'"x"'] * 50_000) + b"]}"),
    ],
)
def test_validation_of_a_list_stops_at_the_first_error(kind, body):
    """An error for each of a million items would block the event loop."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body)
    assert caught.value.error_count() < 10


def test_many_errors_are_only_counted(server):
    body = {"model": "tiny", "prompt": "x", **{f"x{at}": 1 for at in range(50_000)}}
    said = server.ask("POST", "/v1/completions", json=body).json()["error"]["message"]
    assert said.startswith("the body has 50000 errors")


def test_a_full_queue_is_429_with_retry_after(server):
    async def flood() -> list[object]:
        client = server.async_client()
        ask = {"model": "tiny", "prompt": "x", "n": 128, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(client.completions.create(**ask)) for _ in range(14)]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await client.close()
        return [task.exception() for task in done]

    found = asyncio.run(flood())
    assert any(isinstance(error, openai.RateLimitError) for error in found), found
    error = next(error for error in found if isinstance(error, openai.RateLimitError))
    assert error.response.headers["retry-after"] == "1"
    assert server.client().completions.create(model="tiny", prompt="x", max_tokens=1).choices  # the others were cancelled
