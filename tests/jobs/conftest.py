"""The jobs environment as a fixture."""

from __future__ import annotations

import pytest

from tests.jobs.environment import World


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.db.close()
