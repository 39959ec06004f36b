"""Giving one module another behaviour: its class with a mixin in front."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Make `module` an instance of its own class with `mixin` in front; to everybody else its class looks the same."""
    module.__class__ = _mixed(type(module), mixin)  # type: ignore[arg-type]


@functools.cache
def _mixed(original: Any, mixin: Any) -> Any:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (mixin, original), names)
