"""`symbiosis serve --zoo`: what it adds to the server of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from symbiosis.app.served_zoo import ServedZoo


def check_zoo_options(model: str | None, shards: int | None) -> None:
    """Raises `SymbiosisError`."""
    if model is not None:
        raise SymbiosisError(f"--zoo serves the models of a zoo: leave out MODEL, which is {model!r:.80}")
    if shards is not None:
        raise SymbiosisError("--zoo needs the models whole, on one device: leave out --shards")


@dataclass(frozen=True, eq=False)
class HostedZoo:
    """The default model for split tenants, and all models for HTTP."""

    zoo: ServedZoo

    @staticmethod
    def open(
        stack: ExitStack,
        folder: Path | None,
        models: Sequence[str] | None,
        device: str,
        dtype: str | None,
        cache_bytes: int | None,
        console: Console,
    ) -> HostedZoo | None:
        """Loaded until the stack ends; None without a zoo. Raises what `ServedZoo` raises."""
        if folder is None:
            return None
        from symbiosis.app.served_zoo import ServedZoo

        with console.status("Loading the zoo") as status:
            return HostedZoo(
                stack.enter_context(
                    ServedZoo(
                        folder,
                        models,
                        device=device,
                        dtype=dtype,
                        cache_bytes=cache_bytes,
                        progress=lambda what, done, total: status.update(f"Loading block {done} of {total}"),
                    )
                )
            )

    @cached_property
    def model(self) -> PreTrainedModel:
        """Modules of its own over the default's tensors: the engine changes those of its chains."""
        from symbiosis.models.loading import shared_copy

        return shared_copy(self.zoo.chains[self.zoo.default].model)

    @cached_property
    def tokenizer(self) -> Any:
        return self.zoo.tokenizer()

    @property
    def options(self) -> dict[str, Any]:
        """Of `Executor.host`."""
        return {"chains": self.zoo.chains, "adapter_models": self.zoo.adapter_models}

    def add_adapters(self, given: Mapping[str, Path]) -> dict[str, Path]:
        """These adapters and those of the zoo. Raises `SymbiosisError` for a name in both."""
        for name in given:
            if name in self.zoo.adapters:
                raise SymbiosisError(f"--adapter {name}: the zoo has an adapter of this name")
        return {**self.zoo.adapters, **given}

    def summary(self) -> list[str]:
        """Lines for the one who serves it."""
        return self.zoo.summary()
