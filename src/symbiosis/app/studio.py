"""The public `Studio`: fine-tuning and sampling in one process over one copy of a model, for custom training loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from peft import PeftConfig

from symbiosis.app.session_sampler import SessionSampler
from symbiosis.device_sharing.gpu_partition import create_device_share
from symbiosis.errors import OutOfRange
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.session import TrainingSession
from symbiosis.finetuning.stats import TrainerStats
from symbiosis.finetuning.trainer import Trainer
from symbiosis.models.loading import ModelSource, load_for_hosting, shared_copy
from symbiosis.serving.engine_core import EngineCore

_CPU_TRAINING_SHARE = 0.5


class Studio:
    """Trains adapters of one frozen model in shared passes, and samples from them. A context manager.

    `model` is a transformers model, which the studio owns from then on, a folder, a hub id, or None for the default model.
    Prompts may be text if there is a tokenizer. Raises `CannotTrain` or `CannotServe` with the reason if the model cannot be
    trained in packed passes or sampled from, `UnknownModel` if it is not found, `OutOfRange` or `SymbiosisError` if a
    setting is invalid.
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
        **engine_core: Any,
    ) -> None:
        """`device` and `dtype` are for a model that is loaded here; `engine_core` are settings of `EngineCore`.

        While the engine samples, training gets `training_share` of the time on a CPU (default: half), or of a GPU's
        multiprocessors (default: as many as slow a token down by 1.3).
        """
        if tokenizer is not None and not callable(tokenizer):
            expected = "a tokenizer of transformers, or None"
            raise OutOfRange(f"tokenizer is {tokenizer!r:.80}", field="tokenizer", expected=expected)
        if not isinstance(training, TrainerConfig):
            raise OutOfRange(f"training is {training!r:.80}", field="training", expected="a TrainerConfig")
        shared, self.tokenizer = load_for_hosting(model, tokenizer, device, dtype)
        """The model's own if it was loaded here; None if there is none."""
        if training_share is None and shared.device.type == "cpu":
            training_share = _CPU_TRAINING_SHARE
        trained, device_share = shared_copy(shared), create_device_share(shared.device, training_share)
        self._sampler = SessionSampler(EngineCore(shared, device_share=device_share, **engine_core), self.tokenizer)
        try:
            self._trainer = Trainer(trained, training, device_share, self._sampler)
        except BaseException:
            self._sampler.close()
            raise

    def open(
        self, tenant: str, adapter: PeftConfig | Mapping[str, Any], *, seed: int = 42, weight: float = 1.0
    ) -> TrainingSession:
        """A new session. Its adapter is initialized as by PEFT's `get_peft_model` after `set_seed(seed)`.

        Tenants share passes fairly, by their sessions' `weight`. Raises `BadAdapter`, `UnsupportedAdapter`, `TooLarge`,
        `OutOfRange`, `TooManyRequests` or `Closed`.
        """
        return self._trainer.open(tenant, adapter, seed=seed, weight=weight)

    @property
    def stats(self) -> TrainerStats:
        """Of training."""
        return self._trainer.stats

    def close(self) -> None:
        """Close all sessions. Pending calls fail with `Closed`."""
        self._trainer.close()
        self._sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
