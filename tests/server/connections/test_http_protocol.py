"""Connections: strict HTTP/1.1, and a connection without a request is not held."""

from __future__ import annotations

import json
import resource
import socket
import time

import pytest

from tests.server.conftest import ANN

POST = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1})


def connect(server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=40)


def exchange(server, request: str) -> str:
    """What the server answers before it closes the connection, or until it says nothing for a moment."""
    with connect(server) as connection:
        connection.sendall(request.encode("latin-1"))
        connection.settimeout(5)
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
                if b"\r\n\r\n" in answer and b"connection: close" not in answer.lower():
                    connection.settimeout(0.5)
        except TimeoutError:
            pass
    return answer.decode("latin-1")


def seconds_until_closed(connection: socket.socket) -> float:
    """While it sends a byte now and then."""
    started = time.monotonic()
    connection.settimeout(0.5)
    while time.monotonic() - started < 30:
        try:
            connection.send(b"x")
            if not connection.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


HELD = {
    "a body that never comes": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000\r\n\r\n",
    "chunks that never end": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n3b9aca00\r\n",
    "no key": f"{POST}Content-Length: 1000000000\r\n\r\n",
    "no key, chunks": f"{POST}Transfer-Encoding: chunked\r\n\r\n3b9aca00\r\n",
    "no such path": "PUT /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000\r\n\r\n",
}


@pytest.mark.parametrize("request_", HELD.values(), ids=HELD)
def test_a_response_before_the_end_of_its_request_closes_the_connection(keyed_server, request_):
    with connect(keyed_server) as connection:
        connection.sendall(request_.encode())
        assert seconds_until_closed(connection) < 30


INVALID = {
    "length and chunks": f"{POST}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": f"{POST}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "a signed length": f"{POST}Content-Length: +3\r\n\r\nabc",
    "another transfer coding": f"{POST}Transfer-Encoding: gzip\r\n\r\nabc",
    "bare line feeds": "GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
    "one bare line feed": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\nX: y\r\n\r\n",
    "bare line feeds of chunks": f"{POST}Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "a folded header": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: y\r\n z\r\n\r\n",
    "a space before a colon": "GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "a zero byte": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
    "no host": "GET /health HTTP/1.1\r\n\r\n",
    "two hosts": "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: example.com\r\n\r\n",
    "another version": "GET /health HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
    "no version": "GET /health\r\n\r\n",
    "a tunnel": "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
}


@pytest.mark.parametrize("request_", INVALID.values(), ids=INVALID)
def test_ambiguous_requests_are_rejected(server, request_):
    answer = exchange(server, request_)
    assert answer.startswith("HTTP/1.1 400"), answer[:200]
    assert "invalid_http" in answer
    assert answer.count("application/json") == 1


def test_large_heads_and_trailers_are_rejected(server):
    head = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + "".join(f"X{n}: {'y' * 1000}\r\n" for n in range(80))
    assert exchange(server, f"{head}\r\n").startswith("HTTP/1.1 4")
    assert exchange(server, head).startswith("HTTP/1.1 431")
    trailer = "X: " + "y" * 100_000
    answer = exchange(server, f"{POST}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n{trailer}")
    assert not answer.startswith("HTTP/1.1 200")


def test_an_upgrade_is_ignored(server):
    """As Java's client asks for it with every first request."""
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    answer = exchange(server, f"{POST}{upgrade}Content-Length: {len(BODY)}\r\n\r\n{BODY}")
    assert answer.startswith("HTTP/1.1 200"), answer[:200]
    assert exchange(server, f"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n{upgrade}\r\n").startswith("HTTP/1.1 200")


def test_a_pipelined_request_is_dropped_and_the_connection_closed(server):
    one = f"{POST}Content-Length: {len(BODY)}\r\n\r\n{BODY}"
    two = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connect(server) as connection:
        connection.sendall((one + two * 2000).encode())
        connection.settimeout(20)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"text_completion" in answer


def test_bytes_between_requests_are_ignored(server):
    one = f"{POST}Content-Length: {len(BODY)}\r\n\r\n{BODY}"
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(one.encode())
            connection.settimeout(20)
            answer = b""
            while b"usage" not in answer:
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(b"\r\n")


def test_many_headers_are_rejected(server):
    head = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + "a:\r\n" * 1000
    assert exchange(server, f"{head}\r\n").startswith("HTTP/1.1 431")


def test_an_early_answer_arrives_although_the_body_is_still_sent(keyed_server):
    head = "PUT /v1/adapters/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50000000\r\nConnection: close\r\n\r\n"
    for _ in range(5):
        with connect(keyed_server) as connection:
            connection.sendall(head.encode() + b"x" * 200_000)
            time.sleep(0.05)
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_held_connections_do_not_keep_a_tenant_out(keyed_server, count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    held = [connect(keyed_server) for _ in range(count)]
    try:
        for number, connection in enumerate(held):
            connection.sendall(list(HELD.values())[number % len(HELD)].encode())
        started = time.monotonic()
        for _ in range(5):
            answer = keyed_server.client(ANN).completions.create(model="tiny", prompt="x", max_tokens=1)
            assert answer.choices
        assert time.monotonic() - started < 20
        longest = max(seconds_until_closed(connection) for connection in held)
        assert longest < 30
    finally:
        for connection in held:
            connection.close()
