"""Plain and connected models for the tests of deferral."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.parity.pair import connected, twin
from tests.split.client.deferred.pairs import LLAMA, with_lora


@pytest.fixture
def both() -> Iterator[tuple[Any, Any]]:
    """A plain and a connected model with the same LoRA adapter, for training."""
    plain = LLAMA.model()
    with connected(plain, "inproc") as model:
        yield with_lora(twin(plain)), with_lora(model)


@pytest.fixture
def decoding() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A plain and a connected model, without gradients."""
    plain = LLAMA.model()
    with connected(plain, "inproc") as model, torch.no_grad():
        yield plain, model
