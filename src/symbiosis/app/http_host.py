"""Hosted serving: the engine in this process, HTTP in a child process, IPC between the two."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from symbiosis.adapters.names import qualify_name
from symbiosis.app.engine_host import EngineHost, default_sampling, name_model
from symbiosis.app.front_door import FrontDoor, default_workers
from symbiosis.app.statistics.source import StatisticsSource
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import (
    BadAdapter,
    EngineLost,
    SymbiosisError,
)
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.jobs.queue import JobLimits
from symbiosis.server import adapter_store
from symbiosis.server.model_names import ModelNames
from symbiosis.server.rate_limits import RequestLimits
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.server.services.rate_limit_service import RateLimitService
from symbiosis.serving.chains.chain import Chain
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
    config, else 1; the small default model is greedy). `close` serves for `shutdown_delay_s` as before, without being ready.
    `training` are the limits of hosted fine-tuning; with None, or a model that cannot be trained, the model is only served.
    `device_share` is shared by everything that computes on this device. `statistics` is the executor's source of statistics;
    None: a new one. `chains` are several models by name, the first one instead of `model`. `engine_core` are further options of
    `EngineHost`.
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
        shutdown_delay_s: float = 0.0,
        temperature: float | None = None,
        training: TrainerConfig | None = TrainerConfig(),  # noqa: B008 - frozen
        device_share: CpuTimeShare | None = None,
        statistics: StatisticsSource | None = None,
        chains: Mapping[str, Chain] = MappingProxyType({}),
        **engine_core: Any,
    ) -> None:
        keys, adapters = dict(keys or {}), dict(adapters or {})
        whole = model.parallel.model if isinstance(model, FirstShard) else model
        base, hub_id = name_model(whole, name)
        if chains and base != next(iter(chains)):
            raise SymbiosisError(f"the default of several models is named {next(iter(chains))!r}, not {base!r}")
        names = ModelNames(base, hub_id, chains)
        _check_names(names, adapters)
        self._door = FrontDoor(
            address,
            workers=default_workers(whole.device.type) if workers is None else workers,
            keys=keys,
            admin_key=admin_key,
            adapter_root=adapter_root,
            uploads=uploads,
            jobs=jobs,
            job_limits=job_limits,
            store_limits=store_limits,
            requests=requests,
            patience_s=patience_s,
            cors_origins=cors_origins,
            shutdown_delay_s=shutdown_delay_s,
        )
        self.url = self._door.url
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
                chains=chains,
                **engine_core,
            )
            _load_uploads(engine, self._door.uploads, names)
            rpc = engine.service.rpc
            RateLimitService(rpc, self._door.settings.request_limits)
            engine.attach_statistics(HttpCounts(rpc, engine.statistics.collect), has_keys=self._door.has_keys)
            self._door.configure(
                {"engine": engine.service.address.to_json()},
                None if tokenizer is None else str(tokenizer),
                base=base,
                hub_id=hub_id,
                models=tuple(chains),
                default_sampling=default_sampling(whole, base, temperature),
                max_model_len=engine.max_model_len,
                max_training_len=engine.max_training_len,
                training_error=None if engine.training_error is None else str(engine.training_error),
            )
            self._wait_until_connected(engine.service)
        except BaseException:
            self.close()
            raise

    def _wait_until_connected(self, engine: EngineService) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while engine.rpc.num_joined < len(self._door.processes):
            time.sleep(0.05)
            if not self._door.processes.are_alive() or time.monotonic() > deadline:
                raise EngineLost("an HTTP process did not start: see the log above")

    def check(self) -> None:
        """Restart an HTTP process that died. Raises `EngineLost` if it keeps dying, or a loop of this process has failed."""
        assert self._engine is not None
        self._engine.check()
        self._door.processes.check()

    def close(self) -> None:
        """Stop accepting requests, let running ones finish for half a minute, then stop everything."""
        self._door.processes.stop()
        if self._engine is not None:
            self._engine.close()
        self._door.close()

    def __enter__(self) -> HttpHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_uploads(engine: EngineHost, uploads: Path, names: ModelNames) -> None:
    """Stored uploads that do not fit this model are skipped with a warning."""
    for stored in adapter_store.list_stored(uploads):
        try:
            if names.is_model(stored.name):
                raise BadAdapter("it has a name of a model")
            engine.add_adapter(qualify_name(stored.owner, stored.name), stored.location)
        except SymbiosisError as error:
            _log.warning("the adapter %s in %s is not served: %s", stored.name, stored.location, error)


def _check_names(names: ModelNames, adapters: Mapping[str, Any]) -> None:
    for name in adapters:
        if names.is_model(name):
            what = "the base model" if names.is_base(name) else "a model"
            raise SymbiosisError(f"an adapter is named {name!r}, like {what}: choose another name")
        if not re.fullmatch(_ADAPTER_NAME, name):
            raise SymbiosisError(f"an adapter is named {name!r}: expected letters, digits, dots, dashes and underscores")
