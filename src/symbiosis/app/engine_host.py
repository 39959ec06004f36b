"""The engine's side of hosted serving: the engine, and hosted training over the same weights, behind one RPC server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from symbiosis.app.planning.job_memory import JobMemory
from symbiosis.app.statistics.source import HostedParts, StatisticsSource
from symbiosis.app.training_service import NoTrainingService, TrainingService
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.distributed.operations import FirstShard
from symbiosis.errors import BadAdapter, CannotTrain, EngineLost, SymbiosisError, UnsupportedAdapter
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.trainer import Trainer
from symbiosis.models import default_model
from symbiosis.models.loading import shared_copy
from symbiosis.server.services.http_counts import HttpCounts
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_service import EngineService
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.transport.engine_ipc import EngineListener

_log = logging.getLogger("symbiosis")


class EngineHost:
    """Serves the operations of engine and training at the listener until closed. A context manager.

    Owns the model, or the first shard of one. `name` is the base model's. `adapters` are folders by name, loaded at the start.
    `training` are the limits of hosted fine-tuning; with None, or a model that cannot be trained, the model is only served.
    `device_share` is shared by everything that computes on this device. `statistics` is the executor's source of statistics;
    None: a new one. `fingerprint` is the model's, for an engine that exchanges blocks with others. `adapter_models` are the
    models of adapters, by name, if there are several. `engine_core` are further options of `EngineCore`.
    """

    def __init__(
        self,
        model: PreTrainedModel | FirstShard,
        name: str,
        listener: EngineListener,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        training: TrainerConfig | None = TrainerConfig(),  # noqa: B008 - frozen
        residency: AdapterCacheConfig | None = None,
        device_share: CpuTimeShare | None = None,
        statistics: StatisticsSource | None = None,
        fingerprint: str | None = None,
        adapter_models: Mapping[str, str] = MappingProxyType({}),
        **engine_core: Any,
    ) -> None:
        """Raises `CannotServe`, `OutOfRange`, or what is wrong with an adapter."""
        self._shard = model if isinstance(model, FirstShard) else None
        whole = model.parallel.model if isinstance(model, FirstShard) else model
        self._service: EngineService | None = None
        self._trainer: Trainer | None = None
        self._hosted: HostedParts | None = None
        self._own_statistics: StatisticsSource | None = None
        self.training: TrainingService | None = None
        """None: see `training_error`."""
        self.training_error: SymbiosisError | None = None
        """Why this engine does not train."""
        try:
            if statistics is None:
                weights = [*whole.parameters(), *whole.buffers()]
                statistics = self._own_statistics = StatisticsSource(name, whole.device, weights)
            self.statistics = statistics
            device_share = device_share or create_device_share(whole.device)
            trainer = _make_trainer(model, training, device_share)
            self._trainer = trainer if isinstance(trainer, Trainer) else None
            self.residency = residency or AdapterCacheConfig()
            self.core = EngineCore(model, residency=self.residency, device_share=device_share, **engine_core)
            if models := list(self.core.chains.models.values())[1:]:
                statistics.count_weights(
                    tensor for each in (whole, *models) for tensor in (*each.parameters(), *each.buffers())
                )
            self.service = self._service = EngineService(self.core, listener, fingerprint)
            for adapter, folder in (adapters or {}).items():
                try:
                    self.add_adapter(adapter, folder, adapter_models.get(adapter))
                except (BadAdapter, UnsupportedAdapter) as error:
                    raise type(error)(f"the adapter {adapter} in {folder}: {error}") from None
            if isinstance(trainer, Trainer):
                self.training = TrainingService(self.service, self.core, trainer, JobMemory(whole))
            else:
                self.training_error = trainer
                NoTrainingService(self.service.rpc, trainer)
        except BaseException:
            self.close()
            raise

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self.core.scheduler.max_model_len

    @property
    def max_training_len(self) -> int | None:
        """Most tokens of a training example; None without training."""
        return None if self._trainer is None else self._trainer.longest

    def add_adapter(self, name: str, folder: str | Path, model: str | None = None) -> None:
        """Serve the adapter of this folder from the next step on. Raises what is wrong with it."""
        self.service.engine_loop.serve(name, self.core.prepare(folder, model)).result()

    def attach_statistics(self, counts: HttpCounts, *, has_keys: bool) -> None:
        """Include this engine in the statistics, with what HTTP processes have counted. `has_keys`: requests need a key."""
        self._hosted = HostedParts(
            core=self.core,
            engine_loop=self.service.engine_loop,
            counts=counts,
            training=self.training,
            has_keys=has_keys,
        )
        self.statistics.attach(self._hosted)

    def check(self) -> None:
        """Raises `EngineLost` if a shard has ended, or a loop of this process has failed."""
        if self._shard is not None and self._shard.leader.is_lost:
            raise EngineLost("a shard has ended: see the log above")
        if not self.service.is_alive():
            raise EngineLost("the engine's loop has failed: see the log above")
        if self._trainer is not None and not self._trainer.is_alive():
            raise EngineLost("hosted training has failed on the device: start again, and jobs resume from their checkpoints")

    def close(self) -> None:
        """End all operations with a last event each, then stop everything."""
        if self._hosted is not None:
            self.statistics.detach(self._hosted)
        rpc = None if self._service is None else self._service.rpc
        for part in (self._own_statistics, rpc, self._trainer):
            if part is not None:
                part.close()
        if self._shard is not None:
            self._shard.leader.stop()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def name_model(model: PreTrainedModel, source: str) -> tuple[str, str | None]:
    """Name the model after its source: a folder, a hub id or the default model's name. Adapters and messages never show a path.

    Returns the base model's name, and its hub id if that differs.
    """
    base = Path(source).name if Path(source).is_dir() else source
    hub_id = default_model.HUB_ID if base == default_model.NAME else None
    model.name_or_path = model.config._name_or_path = hub_id or base
    return base, hub_id


def default_sampling(model: PreTrainedModel, base: str, temperature: float | None = None) -> dict[str, float]:
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
