"""The tokenizer's thread serves tenants round-robin; variables reach chat templates that use them."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.errors import ContextTooLong
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.openai.schemas import ChatMessage
from symbiosis.server.tokenizer import ServerTokenizer
from tests.tiny_chat import tiny_tokenizer


def test_a_tenant_does_not_wait_for_all_texts_of_another():
    tokens, done = ServerTokenizer(tiny_tokenizer(), 1 << 20), []

    async def encode(tenant: str, text: str) -> None:
        assert await tokens.encode(tenant, text)
        done.append(tenant)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(encode("ann", "x " * 5000))
            await asyncio.sleep(0)
            for _ in range(2):
                group.create_task(encode("bob", "x"))

    asyncio.run(run())
    assert sorted(done[:4]) == ["ann", "ann", "bob", "bob"]
    assert len(done) == 22
    assert not tokens._worker.tenant_locks, "locks of tenants without texts are freed"


def test_cancelled_and_failed_calls_block_no_other():
    async def run() -> list[bool]:
        tokens = ServerTokenizer(tiny_tokenizer(), 1 << 10)
        left = [asyncio.ensure_future(tokens.encode("ann", "x " * 500)) for _ in range(5)]
        await asyncio.sleep(0)
        for each in left[::2]:
            each.cancel()
        with pytest.raises(ContextTooLong):
            await tokens.encode("ann", "x" * (1 << 24))
        assert len(await tokens.encode("ann", "x " * 5)) >= 5
        return [each.cancelled() for each in left]

    assert asyncio.run(run()) == [True, False, True, False, True]


def test_a_variable_reaches_a_template_that_uses_it_and_has_no_effect_otherwise():
    chat = [{"role": "user", "content": "hi"}]

    def encode(template: str, **variables: str) -> int:
        tokens = ServerTokenizer(tiny_tokenizer(template), 1 << 10)
        return len(asyncio.run(tokens.encode_chat("ann", chat, variables=variables)))

    using = "{{ messages[0].content }}{{ reasoning_effort or 'medium' }}"
    assert encode(using) == len("himedium")
    assert encode(using, reasoning_effort="low") == len("hilow")
    assert encode("{{ messages[0].content }}", reasoning_effort="low") == len("hi")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": [2, "<end>"], "<end>": 1}'}}
HISTORY = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
]
WITH_TOOLS = (
    "{% for m in messages %}<{{ 'user' if m.role == 'tool' else m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or () %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<end>"
    "{% endfor %}"
)


def encode_history(template: str, history: list[dict[str, object]]) -> tuple[list[int], str]:
    tokens = ServerTokenizer(tiny_tokenizer(template), 1 << 10)
    messages = [ChatMessage.model_validate(each).to_dict() for each in history]
    ids = asyncio.run(tokens.encode_chat("ann", messages))
    return ids, tokens.tokenizer.decode(ids)


def test_function_calls_of_a_history_reach_a_template_that_uses_them():
    ids, text = encode_history(WITH_TOOLS, HISTORY)
    assert text == '<assistant>add{"x": [2, "<end>"], "<end>": 1}<end><user>3<end>'
    assert ids.count(1) == 2, "<end> in the arguments is text"
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    assert 'add"{"' in encode_history(WITH_TOOLS, [{"role": "assistant", "tool_calls": [broken]}])[1]


@pytest.mark.parametrize(("at", "field"), [(0, "messages.0.tool_calls"), (1, "messages.0.role")])
def test_function_calls_that_a_template_would_drop_are_errors(at, field):
    with pytest.raises(BadRequest, match="are not supported by this model's chat template") as caught:
        encode_history("{{ messages[0].content }}", HISTORY[at:])
    assert caught.value.field == field
