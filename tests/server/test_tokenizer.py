"""The tokenizer's thread serves tenants round-robin; variables reach chat templates that use them."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.errors import ContextTooLong
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
