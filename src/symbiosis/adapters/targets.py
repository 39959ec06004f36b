"""The modules of a model that a config selects, by PEFT's rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from symbiosis.adapters.safe_regex import MatchBudget, SafePattern
from symbiosis.types import LayerKind

if TYPE_CHECKING:
    from symbiosis.adapters.model_facts import ModelFacts  # imports torch, which HTTP processes do without

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """Modules by name, by a regular expression over their whole path, or all linear ones."""

    names: frozenset[str] = frozenset()
    pattern: SafePattern | None = None
    all_linear: bool = False

    @classmethod
    def from_config(cls, value: tuple[str, ...] | str, where: str, budget: MatchBudget) -> TargetChoice:
        if isinstance(value, str):
            return cls(all_linear=True) if value.lower() == ALL_LINEAR else cls(pattern=SafePattern(value, where, budget))
        return cls(names=frozenset(value))

    def selects(self, path: str) -> bool:
        """Whether the path, or the rest after one of its dots, is one of the names."""
        if self.pattern is not None:
            return self.pattern.matches(path)
        parts = path.split(".")
        return any(".".join(parts[at:]) in self.names for at in range(len(parts)))

    def selects_ending(self, path: str) -> bool:
        """Like `selects`, but by any ending of the path: PEFT's rule for feedforward_modules."""
        return self.pattern.matches(path) if self.pattern is not None else any(path.endswith(name) for name in self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """target_modules and the settings that narrow them down."""

    chosen: TargetChoice
    excluded: TargetChoice | None = None
    layers: frozenset[int] = frozenset()
    """layers_to_transform; empty for all."""
    layers_patterns: tuple[SafePattern, ...] = ()
    saved: tuple[str, ...] = ()
    """modules_to_save: these are replaced, never adapted."""

    def paths(self, model: ModelFacts) -> Iterator[str]:
        """The modules that must have an adapter, in model order."""
        for path, module in model.modules.items():
            linear = module.kind in (LayerKind.LINEAR, LayerKind.CONV1D) and path != model.head
            if (linear if self.chosen.all_linear else self.chosen.selects(path)) and self._is_allowed(path):
                yield path

    def _is_allowed(self, path: str) -> bool:
        is_excluded = self.excluded is not None and self.excluded.selects(path)
        if is_excluded or any(f".{name}." in f".{path}." for name in self.saved):
            return False
        # PEFT checks the layer number only where a name is not a whole path.
        if not self.layers or self.chosen.pattern is not None or path in self.chosen.names:
            return True
        return self._layer_number(path) in self.layers

    def _layer_number(self, path: str) -> int | None:
        """The number of the layer that contains a module: the first number after a list of layers."""
        parts = path.split(".")
        for at, part in enumerate(parts[:-1]):
            if not (part.isascii() and part.isdecimal()):
                continue
            if not self.layers_patterns:
                if at >= 2:
                    return int(part)
            elif at and any(pattern.matches_suffix(".".join(parts[:at])) for pattern in self.layers_patterns):
                return int(part)
        return None


def saved_paths(names: tuple[str, ...], model: ModelFacts) -> dict[str, tuple[str, ...]]:
    """For each name of modules_to_save, the modules with parameters that it covers, directly or by a parent."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        covered = []
        for path in model.modules:
            parts = path.split(".")
            # PEFT takes every path that ends with the name, so "norm" covers every norm.
            if any(".".join(parts[: at + 1]).endswith(name) for at in range(len(parts))):
                covered.append(path)
        found[name] = tuple(covered)
    return found
