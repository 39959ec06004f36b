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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from symbiosis.adapters.names import qualify_name
from symbiosis.app.http_processes import HttpProcesses
from symbiosis.app.planning.job_memory import JobMemory
from symbiosis.app.rate_limit_service import RateLimitService
from symbiosis.app.statistics.http_counts import HttpCounts
from symbiosis.app.statistics.source import HostedParts, StatisticsSource
from symbiosis.app.training_service import NoTrainingService, TrainingService
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import (
    AddressInUse,
    BadAdapter,
    BadAddress,
    CannotTrain,
    EngineLost,
    InsecureListen,
    SymbiosisError,
    UnsupportedAdapter,
)
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.trainer import Trainer
from symbiosis.jobs.queue import JobLimits
from symbiosis.models import default_model
from symbiosis.models.loading import shared_copy
from symbiosis.server import adapter_store
from symbiosis.server.model_names import ModelNames
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.settings import Settings
from symbiosis.serving.engine_core import EngineCore
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
        self._shard = shard = model if isinstance(model, FirstShard) else None
        if isinstance(model, FirstShard):
            model = model.parallel.model
        base = Path(name).name if Path(name).is_dir() else name
        hub_id = default_model.HUB_ID if base == default_model.NAME else None
        model.name_or_path = model.config._name_or_path = hub_id or base  # adapters and messages never show the local path
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
                default_sampling=_default_sampling(model, base, temperature),
            )
            count = _default_workers(model.device.type) if workers is None else workers
            # Their imports take seconds: they run while the engine loads.
            self._processes = HttpProcesses(self._socket, count, runtime_folder())
            undo.pop_all()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._engine: EngineService | None = None
        self._trainer: Trainer | None = None
        self._own_statistics: StatisticsSource | None = None
        self._hosted: HostedParts | None = None
        if statistics is None:
            weights = [*model.parameters(), *model.buffers()]
            statistics = self._own_statistics = StatisticsSource(base, model.device, weights)
        self._statistics = statistics
        try:
            device_share = device_share or create_device_share(model.device)
            trainer = _make_trainer(model if shard is None else shard, training, device_share)
            self._trainer = trainer if isinstance(trainer, Trainer) else None
            hosted = model if shard is None else shard
            core = EngineCore(hosted, residency=residency or AdapterCacheConfig(), device_share=device_share, **engine_core)
            _load_adapters(core, adapters, self._uploads.path, names)
            self._engine = EngineService(core, EngineListener(runtime_folder()))
            RateLimitService(self._engine.rpc, settings.request_limits)
            values = {**asdict(settings), "max_model_len": core.scheduler.max_model_len}
            service = None
            if isinstance(trainer, Trainer):
                service = TrainingService(self._engine, core, trainer, JobMemory(model))
                values["max_training_len"] = trainer.longest
            else:
                NoTrainingService(self._engine.rpc, trainer)
                values["training_error"] = str(trainer)
            self._hosted = HostedParts(
                core=core,
                engine_loop=self._engine.engine_loop,
                counts=HttpCounts(self._engine.rpc, statistics.collect),
                training=service,
                has_keys=bool(keys or admin_key),
            )
            statistics.attach(self._hosted)
            folder = None if tokenizer is None else str(tokenizer)
            _listen(self._socket, address)  # not before: a connection would wait for the engine
            self._processes.configure({"engine": self._engine.address.to_json(), "tokenizer": folder, "settings": values})
            self._wait_until_connected(self._engine)
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
        if self._shard is not None and self._shard.leader.is_lost:
            raise EngineLost("a shard has ended: see the log above")
        if not self._engine.is_alive():
            raise EngineLost("the engine's loop has failed: see the log above")
        if self._trainer is not None and not self._trainer.is_alive():
            raise EngineLost("hosted training has failed on the device: start again, and jobs resume from their checkpoints")
        self._processes.check()

    def close(self) -> None:
        """Stop accepting requests, let running ones finish for half a minute, then stop everything."""
        self._processes.stop()
        if self._hosted is not None:
            self._statistics.detach(self._hosted)
        rpc = None if self._engine is None else self._engine.rpc
        for part in (self._own_statistics, rpc, self._trainer, self._uploads, self._jobs, self._socket):
            if part is not None:
                part.close()
        if self._shard is not None:
            self._shard.leader.stop()

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


def _make_trainer(
    model: PreTrainedModel | FirstShard, config: TrainerConfig | None, device_share: CpuTimeShare
) -> Trainer | SymbiosisError:
    """Hosted training over the model's weights, in its own modules; or the reason why there is none."""
    if config is None:
        return CannotTrain("this server does not train")
    try:
        if isinstance(model, FirstShard):
            return Trainer(replace(model, parallel=model.parallel.copy()), config, device_share)
        return Trainer(shared_copy(model), config, device_share)
    except CannotTrain as error:
        _log.warning("hosted training is off: %s", error)
        return error
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything; it is still served
        _log.warning("hosted training is off", exc_info=error)
        return CannotTrain(f"the model cannot be trained here: {type(error).__name__}")


def _load_adapters(core: EngineCore, adapters: Mapping[str, str | Path], uploads: Path, names: ModelNames) -> None:
    """Stored uploads that do not fit this model are skipped with a warning; any other failure raises."""
    for name, folder in adapters.items():
        try:
            core.add_adapter(name, folder)
        except (BadAdapter, UnsupportedAdapter) as error:
            raise type(error)(f"the adapter {name} in {folder}: {error}") from None
    for stored in adapter_store.list_stored(uploads):
        try:
            if names.is_base(stored.name):
                raise BadAdapter("it has a name of the base model")
            core.add_adapter(qualify_name(stored.owner, stored.name), stored.folder)
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


def _default_sampling(model: PreTrainedModel, base: str, temperature: float | None) -> dict[str, float]:
    """Of requests that name no sampling parameters."""
    if temperature is None and base == default_model.NAME:
        temperature = 0.0  # sampled at 1, a model of this size writes nonsense that does not end
    if temperature is not None:
        if not 0 <= temperature <= 2:
            raise SymbiosisError(f"--temperature {temperature:g}: expected 0 to 2")
        return {"temperature": temperature}
    config = getattr(model, "generation_config", None)
    given = config.to_diff_dict() if config is not None and config.do_sample else {}
    return {name: float(given[name]) for name in ("temperature", "top_p", "min_p") if name in given}


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
