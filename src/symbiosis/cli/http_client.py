"""HTTP client of the command line, on the standard library alone."""

from __future__ import annotations

import json
import secrets
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from symbiosis.errors import BadAdapter, BadAddress, SymbiosisError, Unreachable

FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
_TIMEOUT_S = 300.0
_CHUNK_BYTES = 1 << 20
_UNAVAILABLE = 503
_JOBS = "/v1/fine_tuning/jobs"


class HttpError(SymbiosisError):
    """An error response of the server; `status` is 0 if the response could not be read."""

    code = "refused"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Client of one server. Methods raise `Unreachable` without a server, and `HttpError` with its error message."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadAddress(f"{url!r} is not the address of a server: expected http://HOST:PORT")
        path = parts.path.rstrip("/").removesuffix("/v1")  # OpenAI's clients include it in the base URL
        self._url, self._key = parts._replace(path=path).geturl(), key
        self._host, self._port, self._path = parts.hostname, parts.port, path
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def models(self) -> list[dict[str, Any]]:
        """Models and adapters; the base model is first."""
        found: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        return found

    def model(self, id: str) -> dict[str, Any]:
        """A model or adapter."""
        return self._json("GET", f"/v1/models/{quote(id)}")

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Stream the reply of the assistant."""
        body = {"model": model, "messages": messages, "stream": True, **options}
        with self._request("POST", "/v1/chat/completions", json.dumps(body).encode(), "application/json") as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(event["error"]["message"])
                yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    def statistics(self) -> dict[str, Any]:
        """For the admin."""
        return self._json("GET", "/v1/statistics")

    def adapters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("GET", "/v1/adapters")["data"]
        return found

    def add_adapter(self, name: str, folder: Path) -> dict[str, Any]:
        """Upload the two files of a PEFT folder. Raises `BadAdapter` if a file is missing or the name is invalid."""
        path = _adapter_path(name)
        for file in FILES.values():
            if not (folder / file).is_file():
                raise BadAdapter(f"{folder} has no {file}: expected a folder as `symbiosis finetune --out` or PEFT writes it")
        return self._send_form("PUT", path, {}, {field: folder / file for field, file in FILES.items()})

    def remove_adapter(self, name: str, owner: str | None = None) -> None:
        query = "" if owner is None else f"?{urlencode({'owner': owner})}"
        self._json("DELETE", f"{_adapter_path(name)}{query}")

    def pin_adapter(self, name: str, pinned: bool, owner: str | None = None) -> None:
        body = {"lora_name": name, "pinned": pinned, **({} if owner is None else {"owner": owner})}
        self._json("POST", "/v1/pin_lora_adapter", json.dumps(body).encode(), "application/json")

    def download_adapter(self, name: str, folder: Path) -> None:
        """Download the two files of an adapter of this tenant, in PEFT's format."""
        for file in FILES.values():
            with self._request("GET", f"{_adapter_path(name)}/{file}") as response, _create_file(folder / file) as out:
                while chunk := response.read(_CHUNK_BYTES):
                    out.write(chunk)

    def upload(self, path: Path) -> dict[str, Any]:
        """Upload a training file. Raises `SymbiosisError` if it cannot be read."""
        return self._send_form("POST", "/v1/files", {"purpose": "fine-tune"}, {"file": path})

    def remove_file(self, id: str) -> None:
        self._json("DELETE", f"/v1/files/{quote(id, safe='')}")

    def create_job(self, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        """Create a job. Calls with the same `key` create one job."""
        more = {} if key is None else {"Idempotency-Key": key}
        return self._json("POST", _JOBS, json.dumps(body).encode(), "application/json", more=more)

    def jobs(self, limit: int = 20) -> list[dict[str, Any]]:
        """Newest first."""
        return self._pages(_JOBS, limit)

    def job(self, id: str) -> dict[str, Any]:
        return self._json("GET", _job_path(id))

    def change_job(self, id: str, how: str) -> dict[str, Any]:
        """cancel, pause or resume."""
        return self._json("POST", f"{_job_path(id)}/{how}")

    def events(self, id: str, limit: int = 1 << 62) -> list[dict[str, Any]]:
        """Oldest first."""
        return self._pages(f"{_job_path(id)}/events", limit)[::-1]

    def _pages(self, path: str, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more = True
        while more and len(found) < limit:
            query = {"limit": min(100, limit - len(found))} | ({"after": found[-1]["id"]} if found else {})
            page = self._json("GET", f"{path}?{urlencode(query)}")
            found += page["data"]
            more = page["has_more"]
        return found

    def _send_form(self, method: str, path: str, texts: dict[str, str], files: dict[str, Path]) -> dict[str, Any]:
        """Send a multipart form; files are streamed. Raises `SymbiosisError` if one cannot be read."""
        boundary = secrets.token_hex(16)
        head = f"--{boundary}\r\nContent-Disposition: form-data; name="
        parts: list[bytes | BinaryIO] = [f'{head}"{name}"\r\n\r\n{text}\r\n'.encode() for name, text in texts.items()]
        with ExitStack() as stack:
            length = 0
            for name, file in files.items():
                try:
                    opened = stack.enter_context(file.open("rb"))
                    length += file.stat().st_size
                except OSError as error:
                    raise SymbiosisError(f"cannot read {file}: {error.strerror}") from None
                filename = quote(file.name, safe=" ")
                parts += [f'{head}"{name}"; filename="{filename}"\r\n\r\n'.encode(), opened, b"\r\n"]
            parts.append(f"--{boundary}--\r\n".encode())
            length += sum(len(part) for part in parts if isinstance(part, bytes))
            return self._json(method, path, _read_chunks(parts), f"multipart/form-data; boundary={boundary}", length)

    def _json(self, method: str, path: str, *sent: Any, **more: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response."""
        with self._request(method, path, *sent, **more) as response:
            try:
                found = json.loads(response.read())
            except (ValueError, HTTPException, OSError):
                found = None
        if not isinstance(found, dict):
            raise HttpError(f"{self._url} did not return a JSON object: is it a Symbiosis server?")
        return found

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "",
        length: int | None = None,
        more: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        headers = {"Connection": "close"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})
        headers |= {"Content-Type": kind} if kind else {}
        headers |= more or {}
        headers |= {} if length is None else {"Content-Length": str(length)}
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"{self._path}{path}", body, headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have sent an error before reading the whole body
        except (OSError, HTTPException, UnicodeError) as error:
            raise Unreachable(
                f"no server at {self._url} ({_reason(error)}): start a server with `symbiosis serve --http`, "
                "or give its address with --connect"
            ) from None
        try:
            peeks = self._kind is HTTPConnection and connection.sock is not None
            speaks = not peeks or connection.sock.recv(1, socket.MSG_PEEK) in (b"H", b"")
            response = connection.getresponse() if speaks else None
        except (OSError, HTTPException) as error:
            raise Unreachable(f"{self._url} broke off ({_reason(error)})") from None
        if response is None:  # getresponse() would wait for a line that never ends
            raise Unreachable(
                f"the server at {self._url} does not speak HTTP: the address of the executor (port 7777 by default) is "
                "not that of HTTP (port 8000); give the right one with --connect"
            )
        if response.status >= 400:
            failure = self._error(response)
            raise Unreachable(str(failure)) if response.status == _UNAVAILABLE else failure
        return response

    def _error(self, response: HTTPResponse) -> HttpError:
        try:
            message = json.loads(response.read())["error"]["message"]
        except (ValueError, KeyError, TypeError, OSError, HTTPException):
            message = f"{self._url} returned {response.status} {response.reason}"
        hint = ": give your key with --key or SYMBIOSIS_KEY" if response.status == 401 else ""
        return HttpError(f"{message}{hint}", response.status)


def _read_chunks(parts: list[bytes | BinaryIO]) -> Iterator[bytes]:
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            yield from iter(partial(part.read, _CHUNK_BYTES), b"")


def _adapter_path(name: str) -> str:
    """Raises `BadAdapter` for a name that is not one path segment."""
    if "/" in name or not name:
        raise BadAdapter(f"{name!r} is not a valid adapter name: expected letters, digits, dots, dashes and underscores")
    return f"/v1/adapters/{quote(name, safe='')}"


def _job_path(id: str) -> str:
    """Raises `SymbiosisError` for an id that is not one path segment."""
    if "/" in id or not id:
        raise SymbiosisError(f"{id!r} is not a job id: expected one that `symbiosis jobs list` shows")
    return f"{_JOBS}/{quote(id, safe='')}"


def _create_file(file: Path) -> BinaryIO:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("wb")
    except OSError as error:
        raise SymbiosisError(f"cannot write to {file.parent}: {error.strerror}; choose another folder") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return "it does not speak https: use http://" if error.reason == "WRONG_VERSION_NUMBER" else f"TLS: {error.reason}"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
