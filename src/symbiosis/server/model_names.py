"""The names of the base model, and what a request's `model` field names."""

from __future__ import annotations


class ModelNames:
    """The base model has its name, its hub id and the last part of each, in any case. An adapter's name is exact."""

    def __init__(self, base: str, hub_id: str | None = None) -> None:
        """`hub_id`: if it differs from `base`."""
        names = [base] if hub_id is None else [base, hub_id]
        self._names = {name.lower() for full in names for name in (full, full.rpartition("/")[2])}

    def is_base(self, model: str) -> bool:
        return model.lower() in self._names

    def parse(self, model: str) -> str | None:
        """The adapter of `name` or `base:name`, empty if it has no name; None: the base model."""
        if self.is_base(model):
            return None
        base, _, adapter = model.rpartition(":")
        return adapter if self.is_base(base) else model
