"""The models of a zoo for one engine: loaded, with their adapters and the default's tokenizer in folders of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from symbiosis.models.device_dtype import resolve_device, resolve_dtype
from symbiosis.models.loading import load_tokenizer
from symbiosis.planning.memory_check import check_fits, free_memory
from symbiosis.planning.model_size import ModelSize
from symbiosis.planning.quantities import format_bytes
from symbiosis.serving.chains.chain import Chain, weight_bytes
from symbiosis.zoo.served_models import Selection, ServedModel, load_models, select_models, write_files

_DEFAULT_CACHE_TOKENS = 1024 * 16


class ServedZoo:
    """Models that one engine can serve together. A context manager: adapters are read from its folders while it is open.

    `chains` has a name for each model. A name of `adapters` is that of an adapter on one of them. If its base is not among
    the models, that is served, too, under the base's name.
    """

    def __init__(
        self,
        root: str | Path,
        models: Sequence[str] | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        cache_bytes: int | None = None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        """`models`: their names, the default first; None: all, of which the first one added is the default.

        Raises `BadZoo` (also for a block that was changed), `UnknownZooModel`, `NotAdmitted`, or `DoesNotFit` with the number
        of models that fit.
        """
        root, place, kind = Path(root), resolve_device(device), resolve_dtype(dtype)
        self.selection = select_models(root, models)
        self._folder = tempfile.TemporaryDirectory(prefix="symbiosis-zoo-")
        try:
            for manifest in self.selection.manifests:
                (Path(self._folder.name) / manifest.name).mkdir()
                write_files(root, manifest, Path(self._folder.name) / manifest.name)
            self._default_folder = Path(self._folder.name) / self.selection.manifests[0].name
            self._check_memory(root, place, kind, cache_bytes)
            loaded = load_models(root, self.selection, device=place, dtype=kind, progress=progress)
        except BaseException:
            self._folder.cleanup()
            raise
        self.chains: dict[str, Chain] = {}
        """By name, the default first."""
        self.adapters: dict[str, Path] = {}
        """Folders of adapters by name."""
        self.adapter_models: dict[str, str] = {}
        """The models of these adapters."""
        self._name_models(loaded)

    def _name_models(self, loaded: Sequence[ServedModel]) -> None:
        chains = {each.chain: Chain(each.chain, each.model) for each in loaded}
        for each in loaded:
            if not each.has_adapter:
                self.chains[each.name] = chains[each.chain]
        bases = {manifest.name: manifest.provenance.get("base", "") for manifest in self.selection.manifests}
        for each in loaded:
            if each.has_adapter:
                names = [name for name, chain in self.chains.items() if chain.hash == each.chain]
                if not names:
                    names = [_unused_name(bases[each.name] or f"{each.name}-base", {*bases, *self.chains})]
                    self.chains[names[0]] = chains[each.chain]
                self.adapters[each.name] = Path(self._folder.name) / each.name
                self.adapter_models[each.name] = names[0]
        for name, chain in reversed(self.chains.items()):  # of several names the first
            chain.model.name_or_path = chain.model.config._name_or_path = name

    @property
    def default(self) -> str:
        return next(iter(self.chains))

    def tokenizer(self) -> Any:
        """Of the default model; None without one."""
        return load_tokenizer(str(self._default_folder))

    @property
    def bytes_held(self) -> int:
        """Of weights in memory: each block once."""
        return weight_bytes(*self.chains.values())

    def summary(self) -> list[str]:
        """Lines for the one who serves it."""
        selection, copies = self.selection, sum(weight_bytes(chain) for chain in self.chains.values())
        lines = [
            f"{len(self.chains)} models and {len(self.adapters)} adapters in {len(selection.blocks)} blocks: "
            f"{format_bytes(self.bytes_held)} in memory, {format_bytes(copies)} as copies. The default is {self.default}"
        ]
        return lines + [f"{name} is not served: {reason}" for name, reason in selection.refused.items()]

    def _check_memory(self, root: Path, device: torch.device, dtype: torch.dtype | None, cache_bytes: int | None) -> None:
        """Raises `DoesNotFit`."""
        size = ModelSize.of(str(self._default_folder), dtype)
        stored = ModelSize.of(str(self._default_folder)).dtype.itemsize
        scale = size.dtype.itemsize / stored
        cache = _DEFAULT_CACHE_TOKENS * size.kv_cache_token() if cache_bytes is None else cache_bytes
        available = free_memory(device)
        count = _count_fitting(self.selection, scale, available - cache)
        hint = f"{count} of the {len(self.selection.manifests)} models fit, in the order of --models"
        if not count:
            hint = "not one model fits"
        blocks = {f"{len(self.selection.blocks)} blocks": round(self.selection.bytes * scale), "KV cache": cache}
        check_fits(f"the zoo {root}", blocks, device, f"{hint}; serve some with --models NAME,NAME", available)

    def close(self) -> None:
        self._folder.cleanup()

    def __enter__(self) -> ServedZoo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _count_fitting(selection: Selection, scale: float, available: int) -> int:
    """How many of the first models fit."""
    known: set[str] = set()
    used, count = 0.0, 0
    for manifest in selection.manifests:
        for block in manifest.chain:
            if block.object.sha256 not in known:
                known.add(block.object.sha256)
                used += block.object.size * scale
        if used > available:
            break
        count += 1
    return count


def _unused_name(name: str, used: set[str]) -> str:
    while name in used:
        name += "-base"
    return name
