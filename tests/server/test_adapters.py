"""Adapters are loaded and unloaded under traffic, and every completion uses its own adapter."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import openai
import pytest

from tests.server.conftest import KINDS

COUNT = 24


def post(server, path: str, **body):
    return server.ask("POST", f"/v1/{path}", json=body)


def test_an_adapter_is_loaded_replaced_and_unloaded(server, world):
    assert post(server, "load_lora_adapter", lora_name="new", lora_path="cook").status_code == 200
    said = [
        server.client().completions.create(model=m, prompt="the", max_tokens=COUNT, temperature=0) for m in ("new", "tiny:new")
    ]
    assert [each.choices[0].text for each in said] == [world.says("cook", "the", COUNT)] * 2
    again = post(server, "load_lora_adapter", lora_name="new", lora_path="poet")
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "adapter_exists"
    assert post(server, "load_lora_adapter", lora_name="new", lora_path="poet", load_inplace=True).status_code == 200
    now = server.client().completions.create(model="new", prompt="the", max_tokens=COUNT, temperature=0)
    assert now.choices[0].text == world.says("poet", "the", COUNT)
    assert server.metric("symbiosis_adapter_loads") >= 2
    assert server.metric("symbiosis_adapter_load_seconds") > 0
    resident = server.metric("symbiosis_adapters_resident")
    assert post(server, "unload_lora_adapter", lora_name="new").status_code == 200
    assert server.metric("symbiosis_adapters_resident") == resident  # `poet` is also served under its own name
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="new", prompt="the")
    assert post(server, "unload_lora_adapter", lora_name="new").status_code == 404


def test_unloading_the_last_name_frees_the_memory(server):
    before = server.metric("symbiosis_adapters_resident")
    post(server, "load_lora_adapter", lora_name="guest", lora_path="cook")
    assert server.metric("symbiosis_adapters_resident") == before + 1
    post(server, "unload_lora_adapter", lora_name="guest")
    assert server.metric("symbiosis_adapters_resident") == before


@pytest.mark.parametrize("path", ["..", "../tiny", "/etc", ".", "nowhere", "cook/../../tiny"])
def test_adapters_are_loaded_only_from_the_root(server, path):
    answer = post(server, "load_lora_adapter", lora_name="bad", lora_path=path)
    assert answer.status_code == 400
    assert "--adapter-root" in answer.json()["error"]["message"]


def test_a_broken_adapter_is_rejected_with_the_reason(server, world):
    broken = world.root / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("{}")
    answer = post(server, "load_lora_adapter", lora_name="broken", lora_path="broken")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("bad_adapter", "unsupported_adapter")
    assert post(server, "load_lora_adapter", lora_name="tiny", lora_path="cook").json()["error"]["param"] == "lora_name"
    assert post(server, "load_lora_adapter", lora_name="a:b", lora_path="cook").json()["error"]["param"] == "lora_name"


def test_completions_are_consistent_while_adapters_change(server, world):
    """One name changes its adapter all the time. A completion uses one or the other throughout."""
    prompts = ["the", "a cat", "I am", "so"]
    expected = {(name, p): world.says(name, p, COUNT) for name in (None, *KINDS) for p in prompts}
    assert len(set(expected.values())) == len(expected)

    async def ask(client, model, prompt) -> str:
        made = await client.completions.create(model=model, prompt=prompt, max_tokens=COUNT, temperature=0)
        return made.choices[0].text

    async def traffic(client, number: int, stop: asyncio.Event) -> int:
        done = 0
        while not stop.is_set():
            prompt, name = prompts[(number + done) % 4], [None, "pirate", "poet", "judge"][number % 4]
            assert await ask(client, name or "tiny", prompt) == expected[name, prompt]
            with suppress(openai.NotFoundError):
                assert await ask(client, "changing", prompt) in (expected["cook", prompt], expected["poet", prompt])
            done += 1
        return done

    async def change(rounds: int) -> None:
        for number in range(rounds):
            path = ("cook", "poet")[number % 2]
            for route, body in (
                ("load_lora_adapter", {"lora_name": "changing", "lora_path": path, "load_inplace": True}),
                *([("unload_lora_adapter", {"lora_name": "changing"})] if number % 3 == 2 else []),
            ):
                answer = await asyncio.to_thread(post, server, route, **body)
                assert answer.status_code == 200, answer.text

    async def run() -> int:
        client, stop = server.async_client(), asyncio.Event()
        tasks = [asyncio.create_task(traffic(client, number, stop)) for number in range(12)]
        await change(24)
        stop.set()
        done = await asyncio.gather(*tasks)
        await client.close()
        return sum(done)

    assert asyncio.run(run()) >= 12
    post(server, "unload_lora_adapter", lora_name="changing")
