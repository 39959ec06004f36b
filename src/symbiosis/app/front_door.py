"""The HTTP side of a server or a cluster: its socket, its folders, its HTTP processes and their settings."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from symbiosis.app.http_processes import HttpProcesses
from symbiosis.errors import AddressInUse, BadAddress, InsecureListen, SymbiosisError
from symbiosis.jobs.queue import JobLimits
from symbiosis.server import adapter_store
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.settings import Settings
from symbiosis.store.artifact_cache import StoreConfig
from symbiosis.transport.shm import runtime_folder

_MAX_WORKERS = 4
_TEMPORARY = "symbiosis-uploads-"


class FrontDoor:
    """Serves OpenAI's API at `url` from `configure` until it is closed.

    `keys` are secrets by tenant; without any, only this machine can connect. `adapter_root` is the folder that the admin may
    load adapters from. Uploaded adapters are stored in `uploads` and fine-tuning jobs in `jobs` (default: `uploads` with the
    suffix -jobs); a later server with these folders continues with them. Without `uploads` both are removed at `close`.
    `workers` is the number of processes that serve completions. `patience_s` is the time for a client to send a request's head.
    Web pages of `cors_origins` may send requests. `close` serves for `shutdown_delay_s` as before, without being ready.
    With a cluster's `store`, adapters and what engines read and write of jobs are there instead.
    """

    def __init__(
        self,
        address: str,
        *,
        workers: int,
        keys: Mapping[str, str] | None = None,
        admin_key: str | None = None,
        adapter_root: str | Path | None = None,
        uploads: str | Path | None = None,
        jobs: str | Path | None = None,
        job_limits: JobLimits | None = None,
        store_limits: adapter_store.StoreLimits | None = None,
        requests: RequestLimits | None = None,
        patience_s: float = 20.0,
        cors_origins: Collection[str] = (),
        shutdown_delay_s: float = 0.0,
        store: StoreConfig | None = None,
    ) -> None:
        keys = dict(keys or {})
        if adapter_root is not None and not Path(adapter_root).is_dir():
            raise SymbiosisError(f"there is no folder {adapter_root}: --adapter-root must be a folder of adapters")
        with ExitStack() as undo:
            self._address = address
            self._socket = undo.enter_context(closing(_bind(address, keys)))
            self._uploads = undo.enter_context(closing(_LockedFolder(uploads, "adapters", "--uploads")))
            adapter_store.remove_incomplete(self._uploads.path)
            if jobs is not None and Path(jobs).resolve() == self._uploads.path:
                raise SymbiosisError(f"--uploads and --jobs are both {jobs}: give each a folder of its own")
            if jobs is None and uploads is not None:
                jobs = Path(uploads).with_name(f"{Path(uploads).resolve().name}-jobs")
            self._jobs = undo.enter_context(closing(_LockedFolder(jobs, "fine-tuning jobs", "--jobs")))
            host, port = self._socket.getsockname()[:2]
            self.settings = Settings(
                base="",
                keys=keys,
                admin_key=admin_key,
                adapter_root=None if adapter_root is None else str(Path(adapter_root).resolve()),
                uploads=str(self._uploads.path),
                jobs=str(self._jobs.path),
                store=store,
                job_limits=job_limits or JobLimits(),
                store_limits=store_limits or adapter_store.StoreLimits(),
                request_limits=requests or RequestLimits(),
                client_timeout_s=patience_s,
                allowed_hosts=None if keys else tuple({"127.0.0.1", "localhost", "[::1]", host}),
                cors_origins=tuple(cors_origins),
            )
            # Their imports take seconds: they run while the engine loads.
            self.processes = HttpProcesses(self._socket, workers, runtime_folder(), shutdown_delay_s)
            undo.pop_all()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def uploads(self) -> Path:
        return self._uploads.path

    @property
    def has_keys(self) -> bool:
        return bool(self.settings.keys or self.settings.admin_key)

    def configure(self, link: Mapping[str, Any], tokenizer: str | None, **settings: Any) -> None:
        """Serve. `link`: to the engine, or to a cluster's director; `settings` are what `Settings` takes from the engine."""
        _listen(self._socket, self._address)  # not before: a connection would wait for the engine
        self.settings = replace(self.settings, **settings)
        self.processes.configure({**link, "tokenizer": tokenizer, "settings": asdict(self.settings)})

    def close(self) -> None:
        """Stop accepting requests, let running ones finish for half a minute, then end."""
        self.processes.stop()
        for part in (self._uploads, self._jobs, self._socket):
            part.close()


class _LockedFolder:
    """A folder of the provider, or a temporary one. Errors name `what` it stores and its `option`."""

    def __init__(self, path: str | Path | None, what: str, option: str) -> None:
        self._is_temporary = path is None
        if path is None:
            adapter_store.remove_abandoned(Path(tempfile.gettempdir()), f"{_TEMPORARY}*")
            path = tempfile.mkdtemp(prefix=_TEMPORARY)
        self.path = Path(path).resolve()
        self._lock = adapter_store.lock_folder(self.path, what, option)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def default_workers(device: str) -> int:
    """One process serves what a CPU generates; a GPU generates tens of thousands of tokens a second."""
    return 1 if device == "cpu" else max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) // 4))


def check_http(address: str, keys: Mapping[str, str]) -> None:
    """Raise what listening at this address would raise now."""
    with closing(_bind(address, keys)) as bound:
        _listen(bound, address)


def _listen(bound: socket.socket, address: str) -> None:
    try:
        bound.listen(2048)
    except OSError:
        raise _in_use(address) from None


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(f"{address} is in use, or not of this machine: choose another with --http HOST:PORT (port 0: any)")


def _bind(address: str, keys: Mapping[str, str]) -> socket.socket:
    """A socket at `HOST:PORT` (port 0: any). Raises `BadAddress`, `AddressInUse` or `InsecureListen`."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadAddress(f"{address!r} is not an address for HTTP: expected HOST:PORT, such as 127.0.0.1:8000")
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError:
        raise BadAddress(f"{host!r} is not an address of this machine") from None
    if not keys and not ipaddress.ip_address(resolved[0]).is_loopback:
        raise InsecureListen(
            f"{address} is reachable from other machines, and no keys are set: "
            "give keys (--key NAME=SECRET), or listen at 127.0.0.1"
        )
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(resolved)
    except OSError as error:
        listening.close()
        if isinstance(error, PermissionError):
            raise BadAddress(f"cannot listen at {address}: {error.strerror}") from None
        raise _in_use(address) from None
    return listening
