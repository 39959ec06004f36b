"""Adapters come and go under traffic, and every answer is that of its own adapter."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import openai
import pytest

from tests.server.conftest import KINDS

COUNT = 24


def post(site, path: str, **body):
    return site.ask("POST", f"/v1/{path}", json=body)


def test_an_adapter_is_loaded_replaced_and_unloaded(site, world):
    assert post(site, "load_lora_adapter", lora_name="new", lora_path="cook").status_code == 200
    said = [
        site.client().completions.create(model=m, prompt="the", max_tokens=COUNT, temperature=0) for m in ("new", "tiny:new")
    ]
    assert [each.choices[0].text for each in said] == [world.says("cook", "the", COUNT)] * 2
    again = post(site, "load_lora_adapter", lora_name="new", lora_path="poet")
    assert again.status_code == 400
    assert again.json()["error"]["code"] == "adapter_exists"
    assert post(site, "load_lora_adapter", lora_name="new", lora_path="poet", load_inplace=True).status_code == 200
    now = site.client().completions.create(model="new", prompt="the", max_tokens=COUNT, temperature=0)
    assert now.choices[0].text == world.says("poet", "the", COUNT)
    assert site.metric("symbiosis_adapter_loads") >= 2
    assert site.metric("symbiosis_adapter_load_seconds") > 0
    resident = site.metric("symbiosis_adapters_resident")
    assert post(site, "unload_lora_adapter", lora_name="new").status_code == 200
    assert site.metric("symbiosis_adapters_resident") == resident  # `poet` is served under its own name too
    with pytest.raises(openai.NotFoundError):
        site.client().completions.create(model="new", prompt="the")
    assert post(site, "unload_lora_adapter", lora_name="new").status_code == 404


def test_memory_of_an_adapter_without_a_name_is_let_go(site):
    before = site.metric("symbiosis_adapters_resident")
    post(site, "load_lora_adapter", lora_name="guest", lora_path="cook")
    assert site.metric("symbiosis_adapters_resident") == before + 1
    post(site, "unload_lora_adapter", lora_name="guest")
    assert site.metric("symbiosis_adapters_resident") == before


@pytest.mark.parametrize("path", ["..", "../tiny", "/etc", ".", "nowhere", "cook/../../tiny"])
def test_adapters_come_from_the_root_and_nowhere_else(site, path):
    answer = post(site, "load_lora_adapter", lora_name="bad", lora_path=path)
    assert answer.status_code == 400
    assert "--adapter-root" in answer.json()["error"]["message"]


def test_a_broken_adapter_says_what_is_wrong(site, world):
    broken = world.root / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "adapter_config.json").write_text("{}")
    answer = post(site, "load_lora_adapter", lora_name="broken", lora_path="broken")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("bad_adapter", "unsupported_adapter")
    assert post(site, "load_lora_adapter", lora_name="tiny", lora_path="cook").json()["error"]["param"] == "lora_name"
    assert post(site, "load_lora_adapter", lora_name="a:b", lora_path="cook").json()["error"]["param"] == "lora_name"


def test_every_answer_is_its_adapters_while_adapters_come_and_go(site, world):
    """One name changes its adapter all the time; who asks for it gets one or the other, whole, and never a mixture."""
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
                assert await ask(client, "turn", prompt) in (expected["cook", prompt], expected["poet", prompt])
            done += 1
        return done

    async def change(rounds: int) -> None:
        for turn in range(rounds):
            path = ("cook", "poet")[turn % 2]
            for way, body in (
                ("load_lora_adapter", {"lora_name": "turn", "lora_path": path, "load_inplace": True}),
                *([("unload_lora_adapter", {"lora_name": "turn"})] if turn % 3 == 2 else []),
            ):
                answer = await asyncio.to_thread(post, site, way, **body)
                assert answer.status_code == 200, answer.text

    async def run() -> int:
        client, stop = site.async_client(), asyncio.Event()
        tasks = [asyncio.create_task(traffic(client, number, stop)) for number in range(12)]
        await change(24)
        stop.set()
        done = await asyncio.gather(*tasks)
        await client.close()
        return sum(done)

    assert asyncio.run(run()) >= 12
    post(site, "unload_lora_adapter", lora_name="turn")
