"""Engines in real processes, started by their command; the tests are the director."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from symbiosis.app.cluster_membership import JoinRejected
from symbiosis.app.engine_member import EngineMember, MemberConfig
from symbiosis.errors import BadMessage, EngineLost, SymbiosisError
from symbiosis.server.engines.engine_client import EngineClient
from symbiosis.server.engines.rpc_client import Inbox, decode
from symbiosis.serving.engine_messages import Accepted, Finished, GenerateRequest, Result, Token
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, EngineListener, IpcClient
from tests.tiny_chat import make_tiny_chat

SECRET = "a secret of the cluster"
KEY = ClusterKey.of(SECRET)
START_S = 200.0
PROMPT, TOKENS = [7, 20, 33], 12


class Director:
    """Takes every engine, or none."""

    operations = ("join",)

    def __init__(self, rejected: SymbiosisError | None = None) -> None:
        self._rejected = rejected
        self.joined: list[dict[str, Any]] = []
        self._listen(0)

    def _listen(self, port: int) -> None:
        self._listener = EngineListener(host="127.0.0.1", port=port, clients=KEY, keys=ClusterKey.of_director(SECRET))
        self._rpc = RpcServer(self._listener)
        self._rpc.add_handler(self)

    @property
    def address(self) -> EngineAddress:
        return self._listener.address

    def stop(self) -> None:
        self._rpc.close()

    def restart(self) -> None:
        """At the same address."""
        self._listen(int(self.address.messages.rpartition(":")[2]))

    def handle(self, id: str, body: dict[str, Any]) -> None:
        if self._rejected is not None:
            raise self._rejected
        self.joined.append({name: value for name, value in body.items() if name not in ("op", "id")})
        self._rpc.publish([Result(id, {})])

    def drop_peer(self, peer: str) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_chat(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def director():
    director = Director()
    yield director
    director.stop()


def configure(director: Director, folder: Path, **changes: Any) -> dict[str, Any]:
    body = {"name": "e1", "director": director.address.to_json(), "secret": SECRET, "model": str(folder), "threads": 1}
    return {**body, "adapter_gb": 0.1, "max_running": 64, "max_rows": 128, **changes}


@contextmanager
def started(config: dict[str, Any]):
    process = subprocess.Popen(
        [sys.executable, "-m", "symbiosis.app.engine_process"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        process.stdin.write(json.dumps(config) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.stdin.close()
        process.stderr.close()
        process.wait()


def wait(condition: Any, process: Any = None, seconds: float = START_S) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.02)


def greedy(folder: Path) -> list[int]:
    """The reference."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


async def complete(address: EngineAddress) -> list[int]:
    client, tokens = EngineClient(IpcClient(address, KEY)), []
    await client.start()
    sampling = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    async with client.submit([GenerateRequest(prompt=PROMPT, sampling=sampling)]) as active:
        async for events in active.events():
            tokens += [event.token for _, event in events if isinstance(event, Token)]
    await client.close()
    return tokens


def test_an_engine_joins_serves_and_joins_a_restarted_director_again(director, folder):
    with started(configure(director, folder)) as process:
        wait(lambda: director.joined, process)
        [body] = director.joined
        assert body["name"] == "e1"
        assert body["model"]["name"] == "tiny"
        assert body["model"]["hub_id"] is None
        assert len(bytes.fromhex(body["model"]["fingerprint"])) == 32
        facts = body["facts"]
        assert (Path(facts.pop("tokenizer")) / "tokenizer.json").is_file()
        assert facts == {
            "slots": 256,
            "kv_tokens": 1024 * 16,
            "max_running": 64,
            "max_model_len": 256,
            "max_training_len": 256,
            "training_error": None,
            "default_sampling": {},
        }
        address = EngineAddress.from_json(body["address"])
        assert asyncio.run(complete(address)) == greedy(folder)
        director.stop()
        assert asyncio.run(complete(address)) == greedy(folder), "it serves without a director"
        director.restart()
        wait(lambda: len(director.joined) == 2, process)
        again = director.joined[1]
        again["facts"].pop("tokenizer")
        assert again == body
        process.stdin.close()
        assert process.wait(30) == 0


def test_sigterm_ends_running_requests_with_closed(director, folder):
    async def stop(process: Any, address: EngineAddress) -> list[Finished]:
        client, inbox = EngineClient(IpcClient(address, KEY)), Inbox()
        await client.start()
        sampling = Sampling(temperature=0, max_tokens=250, ignore_eos=True)
        for _ in range(4):
            await client.place(GenerateRequest(prompt=PROMPT, sampling=sampling, n=128), inbox)
        accepted, ends = 0, []
        while len(ends) < 4 * 128:
            for raw in await inbox.take():
                if isinstance(raw, tuple):
                    continue
                event = decode(raw)
                accepted += isinstance(event, Accepted)
                if isinstance(event, Accepted) and accepted == 4:
                    process.send_signal(signal.SIGTERM)
                ends += [event] if isinstance(event, Finished) else []
        await client.close()
        return ends

    with started(configure(director, folder, training=False)) as process:
        wait(lambda: director.joined, process)
        assert director.joined[0]["facts"]["max_training_len"] is None
        assert director.joined[0]["facts"]["training_error"] == "this server does not train"
        ends = asyncio.run(stop(process, EngineAddress.from_json(director.joined[0]["address"])))
        closed = [end for end in ends if end.error is not None]
        assert {end.error.code for end in closed} == {"closed"}
        assert process.wait(30) == 0


def test_it_ends_with_its_launcher_while_it_loads(director, folder):
    with started(configure(director, folder)) as process:
        process.stdin.close()
        assert process.wait(START_S) in (0, -signal.SIGTERM)
        assert not director.joined


def test_a_rejected_engine_ends_with_the_reason(folder):
    director = Director(SymbiosisError("this cluster serves another model"))
    with started(configure(director, folder, training=False)) as process:
        assert process.wait(START_S) == 2
        lines = process.stderr.read().splitlines()
        assert lines[-1] == "engine e1: the cluster does not take this engine: this cluster serves another model"
        assert SECRET not in "".join(lines)
    director.stop()


def test_an_engine_that_cannot_start_ends_with_the_reason(director, tmp_path):
    with started(configure(director, tmp_path / "missing")) as process:
        assert process.wait(START_S) == 1
        [line] = process.stderr.read().splitlines()
        assert line.startswith("engine e1: there is no folder")


@pytest.mark.parametrize("wrong", [{"director": None}, {"secret": "x", "colour": 1}, {"name": "e1"}])
def test_a_wrong_configuration_is_rejected(wrong):
    with pytest.raises(BadMessage):
        MemberConfig.from_json({"director": EngineAddress("a", "b", "c").to_json(), **wrong})


def member(director: Director, folder: Path) -> EngineMember:
    """In this process, as an actor runs it."""
    return EngineMember(MemberConfig.from_json(configure(director, folder, training=False, threads=None)))


def test_run_returns_when_stopped_and_raises_when_the_engine_fails(director, folder):
    stopped = threading.Event()
    with member(director, folder) as engine:
        running = threading.Thread(target=engine.run, args=[stopped])
        running.start()
        wait(lambda: director.joined)
        stopped.set()
        running.join(30)
        assert not running.is_alive()
        assert asyncio.run(complete(engine.address)) == greedy(folder), "it serves until it is closed"
        engine._engine.service.engine_loop.close()
        with pytest.raises(EngineLost, match="loop has failed"):
            engine.run(threading.Event())


def test_run_raises_when_the_director_rejects(folder):
    director = Director(SymbiosisError("no more engines"))
    with member(director, folder) as engine, pytest.raises(JoinRejected, match="no more engines"):
        engine.run(threading.Event())
    director.stop()
