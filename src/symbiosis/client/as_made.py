"""Whether a module is still what the executor computes in its place."""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class AsMade:
    """A module and its parts as they were when they were put in the place of the executor's."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_Part(part) for part in module.modules()]

    def holds(self, module: nn.Module) -> bool:
        """Whether all is still so, in one mode, and nobody watches what happens inside. Asked in every call."""
        if self._parts[0].module is not module or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        training = module.training
        return all(part.is_same(training) and (part.module is module or not is_watched(part.module)) for part in self._parts)


class _Part:
    """One module, and what decides what it computes besides weights: its code, its parts, and settings such as a dropout's."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._children = module, list(module._modules.values())
        # What is mixed in here (`mixing`) is ours: whoever changes code changes that of the class behind it.
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.rpartition(".")[0] != __package__]
        self._kind = next(kind for kind in kinds if "forward" in vars(kind))
        self._before = kinds[: kinds.index(self._kind)]  # these have none of their own
        self._code, self._called = vars(self._kind)["forward"], type(module).forward
        self._names = tuple(vars(module))
        self._settings = {name: value for name, value in vars(module).items() if _is_setting(name, value)}

    def is_same(self, training: bool) -> bool:
        module, now = self.module, vars(self.module)
        if module.training is not training or type(module).forward is not self._called:
            return False
        if vars(self._kind).get("forward") is not self._code or any("forward" in vars(kind) for kind in self._before):
            return False
        children = module._modules.values()
        if len(children) != len(self._children) or any(map(operator.is_not, children, self._children)):
            return False
        if tuple(now) != self._names:
            new = {name: now[name] for name in now if name not in self._names and _is_setting(name, now[name])}
            if any(isinstance(value, _PLAIN) or callable(value) or hasattr(type(module), name) for name, value in new.items()):
                return False
            self._settings.update(new)  # of no account, as long as they stay so
            self._names = tuple(now)
        return all(now.get(name) is value or _same(now.get(name), value) for name, value in self._settings.items())


_PLAIN = int | float | str | None


def _is_setting(name: str, value: Any) -> bool:
    return (name[0] != "_" or callable(value)) and name != "training"


def _same(now: Any, before: Any) -> bool:
    """Of a setting: the same number or word. Of anything else that is not called, the same kind of thing."""
    return type(now) is type(before) and not callable(before) and (not isinstance(before, _PLAIN) or now == before)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to know when this module is called, or has put another function in the place of its own."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)
