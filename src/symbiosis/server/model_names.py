"""The names of the base model or of several models, and what a request's `model` field names."""

from __future__ import annotations

from collections.abc import Collection


class ModelNames:
    """The base model has its name, its hub id and the last part of each, in any case. Other names are exact."""

    def __init__(self, base: str, hub_id: str | None = None, models: Collection[str] = ()) -> None:
        """`hub_id`: if it differs from `base`. `models`: if there are several, all of them; `base` is the default."""
        self._base, self._models = base, frozenset(models)
        names = [base] if hub_id is None else [base, hub_id]
        self._names = {name.lower() for full in names for name in (full, full.rpartition("/")[2])}

    def is_base(self, model: str) -> bool:
        return model == self._base or (model not in self._models and model.lower() in self._names)

    def is_model(self, name: str) -> bool:
        """Whether an adapter of this name would be taken for a model."""
        return name in self._models or self.is_base(name)

    def parse(self, model: str) -> str | None:
        """The adapter or other model of `name`, or the adapter of `base:name`, empty without a name; None: the base model."""
        if self.is_base(model):
            return None
        base, _, adapter = model.rpartition(":")
        return adapter if self.is_base(base) else model
