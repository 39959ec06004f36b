"""Snapshots of modules: whether a module still computes what the executor computes in its place."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class ModuleSnapshot:
    """The state of a module and its parts at assembly: code, children, settings, hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_Part(part) for part in module.modules()]
        self._modules = [part.module for part in self._parts]
        self._codes: list[_Part] = []
        self._fast: _AttributeSnapshot | None = None

    def holds(self, module: nn.Module) -> bool:
        """Whether nothing has changed, all parts are in one mode, and no hook is inside. Runs in every call."""
        if self._modules[0] is not module or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        # lists are faster than generators here
        if self._fast is not None and self._fast.is_untouched() and all([part.is_same_code() for part in self._codes]):
            return True
        if not self.holds_part_by_part():
            return False
        self._codes = list({type(part.module): part for part in self._parts}.values())
        self._fast = _AttributeSnapshot(self._modules)
        return True

    def holds_part_by_part(self) -> bool:
        """The slow check, and the reference of the fast one."""
        module, *inside = self._modules
        if any(is_watched(part) for part in inside):
            return False
        return all(part.is_same(module.training) for part in self._parts)


class _AttributeSnapshot:
    """Every attribute of some modules. The comparison needs no loop in Python."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules, self._types = modules, [type(module) for module in modules]
        owns = [vars(module) for module in modules]
        self._names, self._values = list(chain.from_iterable(owns)), list(_values(owns))
        self._inside = [own["_modules"] for own in owns]
        self._parts = list(_values(self._inside))
        self._hooks = [hooks for own in owns[1:] for hooks in _hooks_of(own)]

    def is_untouched(self) -> bool:
        """Whether no attribute was set, no child added and no hook registered since."""
        owns = [vars(module) for module in self._modules]
        if list(chain.from_iterable(owns)) != self._names or not all(map(operator.is_, _values(owns), self._values)):
            return False
        if any(self._hooks) or list(map(type, self._modules)) != self._types:
            return False
        return sum(map(len, self._inside)) == len(self._parts) and all(map(operator.is_, _values(self._inside), self._parts))


def _values(dicts: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, dicts))


class _Part:
    """One module, and what determines its result besides weights: code, children, settings such as a dropout's."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._children = module, list(module._modules.values())
        # Mixins of this package are skipped: patched code is that of the class behind them.
        kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("symbiosis.")]
        self._kind = next(kind for kind in kinds if "forward" in vars(kind))
        self._before = kinds[: kinds.index(self._kind)]  # these define no forward
        self._code, self._called = vars(self._kind)["forward"], type(module).forward
        self._names = tuple(vars(module))
        self._settings = {name: value for name, value in vars(module).items() if _is_setting(name, value)}

    def is_same(self, training: bool) -> bool:
        module, now = self.module, vars(self.module)
        if module.training is not training or not self.is_same_code():
            return False
        children = module._modules.values()
        if len(children) != len(self._children) or any(map(operator.is_not, children, self._children)):
            return False
        if tuple(now) != self._names:
            new = {name: now[name] for name in now if name not in self._names and _is_setting(name, now[name])}
            if any(isinstance(value, _PLAIN) or callable(value) or hasattr(type(module), name) for name, value in new.items()):
                return False
            self._settings.update(new)  # irrelevant while they stay of this kind
            self._names = tuple(now)
        return all(now.get(name) is value or _same(now.get(name), value) for name, value in self._settings.items())

    def is_same_code(self) -> bool:
        if type(self.module).forward is not self._called or vars(self._kind).get("forward") is not self._code:
            return False
        return all(["forward" not in vars(kind) for kind in self._before])


_PLAIN = int | float | str | None


def _is_setting(name: str, value: Any) -> bool:
    return (name[0] != "_" or callable(value)) and name != "training"


def _same(now: Any, before: Any) -> bool:
    """Whether a setting is equal, or an object that is not called has the same type."""
    return type(now) is type(before) and not callable(before) and (not isinstance(before, _PLAIN) or now == before)


def is_watched(module: nn.Module) -> bool:
    """Whether the module has hooks, or a forward of its own instance."""
    own = vars(module)
    return any(_hooks_of(own)) or "forward" in own


def _hooks_of(own: dict[str, Any]) -> tuple[dict[Any, Any], ...]:
    return own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]
