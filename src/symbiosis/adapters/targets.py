"""Which modules of a model a config means, by the rules PEFT chooses them with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.safe_regex import MatchBudget, SafePattern
from symbiosis.types import LayerKind

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """Modules by name, by a regular expression over their whole path, or all linear ones."""

    names: frozenset[str] = frozenset()
    pattern: SafePattern | None = None
    all_linear: bool = False

    @classmethod
    def of(cls, said: tuple[str, ...] | str, where: str, effort: MatchBudget) -> TargetChoice:
        if isinstance(said, str):
            return cls(all_linear=True) if said.lower() == ALL_LINEAR else cls(pattern=SafePattern(said, where, effort))
        return cls(names=frozenset(said))

    def has(self, path: str) -> bool:
        """Whether the path, or what follows one of its dots, is one of the names."""
        if self.pattern is not None:
            return self.pattern.matches(path)
        parts = path.split(".")
        return any(".".join(parts[at:]) in self.names for at in range(len(parts)))

    def ends(self, path: str) -> bool:
        """As `has`, but a name counts wherever the path ends with it: PEFT's rule for feedforward_modules."""
        return self.pattern.matches(path) if self.pattern is not None else any(path.endswith(name) for name in self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """target_modules and everything that narrows them down."""

    chosen: TargetChoice
    excluded: TargetChoice | None = None
    layers: frozenset[int] = frozenset()
    """layers_to_transform; empty for all."""
    layers_patterns: tuple[SafePattern, ...] = ()
    saved: tuple[str, ...] = ()
    """modules_to_save: these are replaced, never adapted."""

    def paths(self, model: ModelFacts) -> Iterator[str]:
        """The modules that must have an adapter, in the order of the model."""
        for path, module in model.modules.items():
            linear = module.kind in (LayerKind.LINEAR, LayerKind.CONV1D) and path != model.head
            if (linear if self.chosen.all_linear else self.chosen.has(path)) and self._allowed(path):
                yield path

    def _allowed(self, path: str) -> bool:
        if (self.excluded is not None and self.excluded.has(path)) or any(f".{name}." in f".{path}." for name in self.saved):
            return False
        # PEFT asks for the layer's number only where a name was not a whole path
        if not self.layers or self.chosen.pattern is not None or path in self.chosen.names:
            return True
        return self._layer(path) in self.layers

    def _layer(self, path: str) -> int | None:
        """The number of the layer a module is in: the first number that follows a list of layers."""
        parts = path.split(".")
        for at, part in enumerate(parts[:-1]):
            if not (part.isascii() and part.isdecimal()):
                continue
            if not self.layers_patterns:
                if at >= 2:
                    return int(part)
            elif at and any(pattern.ends(".".join(parts[:at])) for pattern in self.layers_patterns):
                return int(part)
        return None


def saved_paths(names: tuple[str, ...], model: ModelFacts) -> dict[str, tuple[str, ...]]:
    """For each name of modules_to_save, the modules with parameters it covers: themselves or within what it names."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        covered = []
        for path in model.modules:
            parts = path.split(".")
            # PEFT takes whatever ends with the name, so "norm" is every norm
            if any(".".join(parts[: at + 1]).endswith(name) for at in range(len(parts))):
                covered.append(path)
        found[name] = tuple(covered)
    return found
