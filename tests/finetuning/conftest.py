"""Fixtures of sessions."""

from __future__ import annotations

import pytest

from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.trainer import Trainer
from tests.finetuning.trainer_reference import base

STEP = StepSettings(learning_rate=1e-2)


@pytest.fixture
def trainer():
    with Trainer(base(), TrainerConfig(max_rows=32, max_waiting=8, tenant_sessions=3)) as trainer:
        yield trainer


def accumulated_gradients(session):
    """After all calls are resolved."""
    return dict(session.optimizer.gradients)
