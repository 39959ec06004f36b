"""The load client of `benchmarks.http_load` against a server with canned answers."""

from __future__ import annotations

import json
import socket
import threading
from random import Random

import pytest

from benchmarks.http_load import lengths
from benchmarks.http_load.client import LoadClient
from benchmarks.http_load.vocabulary import words
from benchmarks.http_load.workload import Traffic, choose_adapters

NEW = 6
WORDS = words(64)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def frame(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()


def text(word: str, finish: str | None = None) -> bytes:
    return frame({"choices": [{"index": 0, "text": word, "finish_reason": finish}], "usage": None})


def stream(texts: list[bytes], tokens: int = NEW, end: bytes = b"data: [DONE]\n\n") -> bytes:
    frames = [*texts, text("", "length"), frame({"choices": [], "usage": {"completion_tokens": tokens}}), end]
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, frames)) + b"0\r\n\r\n"


TEXTS = [text(f" {word}") for word in WORDS[:NEW]]
FULL = json.dumps({"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": NEW}}).encode()
BUSY = b'{"error":{"message":"busy"}}'
ANSWERS = {
    "complete": (stream(TEXTS), ""),
    "several tokens in a frame": (stream([text("".join(f" {word}" for word in WORDS[:NEW]))]), ""),
    "a token is lost": (stream(TEXTS[1:]), "25 bytes of text, expected 5 for each of 6 tokens"),
    "a token is repeated": (stream([*TEXTS, TEXTS[-1]]), "35 bytes of text, expected 5 for each of 6 tokens"),
    "the answer is too short": (stream(TEXTS, tokens=5), "5 tokens, expected 6"),
    "no end": (stream(TEXTS, end=b": comment\n\n"), "the stream ended without [DONE]"),
    "closed": (stream(TEXTS)[:-20], "the connection was closed before the end of the answer"),
    "busy": (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%b" % (len(BUSY), BUSY), "status 429"),
}


class CannedServer:
    """Gives every request the same answer, in pieces of random size. A context manager."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self._random = answer, Random(1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> CannedServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        try:
            while True:
                connection = self._listening.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            while True:
                size = 0
                while (line := file.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        size = int(line.split(b":")[1])
                if not line:
                    return
                file.read(size)
                place = 0
                while place < len(self._answer):
                    step = self._random.randrange(1, 60)
                    connection.sendall(self._answer[place : place + step])
                    place += step
                if b"chunked" in self._answer and not self._answer.endswith(b"0\r\n\r\n"):
                    return  # an incomplete answer ends with the connection


@pytest.fixture(scope="module")
def client():
    with LoadClient(2) as client:
        yield client


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_checked(client, name):
    answer, error = ANSWERS[name]
    workload = Traffic(vocabulary=64, prompt=4, new=NEW).closed(3, 2, name)
    with CannedServer(answer) as server:
        report = client.send(server.url, workload, keep_every=1, is_in_words=True)
    assert len(report.answers) == 6
    assert {each.request for each in report.answers} == set(range(6))
    for each in report.answers:
        assert each.error.startswith(error)
        assert bool(each.error) == bool(error)
    if name == "complete":
        assert report.frames == 6 * (NEW + 3)
        assert len(report.gaps_s) == 6 * (NEW - 1)
        assert report.kept == 6
        assert report.differing == 0


def test_a_whole_answer_is_read_by_its_length(client):
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(FULL), FULL)
    workload = Traffic(vocabulary=64, prompt=4, new=NEW).closed(2, 3, "whole", stream=False)
    with CannedServer(answer) as server:
        report = client.send(server.url, workload, keep_every=0)
    assert [each.error for each in report.answers] == [""] * 6
    assert [each.tokens for each in report.answers] == [NEW] * 6


def test_requests_of_an_open_loop_are_sent_at_their_arrivals(client):
    workload = Traffic(vocabulary=64, prompt=4, new=NEW).open(100.0, 20, "open")
    with CannedServer(stream(TEXTS)) as server:
        report = client.send(server.url, workload, keep_every=1, is_in_words=True)
    due = {each.request: each.due for each in report.answers}
    for number, request in enumerate(workload.requests):
        assert due[number] - due[0] == pytest.approx(request.arrival_s - workload.requests[0].arrival_s)
    assert all(each.done >= each.due and not each.error for each in report.answers)


@pytest.mark.parametrize("name", lengths.SOURCES)
def test_lengths_of_a_trace_fit_the_context(name):
    sizes = lengths.sample(name, 500, 1024, Random(1))
    assert all(prompt >= 1 and new >= 1 and prompt + new <= 1024 for prompt, new in sizes)
    assert len(set(sizes)) > 50


def test_adapters_follow_a_zipf_law():
    names = choose_adapters(4000, 8, 0.25, Random(1))
    assert 0.2 < names.count(None) / 4000 < 0.3
    assert names.count("a0") > 2 * names.count("a1") > 4 * names.count("a7") > 0
