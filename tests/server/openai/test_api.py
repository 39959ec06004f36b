"""The `openai` client: completions equal those of plain transformers and PEFT."""

from __future__ import annotations

import math

import pytest
import torch

from tests.server.conftest import CHAT
from tests.tiny_chat import tiny_tokenizer

NAMES = [("tiny", None), ("pirate", "pirate"), ("tiny:poet", "poet"), ("judge", "judge")]


def test_the_base_model_and_its_adapters_are_listed(server):
    models = server.client().models.list().data
    assert [(model.id, model.parent) for model in models] == [
        ("tiny", None),
        ("judge", "tiny"),
        ("pirate", "tiny"),
        ("poet", "tiny"),
    ]
    assert models[0].max_model_len == 256


@pytest.mark.parametrize(("model", "adapter"), NAMES)
def test_the_model_field_names_the_adapter(server, world, model, adapter):
    chat = server.client().chat.completions.create(model=model, messages=CHAT, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == world.answers(adapter, CHAT, 20)
    assert chat.model == model
    text = server.client().completions.create(model=model, prompt="once upon", max_tokens=20, temperature=0)
    assert text.choices[0].text == world.says(adapter, "once upon", 20)
    assert text.choices[0].finish_reason in ("length", "stop")


def test_a_stream_has_the_same_text_and_ends_with_the_usage(server, world):
    ask = {"model": "pirate", "messages": CHAT, "max_tokens": 20, "temperature": 0}
    whole = server.client().chat.completions.create(**ask)
    chunks = list(server.client().chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content == world.answers("pirate", CHAT, 20)
    assert len([piece for piece in pieces if piece]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens == len("hello there") + 3


def test_choices_of_several_prompts_are_in_order(server, world):
    ask = {"model": "tiny", "prompt": ["one", "two", "six"], "max_tokens": 8, "temperature": 1, "seed": 5}
    made = server.client().completions.create(**ask, n=3)
    assert [choice.index for choice in made.choices] == list(range(9))
    texts = [choice.text for choice in made.choices]
    assert len(set(texts)) == 9
    assert [choice.text for choice in server.client().completions.create(**ask, n=3).choices] == texts  # seeded
    streamed = [""] * 9
    for chunk in server.client().completions.create(**ask, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert made.usage.prompt_tokens == 9
    ids = tiny_tokenizer()(["one", "two", "six"])["input_ids"]
    by_ids = server.client().completions.create(**{**ask, "prompt": ids}, n=3)
    assert [choice.text for choice in by_ids.choices] == texts


def test_a_stop_string_ends_the_text_and_the_computation(server, world):
    full = world.says("pirate", "once upon", 40)
    stop = full[10:13]
    expected = full[: full.index(stop)]
    ask = {"model": "pirate", "prompt": "once upon", "max_tokens": 40, "temperature": 0, "stop": ["never seen", stop]}
    made = server.client().completions.create(**ask)
    assert made.choices[0].text == expected
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens < 40
    streamed = list(server.client().completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected
    with_it = server.client().completions.create(**ask, extra_body={"include_stop_str_in_output": True})
    assert with_it.choices[0].text == expected + stop


def test_logprobs_equal_the_models_in_both_formats(server, world):
    tokenizer = tiny_tokenizer()
    prompt = tokenizer("once upon")["input_ids"]
    with torch.no_grad():
        wanted = world.models["poet"](input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    ask = {"model": "poet", "max_tokens": 4, "temperature": 0}
    made = server.client().completions.create(**ask, prompt="once upon", logprobs=3).choices[0].logprobs
    assert len(made.tokens) == len(made.token_logprobs) == len(made.top_logprobs) == len(made.text_offset) == 4
    assert math.isclose(made.token_logprobs[0], float(wanted.max()), abs_tol=1e-3)
    assert list(made.top_logprobs[0].values()) == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-3)
    chat = server.client().chat.completions.create(**ask, messages=CHAT, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(each.top_logprobs) == 2 and each.logprob == each.top_logprobs[0].logprob for each in content)
    streamed = list(server.client().chat.completions.create(**ask, messages=CHAT, logprobs=True, top_logprobs=2, stream=True))
    again = [each for chunk in streamed for each in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [each.token for each in again] == [each.token for each in content]


def test_sampling_options_take_effect(server, world):
    likeliest = world.greedy(None, tiny_tokenizer()("ab")["input_ids"], 1)[0]

    def first(**options) -> str:
        made = server.client().completions.create(model="tiny", prompt="ab", max_tokens=1, **options)
        return made.choices[0].text

    shown = tiny_tokenizer().decode([likeliest])
    assert first(temperature=0) == shown
    assert first(temperature=0, logit_bias={str(likeliest): -100}) != shown
    assert first(temperature=2, extra_body={"top_k": 1}) == shown
    assert first(temperature=2, extra_body={"min_p": 1.0}) == shown
    ended = server.client().completions.create(
        model="tiny", prompt="ab", max_tokens=9, temperature=0, extra_body={"stop_token_ids": [likeliest]}
    )
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    plain = server.client().completions.create(model="tiny", prompt="ab", max_tokens=30, temperature=0).choices[0].text
    varied = server.client().completions.create(
        model="tiny", prompt="ab", max_tokens=30, temperature=0, frequency_penalty=2, presence_penalty=2
    )
    assert len(set(varied.choices[0].text)) > len(set(plain))


def test_a_repeated_prompt_hits_the_prefix_cache(server):
    prompt = "a long beginning that comes again and again, " * 2
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    first, second = (server.client().completions.create(**ask).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 64


def test_tokenize_counts_as_a_request_does(server):
    made = server.ask("POST", "/tokenize", json={"model": "tiny", "prompt": "abc"}).json()
    assert made == {"tokens": tiny_tokenizer()("abc")["input_ids"], "count": 3, "max_model_len": 256}
    chat = server.ask("POST", "/tokenize", json={"messages": CHAT}).json()
    asked = server.client().chat.completions.create(model="tiny", messages=CHAT, max_tokens=1)
    assert chat["count"] == asked.usage.prompt_tokens


def test_detokenize_is_the_inverse_of_tokenize(server):
    for text in ("abc", "so, it is!\n", ""):
        ids = server.ask("POST", "/tokenize", json={"prompt": text}).json()["tokens"]
        assert server.ask("POST", "/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    answer = server.ask("POST", "/detokenize", json={"tokens": [5, 1 << 20]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


def test_a_model_is_retrieved_by_each_of_its_names(server):
    client = server.client()
    assert [client.models.retrieve(id).parent for id in ("tiny", "pirate", "tiny:pirate")] == [None, "tiny", "tiny"]
    for id in ("unknown", "tiny:", "tiny:tiny", "pirate/x", ":pirate"):
        assert server.ask("GET", f"/v1/models/{id}").status_code == 404


def test_plain_http_without_any_client_library(server):
    """curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{…}'"""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 3, "temperature": 0, "stream": True}
    answer = server.ask("POST", "/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])


def test_metrics_count_requests_and_tokens(server):
    before = server.metric("symbiosis_tokens_total")
    server.client().completions.create(
        model="tiny", prompt="hello", max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    assert server.metric("symbiosis_tokens_total") == before + 5 + 5
    assert server.metric("symbiosis_time_to_first_token_seconds_count") >= 1
    assert server.metric("symbiosis_inter_token_seconds_count") >= 4
    assert server.metric("symbiosis_requests_total") >= 1
    assert server.metric("symbiosis_kv_cache_blocks") == 1024
    assert server.metric("symbiosis_requests_waiting") == 0
    assert server.metric("symbiosis_adapters_on_device") >= 3
    assert server.metric("symbiosis_adapter_device_bytes") > 0
    assert server.metric("symbiosis_engine_up") == 1
