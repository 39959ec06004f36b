"""Hosted serving: the engine in this process, HTTP in a child process, IPC between the two."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from symbiosis.adapters.names import qualify_name
from symbiosis.app.engine_host import EngineHost, default_sampling, name_model
from symbiosis.app.http_processes import HttpProcesses
from symbiosis.app.statistics.source import StatisticsSource
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import (
    AddressInUse,
    BadAdapter,
    BadAddress,
    EngineLost,
    InsecureListen,
    SymbiosisError,
)
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.jobs.queue import JobLimits
from symbiosis.server import adapter_store
from symbiosis.server.model_names import ModelNames
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.server.services.rate_limit_service import RateLimitService
from symbiosis.server.settings import Settings
from symbiosis.serving.engine_service import EngineService
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.transport.engine_ipc import EngineListener
from symbiosis.transport.shm import runtime_folder

_START_TIMEOUT_S = 120.0
_MAX_WORKERS = 4
_TEMPORARY = "symbiosis-uploads-"
_ADAPTER_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_log = logging.getLogger("symbiosis")


class HttpHost:
    """Serves OpenAI's API at `url` until closed. Owns the model, or the first shard of one. A context manager.

    `keys` are secrets by tenant; without any, only this machine can connect. `adapters` are folders by name, loaded at the
    start; `adapter_root` is the folder that the admin may load more from. Uploaded adapters are stored in `uploads` and
    fine-tuning jobs in `jobs` (default: `uploads` with the suffix -jobs); a later server with these folders continues with
    them. Without `uploads` both are removed at `close`. `workers` is the number of processes that serve completions (default:
    one with a CPU, up to four with a GPU). `patience_s` is the time for a client to send a request's head. Web pages of
    `cors_origins` may send requests. `temperature` is for requests that name none (default: that of the model's generation
    config, else 1; the small default model is greedy).
    `training` are the limits of hosted fine-tuning; with None, or a model that cannot be trained, the model is only served.
    `device_share` is shared by everything that computes on this device. `statistics` is the executor's source of statistics;
    None: a new one. `engine_core` are further options of `EngineCore`.
    """

    def __init__(
        self,
        model: PreTrainedModel | FirstShard,
        name: str,
        tokenizer: Path | None,
        address: str,
        *,
        keys: Mapping[str, str] | None = None,
        admin_key: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapter_root: str | Path | None = None,
        uploads: str | Path | None = None,
        jobs: str | Path | None = None,
        job_limits: JobLimits | None = None,
        store_limits: adapter_store.StoreLimits | None = None,
        requests: RequestLimits | None = None,
        residency: AdapterCacheConfig | None = None,
        workers: int | None = None,
        patience_s: float = 20.0,
        cors_origins: Collection[str] = (),
        temperature: float | None = None,
        training: TrainerConfig | None = TrainerConfig(),  # noqa: B008 - frozen
        device_share: CpuTimeShare | None = None,
        statistics: StatisticsSource | None = None,
        **engine_core: Any,
    ) -> None:
        keys, adapters = dict(keys or {}), dict(adapters or {})
        whole = model.parallel.model if isinstance(model, FirstShard) else model
        base, hub_id = name_model(whole, name)
        names = ModelNames(base, hub_id)
        _check_names(names, adapters)
        if adapter_root is not None and not Path(adapter_root).is_dir():
            raise SymbiosisError(f"there is no folder {adapter_root}: --adapter-root must be a folder of adapters")
        with ExitStack() as undo:
            self._socket = undo.enter_context(closing(_bind(address, keys)))
            self._uploads = undo.enter_context(closing(_LockedFolder(uploads, "adapters", "--uploads")))
            adapter_store.remove_incomplete(self._uploads.path)
            if jobs is not None and Path(jobs).resolve() == self._uploads.path:
                raise SymbiosisError(f"--uploads and --jobs are both {jobs}: give each a folder of its own")
            if jobs is None and uploads is not None:
                jobs = Path(uploads).with_name(f"{Path(uploads).resolve().name}-jobs")
            self._jobs = undo.enter_context(closing(_LockedFolder(jobs, "fine-tuning jobs", "--jobs")))
            host, port = self._socket.getsockname()[:2]
            settings = Settings(
                base=base,
                hub_id=hub_id,
                keys=keys,
                admin_key=admin_key,
                adapter_root=None if adapter_root is None else str(Path(adapter_root).resolve()),
                uploads=str(self._uploads.path),
                jobs=str(self._jobs.path),
                job_limits=job_limits or JobLimits(),
                store_limits=store_limits or adapter_store.StoreLimits(),
                request_limits=requests or RequestLimits(),
                client_timeout_s=patience_s,
                allowed_hosts=None if keys else tuple({"127.0.0.1", "localhost", "[::1]", host}),
                cors_origins=tuple(cors_origins),
                default_sampling=default_sampling(whole, base, temperature),
            )
            count = _default_workers(whole.device.type) if workers is None else workers
            # Their imports take seconds: they run while the engine loads.
            self._processes = HttpProcesses(self._socket, count, runtime_folder())
            undo.pop_all()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._engine: EngineHost | None = None
        try:
            engine = self._engine = EngineHost(
                model,
                base,
                EngineListener(runtime_folder()),
                adapters=adapters,
                training=training,
                residency=residency,
                device_share=device_share,
                statistics=statistics,
                **engine_core,
            )
            _load_uploads(engine, self._uploads.path, names)
            rpc = engine.service.rpc
            RateLimitService(rpc, settings.request_limits)
            engine.attach_statistics(HttpCounts(rpc, engine.statistics.collect), has_keys=bool(keys or admin_key))
            values = {
                **asdict(settings),
                "max_model_len": engine.max_model_len,
                "max_training_len": engine.max_training_len,
                "training_error": None if engine.training_error is None else str(engine.training_error),
            }
            folder = None if tokenizer is None else str(tokenizer)
            _listen(self._socket, address)  # not before: a connection would wait for the engine
            self._processes.configure({"engine": engine.service.address.to_json(), "tokenizer": folder, "settings": values})
            self._wait_until_connected(engine.service)
        except BaseException:
            self.close()
            raise

    def _wait_until_connected(self, engine: EngineService) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while engine.rpc.num_joined < len(self._processes):
            time.sleep(0.05)
            if not self._processes.are_alive() or time.monotonic() > deadline:
                raise EngineLost("an HTTP process did not start: see the log above")

    def check(self) -> None:
        """Restart an HTTP process that died. Raises `EngineLost` if it keeps dying, or a loop of this process has failed."""
        assert self._engine is not None
        self._engine.check()
        self._processes.check()

    def close(self) -> None:
        """Stop accepting requests, let running ones finish for half a minute, then stop everything."""
        self._processes.stop()
        for part in (self._engine, self._uploads, self._jobs, self._socket):
            if part is not None:
                part.close()

    def __enter__(self) -> HttpHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _default_workers(device: str) -> int:
    """One process serves what a CPU generates; a GPU generates tens of thousands of tokens a second."""
    return 1 if device == "cpu" else max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) // 4))


def _load_uploads(engine: EngineHost, uploads: Path, names: ModelNames) -> None:
    """Stored uploads that do not fit this model are skipped with a warning."""
    for stored in adapter_store.list_stored(uploads):
        try:
            if names.is_base(stored.name):
                raise BadAdapter("it has a name of the base model")
            engine.add_adapter(qualify_name(stored.owner, stored.name), stored.folder)
        except SymbiosisError as error:
            _log.warning("the adapter %s in %s is not served: %s", stored.name, stored.folder, error)


def _check_names(names: ModelNames, adapters: Mapping[str, Any]) -> None:
    for name in adapters:
        if names.is_base(name):
            raise SymbiosisError(f"an adapter is named {name!r}, like the base model: choose another name")
        if not re.fullmatch(_ADAPTER_NAME, name):
            raise SymbiosisError(f"an adapter is named {name!r}: expected letters, digits, dots, dashes and underscores")


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
