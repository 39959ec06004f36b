"""Fine-tuning and sampling in one process, over one copy of a model: for people who write their own loops."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from peft import PeftConfig
from transformers import PreTrainedModel

from symbiosis.app.session_sampler import SessionSampler
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.errors import OutOfRange
from symbiosis.finetuning.config import TrainerConfig, TrainerStats
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.trainer import Trainer
from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import ModelSource, check_no_adapters, load_model_and_tokenizer, shared_copy
from symbiosis.serving.engine_core import EngineCore

_SHARE = 0.5


class Studio:
    """Sessions that train adapters of one frozen model in shared passes, and sample from them. A context manager.

    `model` is a transformers model, which is the studio's from now on, a folder, a hub id, or nothing: the
    default model. Prompts may be text if there is a tokenizer. Raises `CannotTrain` or `CannotServe` with the reason if
    this model cannot be trained in shared passes, or not be sampled from; `UnknownModel` if there is none; `OutOfRange` or
    `SymbiosisError` if a setting is wrong.
    """

    def __init__(
        self,
        model: ModelSource = None,
        tokenizer: Any = None,
        *,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        training: TrainerConfig = TrainerConfig(),  # noqa: B008 - frozen
        training_share: float | None = None,
        **engine: Any,
    ) -> None:
        """`device` and `dtype` are for a model that is loaded here; `engine` are settings of `engine.engine.Core`.

        While prompts are answered, training has `training_share` of the time (half, if it is not given), or of a GPU's
        multiprocessors (if it is not given, as many as let a token take 1.3 times as long).
        """
        if tokenizer is not None and not callable(tokenizer):
            raise OutOfRange(
                f"tokenizer is {tokenizer!r:.80}", field="tokenizer", expected="a tokenizer of transformers, or None"
            )
        if not isinstance(training, TrainerConfig):
            raise OutOfRange(f"training is {training!r:.80}", field="training", expected="a HostConfig")
        if not isinstance(model, PreTrainedModel):
            model, found = load_model_and_tokenizer(model, device=resolve_device(device), dtype=resolve_dtype(dtype))
            tokenizer = tokenizer or found
        shared: PreTrainedModel = model
        check_no_adapters(shared)
        fuse_projections(shared)
        self.tokenizer = tokenizer
        """The model's own if it was loaded here; None if there is none."""
        if training_share is None and shared.device.type == "cpu":
            training_share = _SHARE
        trained, turns = shared_copy(shared), create_device_share(shared.device, training_share)
        self._sampler = SessionSampler(EngineCore(shared, time_share=turns, **engine), tokenizer)
        try:
            self._host = Trainer(trained, training, turns, self._sampler)
        except BaseException:
            self._sampler.close()
            raise

    def open(
        self, tenant: str, adapter: PeftConfig | Mapping[str, Any], *, seed: int = 42, weight: float = 1.0
    ) -> TrainingSession:
        """A new session. Its adapter starts as PEFT's `get_peft_model` after `set_seed(seed)` would.

        Passes are shared fairly by tenants, according to their sessions' `weight`. Raises `BadAdapter`, `UnsupportedAdapter`,
        `TooLarge`, `OutOfRange`, `TooManyRequests` or `Closed`.
        """
        return self._host.open(tenant, adapter, seed=seed, weight=weight)

    @property
    def stats(self) -> TrainerStats:
        """Of training."""
        return self._host.stats

    def close(self) -> None:
        """End all sessions: what waits ends in `Closed`."""
        self._host.close()
        self._sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
