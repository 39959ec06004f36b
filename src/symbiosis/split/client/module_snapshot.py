"""Whether a module is still what the executor computes in its place."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class ModuleSnapshot:
    """A module and its parts as they were when they were put in the place of the executor's."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_Part(part) for part in module.modules()]
        self._modules = [part.module for part in self._parts]
        self._codes: list[_Part] = []
        self._seen: _Seen | None = None

    def holds(self, module: nn.Module) -> bool:
        """Whether all is still so, in one mode, and nobody watches what happens inside. Asked in every call."""
        if self._modules[0] is not module or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        # lists, not generators: they are made in every call
        if self._seen is not None and self._seen.is_untouched() and all([part.is_same_code() for part in self._codes]):
            return True
        if not self.holds_part_by_part():
            return False
        self._codes = list({type(part.module): part for part in self._parts}.values())
        self._seen = _Seen(self._modules)
        return True

    def holds_part_by_part(self) -> bool:
        """The reference of what is seen at one glance, as long as nothing whatsoever was done to the module."""
        module, *inside = self._modules
        if any(is_watched(part) for part in inside):
            return False
        return all(part.is_same(module.training) for part in self._parts)


class _Seen:
    """Modules as they are now, down to every attribute: what is asked of them needs no loop in Python."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules, self._types = modules, [type(module) for module in modules]
        owns = [vars(module) for module in modules]
        self._names, self._values = list(chain.from_iterable(owns)), list(_values(owns))
        self._inside = [own["_modules"] for own in owns]
        self._parts = list(_values(self._inside))
        self._hooks = [hooks for own in owns[1:] for hooks in _hooks_of(own)]

    def is_untouched(self) -> bool:
        """Whether nobody has set an attribute, put in a part or hung a hook on one since."""
        owns = [vars(module) for module in self._modules]
        if list(chain.from_iterable(owns)) != self._names or not all(map(operator.is_, _values(owns), self._values)):
            return False
        if any(self._hooks) or list(map(type, self._modules)) != self._types:
            return False
        return sum(map(len, self._inside)) == len(self._parts) and all(map(operator.is_, _values(self._inside), self._parts))


def _values(dicts: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, dicts))


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
        if module.training is not training or not self.is_same_code():
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

    def is_same_code(self) -> bool:
        if type(self.module).forward is not self._called or vars(self._kind).get("forward") is not self._code:
            return False
        return all(["forward" not in vars(kind) for kind in self._before])


_PLAIN = int | float | str | None


def _is_setting(name: str, value: Any) -> bool:
    return (name[0] != "_" or callable(value)) and name != "training"


def _same(now: Any, before: Any) -> bool:
    """Of a setting: the same number or word. Of anything else that is not called, the same kind of thing."""
    return type(now) is type(before) and not callable(before) and (not isinstance(before, _PLAIN) or now == before)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to know when this module is called, or has put another function in the place of its own."""
    own = vars(module)
    return any(_hooks_of(own)) or "forward" in own


def _hooks_of(own: dict[str, Any]) -> tuple[dict[Any, Any], ...]:
    return own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]
