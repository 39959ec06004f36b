"""Hostile input: each request gets a clear error, and the engine keeps serving."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import time
from collections import Counter
from contextlib import suppress

import httpx2
import pytest

from tests.server.conftest import CHAT

JSON = {"Content-Type": "application/json"}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def impatient_server(world, start):
    """A server with a short client timeout."""
    return start(world.folder, patience_s=1.0)


def address(server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def works(server) -> bool:
    return len(server.client().completions.create(model="tiny", prompt="x", max_tokens=1).choices) == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": NaN}}',
        b'{"model": "tiny", "prompt": "x", "seed": 123456789012345678901234567890}',
        b'{"model": "tiny", "prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "stop": ' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "n": 1e9}',
        b'{"model": "tiny", "prompt": "x", "n": 129}',
        b'{"model": "tiny", "prompt": ["x", "y"], "n": 128}',
        b'{"model": "tiny", "prompt": "x", "max_tokens": 99999999999}',
        json.dumps({**GOOD, "logit_bias": {str(token): 1 for token in range(2000)}}).encode(),
        json.dumps({**GOOD, "logit_bias": {"99999999": 1}}).encode(),
        json.dumps({**GOOD, "prompt": ["x"] * 65}).encode(),
        b"",
        b"null",
        b'"x"',
        b'{"model": "tiny", "prompt": "x"',
        b"\x00" * 100,
    ],
    ids=lambda body: str(body[:60]),
)
def test_an_invalid_body_is_400_in_openais_format(server, body):
    answer = server.ask("POST", "/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 2000
    assert works(server)


SENSIBLE = {
    "temperature": [0, 0.0, 2, 1.5],
    "top_p": [0, 1, 1e-300],
    "top_k": [-1, 0, 1, 1 << 20],
    "min_p": [0, 1.0],
    "seed": [-1, 0, (1 << 63) - 1],
    "max_tokens": [1, 8],
    "min_tokens": [0, 1],
    "n": [1, 3],
    "stop": ["x", ["a", "b"], []],
    "stop_token_ids": [[], [5], [5] * 64],
    "ignore_eos": [True],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 0],
    "repetition_penalty": [0.01, 100],
    "logit_bias": [{}, {"5": -100, "6": 100.0}],
    "stream": [True, False, None],
    "user": ["é漢😀", ""],
    "model": ["tiny", "pirate", "tiny:poet", "judge"],
}


@pytest.mark.parametrize("values", [b"[1],", b"[],", b"{},", b"1,", b'"",'], ids=str)
def test_millions_of_small_values_are_rejected_before_parsing(server, values):
    body = b'{"model": "tiny", "prompt": [' + values * ((15 << 20) // len(values)) + b"0]}"
    answer = server.ask("POST", "/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert "several requests" in answer.text
    assert works(server)


class Words:
    """Random bodies: almost valid ones, edge values, and bytes that are not JSON."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def value(self, depth: int = 0):
        kinds = [0, 1, -1, 2, 0.5, -0.0, 1e308, 1 << 31, 1 << 63, -(1 << 70), True, False, None, "", "x", "tiny", "pirate", "5"]
        kinds += ["\x00", "é漢😀", "x" * 300, "a:b", "../..", [], {}, [0], ["x"], [[1, 2]], {"5": 1}, {"x": "y"}, [None], CHAT]
        if depth < 3 and self.rng.random() < 0.25:
            size = self.rng.randrange(4)
            if self.rng.random() < 0.5:
                return [self.value(depth + 1) for _ in range(size)]
            return {str(self.value(9))[:20]: self.value(depth + 1) for _ in range(size)}
        return self.rng.choice(kinds)

    def body(self, path: str) -> bytes:
        base = {
            "/v1/completions": GOOD,
            "/v1/chat/completions": {"model": "tiny", "messages": CHAT, "max_tokens": 2},
            "/tokenize": {"prompt": "x"},
            "/detokenize": {"tokens": [7, 8]},
            "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "nowhere"},
            "/v1/unload_lora_adapter": {"lora_name": "unknown"},
        }[path]
        made = dict(base)
        for _ in range(self.rng.randrange(1, 4)):
            field = self.rng.choice([*base, *SENSIBLE])
            sensible = field in SENSIBLE and "model" in base and self.rng.random() < 0.8
            made[field] = self.rng.choice(SENSIBLE[field]) if sensible else self.value()
        raw = bytearray(json.dumps(made).encode())
        if self.rng.random() < 0.2:
            for _ in range(self.rng.randrange(1, 6)):
                raw[self.rng.randrange(len(raw))] = self.rng.randrange(256)
        return bytes(raw)


def test_two_thousand_random_bodies_cause_no_500(server):
    """Those that happen to be valid are computed."""
    words = Words(11)
    paths = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] * 5 + [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ]
    asks = [(path, words.body(path)) for path in (paths[number % len(paths)] for number in range(2000))]

    async def run() -> Counter[int]:
        found: Counter[int] = Counter()
        wrong = []
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:

            async def some(part) -> None:
                for path, body in part:
                    answer = await client.post(path, content=body, headers=JSON)
                    found[answer.status_code] += 1
                    if answer.status_code >= 500:
                        wrong.append((path, body, answer.text))
                    elif answer.status_code >= 400:
                        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

            await asyncio.gather(*(some(asks[start::8]) for start in range(8)))
        assert not wrong, wrong[:3]
        return found

    found = asyncio.run(run())
    assert set(found) <= {200, 400, 404, 413}, found
    assert found[200] > 100
    assert found[400] > 700
    assert works(server)
    assert server.metric("symbiosis_requests_running") == server.metric("symbiosis_requests_waiting") == 0


def test_a_thousand_open_connections_are_served(server):
    """All are open before the first request."""
    body = json.dumps({**GOOD, "temperature": 0}).encode()
    head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    async def run() -> Counter[bytes]:
        opened = [await asyncio.open_connection(*address(server)) for _ in range(1000)]

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(head.encode() + body)
            status = await reader.readline()
            writer.close()
            return status

        return Counter(await asyncio.gather(*(ask(*each) for each in opened)))

    assert asyncio.run(run()) == {b"HTTP/1.1 200 OK\r\n": 1000}
    assert works(server)


def drip(server, pieces: list[bytes], pause_s: float = 0.3, seconds: float = 60) -> tuple[bytes, float]:
    """Send slowly until the server closes. Returns the response and the seconds."""
    begun = time.monotonic()
    with socket.create_connection(address(server)) as raw:
        raw.settimeout(pause_s)
        said = b""
        while time.monotonic() - begun < seconds:
            try:
                if pieces:
                    raw.sendall(pieces.pop(0))
                more = raw.recv(65536)
                if not more:
                    return said, time.monotonic() - begun
                said += more
                if b"\r\n\r\n" in said and b'"code"' in said:
                    return said, time.monotonic() - begun
            except TimeoutError:
                continue
            except OSError:
                return said, time.monotonic() - begun
    raise AssertionError("the server did not close the connection")


def test_slow_senders_time_out(impatient_server):
    head = HEAD.encode()
    for pieces in ([], [b"P"], [bytes([byte]) for byte in head], [head, b"Content-Length: 500\r\n\r\n", *[b"{"] * 30]):
        said, seconds = drip(impatient_server, list(pieces))
        assert b" 408 " in said.splitlines()[0], said
        assert b"request_timeout" in said
        assert seconds > 0.9
    assert works(impatient_server)


def test_slow_readers_are_disconnected(impatient_server):
    body = json.dumps({**GOOD, "max_tokens": 250, "n": 128, "stream": True, "logprobs": 20, "ignore_eos": True}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(address(impatient_server))
        raw.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + 30
        while impatient_server.metric("symbiosis_requests_running") == 0:
            assert time.monotonic() < end
        while impatient_server.metric("symbiosis_requests_running") + impatient_server.metric("symbiosis_requests_waiting") > 0:
            assert time.monotonic() < end
            time.sleep(0.1)
        raw.settimeout(10)
        with suppress(ConnectionResetError):
            assert b"[DONE]" not in b"".join(iter(lambda: raw.recv(1 << 20), b""))
    assert works(impatient_server)


def test_bytes_that_are_not_http_are_rejected(server):
    rng = random.Random(3)
    for number in range(50):
        with socket.create_connection(address(server)) as raw:
            raw.sendall(rng.randbytes(rng.randrange(1, 400)) + (b"\r\n\r\n" if number % 2 else b""))
    assert works(server)
