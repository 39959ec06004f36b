"""Symbiosis: one frozen base model, many tenants."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from symbiosis.version import VERSION

__version__ = VERSION
__all__ = ["Engine", "Executor", "Sampling", "Studio", "accumulate_gradients", "connect", "connect_blocks", "errors"]

if TYPE_CHECKING:
    from symbiosis import errors
    from symbiosis.app.connect import connect, connect_blocks
    from symbiosis.app.executor import Executor
    from symbiosis.app.micro_batches import accumulate_gradients
    from symbiosis.app.studio import Studio
    from symbiosis.serving.engine import Engine
    from symbiosis.serving.scheduling.sequence import Sampling

# Imported on first use: torch and transformers take seconds to import.
_HOMES = {
    "Engine": "symbiosis.serving.engine",
    "Executor": "symbiosis.app.executor",
    "Sampling": "symbiosis.serving.scheduling.sequence",
    "Studio": "symbiosis.app.studio",
    "accumulate_gradients": "symbiosis.app.micro_batches",
    "connect": "symbiosis.app.connect",
    "connect_blocks": "symbiosis.app.connect",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("symbiosis.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'symbiosis' has no attribute {name!r}")
