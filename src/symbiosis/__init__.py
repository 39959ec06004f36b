"""Symbiosis: one frozen base model, many tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "Executor", "Sampling", "Studio", "connect", "errors"]

if TYPE_CHECKING:
    from symbiosis import errors
    from symbiosis.app.connect import connect
    from symbiosis.app.executor import Executor
    from symbiosis.app.studio import Studio
    from symbiosis.serving.engine import Engine
    from symbiosis.serving.scheduling.sequence import Sampling


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only when somebody needs them
    if name == "Executor":
        from symbiosis.app.executor import Executor

        return Executor
    if name == "connect":
        from symbiosis.app.connect import connect

        return connect
    if name == "Engine":
        from symbiosis.serving.engine import Engine

        return Engine
    if name == "Sampling":
        from symbiosis.serving.scheduling.sequence import Sampling

        return Sampling
    if name == "Studio":
        from symbiosis.app.studio import Studio

        return Studio
    if name == "errors":
        import importlib

        return importlib.import_module("symbiosis.errors")
    raise AttributeError(f"module 'symbiosis' has no attribute {name!r}")
