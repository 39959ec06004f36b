"""Disconnecting clients, many connections, dying processes: every request ends, and abandoned ones are cancelled."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import openai
import pytest

from tests.server.conftest import CHAT, RunningServer

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 250, "temperature": 1, "extra_body": {"ignore_eos": True}}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_two_hundred_concurrent_streams_complete(server, world):
    expected = {name: world.answers(name, CHAT, 16) for name in (None, "pirate", "poet")}

    async def one(client, number: int) -> bool:
        name = [None, "pirate", "poet"][number % 3]
        text = ""
        ask = {"model": name or "tiny", "messages": CHAT, "max_tokens": 16, "temperature": 0}
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text == expected[name]

    async def run() -> list[bool]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with server.async_client(http_client=httpx2.AsyncClient(limits=limits, timeout=120)) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    assert all(asyncio.run(run()))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_disconnect_cancels_the_request(server, stream):
    until(lambda: server.metric("symbiosis_requests_running") == 0)
    body = {key: value for key, value in LONG.items() if key != "extra_body"} | {"ignore_eos": True, "n": 100}
    request = httpx2.Request("POST", f"{server.url}/v1/completions", json={**body, "stream": stream})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + request.content)
        until(lambda: server.metric("symbiosis_requests_running") > 0)
    until(lambda: server.metric("symbiosis_requests_running") + server.metric("symbiosis_requests_waiting") == 0)


def test_a_request_that_makes_steps_fail_is_500_and_others_complete(server, world):
    model = server.hosting._engine.service.engine_loop._core._runner.model
    poison = 9

    def refuse(module, args, kwargs):
        if bool((kwargs["input_ids"] == poison).any()):
            raise RuntimeError("the device is on fire")

    async def ask(client, prompt) -> object:
        try:
            made = await client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0)
        except openai.APIStatusError as error:
            return error.status_code
        return made.choices[0].text

    async def run() -> list[object]:
        async with server.async_client() as client:
            prompts = ["the", [20, poison], "so", [21, 22, poison], "a cat"]
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts * 4))

    hook = model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        found = asyncio.run(run())
    finally:
        hook.remove()
    expected = [world.says(None, "the", 16), 500, world.says(None, "so", 16), 500, world.says(None, "a cat", 16)]
    assert found == expected * 4


@contextmanager
def serving(folder, *more: object) -> Iterator[tuple[subprocess.Popen[str], RunningServer]]:
    """`symbiosis serve --http` as its own process."""
    command = [sys.executable, "-m", "symbiosis", "serve", folder, "--listen", "shm://", "--http", "127.0.0.1:0", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.match(r"listening at (http\S+)", line)
            if found:
                yield process, RunningServer(found[1], None, None)
                break
        else:
            raise AssertionError("it never listened")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def http_process(of: int) -> int:
    """The pid of the child HTTP process."""
    found = subprocess.run(["pgrep", "-P", str(of), "-f", "symbiosis.server"], capture_output=True, text=True)
    return int(found.stdout.split()[0])


def healthy(server: RunningServer) -> bool:
    try:
        return server.ask("GET", "/health").status_code == 200
    except httpx2.HTTPError:
        return False


def test_a_dead_engine_gives_503_on_requests_and_health(world):
    with serving(world.folder) as (process, server):
        assert healthy(server)

        async def run() -> list[object]:
            client = server.async_client()
            asks = [client.completions.create(**{**LONG, "n": 64}) for _ in range(6)]
            tasks = [asyncio.create_task(ask) for ask in asks]
            await asyncio.to_thread(until, lambda: server.metric("symbiosis_requests_waiting") > 100)
            process.kill()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()
            return done

        found = asyncio.run(run())
        assert all(isinstance(error, openai.InternalServerError) and error.status_code == 503 for error in found), found
        for path in ("/health", "/ready"):
            answer = server.ask("GET", path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_lost"
        assert server.ask("GET", "/live").status_code == 200
        assert server.ask("POST", "/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 503


def test_a_dead_http_process_is_replaced_and_its_requests_are_cancelled(world):
    with serving(world.folder) as (process, server):
        first = http_process(process.pid)

        async def run() -> object:
            client = server.async_client()
            task = asyncio.create_task(client.completions.create(**{**LONG, "n": 128}))
            await asyncio.to_thread(until, lambda: server.metric("symbiosis_requests_running") > 0)
            os.kill(first, signal.SIGKILL)
            (error,) = await asyncio.gather(task, return_exceptions=True)
            await client.close()
            return error

        assert isinstance(asyncio.run(run()), openai.APIConnectionError)
        until(lambda: healthy(server), 60)
        assert http_process(process.pid) != first
        until(lambda: server.metric("symbiosis_requests_running") + server.metric("symbiosis_requests_waiting") == 0)
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_a_stopped_server_finishes_running_requests(world):
    with serving(world.folder, "--adapter", f"pirate={world.root / 'pirate'}") as (process, server):

        async def run() -> object:
            client = server.async_client()
            task = asyncio.create_task(client.completions.create(**LONG, n=16))
            await asyncio.to_thread(until, lambda: server.metric("symbiosis_requests_running") > 0)
            process.send_signal(signal.SIGTERM)
            (made,) = await asyncio.gather(task, return_exceptions=True)
            await client.close()
            return made

        made = asyncio.run(run())
        assert not isinstance(made, Exception), made
        assert made.usage.completion_tokens == 16 * 250
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_server_is_not_ready_and_serves_during_the_shutdown_delay(world, workers):
    with serving(world.folder, "--shutdown-delay", 5, "--http-workers", workers) as (process, server):
        assert server.ask("GET", "/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        until(lambda: all(server.ask("GET", "/ready").status_code == 503 for _ in range(4 * workers)), 4)
        answer = server.ask("GET", "/ready")
        assert answer.json()["error"]["code"] == "closed"
        assert "shutting down" in answer.json()["error"]["message"]
        assert server.ask("GET", "/live").status_code == server.ask("GET", "/health").status_code == 200
        assert server.client().completions.create(model="tiny", prompt="x", max_tokens=2).choices
        assert process.wait(timeout=60) == 0


def test_a_second_signal_ends_the_shutdown_delay(world):
    with serving(world.folder, "--shutdown-delay", 600) as (process, server):
        assert server.ask("GET", "/ready").status_code == 200  # it has started
        process.send_signal(signal.SIGTERM)
        until(lambda: server.ask("GET", "/ready").status_code == 503)
        os.kill(http_process(process.pid), signal.SIGTERM)
        assert process.wait(timeout=60) == 0
