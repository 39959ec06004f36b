"""Models that one engine serves together: chains of blocks, some of which they share.

Models of one architecture share a block if its tensors are the same memory in both. So the engine needs no names of blocks:
who loads the models gives equal blocks one memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedModel

from symbiosis.adapters.parts import Adapter
from symbiosis.errors import UnknownAdapter
from symbiosis.serving.lora.adapter_registry import AdapterRegistry

StateKey: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One model. `hash` covers all its blocks and its config: equal hashes are equal models."""

    hash: str
    model: PreTrainedModel

    @property
    def eos_ids(self) -> tuple[int, ...]:
        eos = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)


class ServedChains:
    """The chains of an engine, by the names of their models: two names may have one chain. A single model has no name."""

    def __init__(self, model: PreTrainedModel, chains: Mapping[str, Chain]) -> None:
        """The first chain is the default. Without any, `model` is the only one."""
        self.by_name = dict(chains)
        self.default = next(iter(chains.values()), Chain("", model))
        by_hash = {self.default.hash: self.default} | {chain.hash: chain for chain in chains.values()}
        self.ordered: Sequence[Chain] = sort_chains(list(by_hash.values()))
        """So that those which share their first blocks are neighbours."""
        self.models = {hash: chain.model for hash, chain in by_hash.items()}
        self.eos_ids = {hash: chain.eos_ids for hash, chain in by_hash.items()}
        self._bytes = {chain.hash: weight_bytes(chain) for chain in chains.values()}
        self._counts = {hash: [0, 0] for hash in by_hash}

    @property
    def order(self) -> dict[str, int]:
        """Place of each chain's rows in a batch, by hash; empty with a single model."""
        return {chain.hash: place for place, chain in enumerate(self.ordered)} if self.by_name else {}

    def hash_of(self, name: str | None) -> str:
        """None: of the default. Raises `UnknownAdapter`, as for any name that nothing has."""
        if name is None:
            return self.default.hash
        if name not in self.by_name:
            known = f"expected one of {', '.join(self.by_name)}" if self.by_name else "this engine serves one, without a name"
            raise UnknownAdapter(f"there is no model {name!r:.80}: {known}")
        return self.by_name[name].hash

    def find_base(self, adapter: Adapter) -> str:
        """The hash of the chain that an adapter was made for: that of the name in its config, or the default."""
        named = {name.lower(): chain.hash for name, chain in self.by_name.items()}
        return named.get(adapter.base_model, self.default.hash)

    def name_adapters(self, registry: AdapterRegistry) -> dict[str, str]:
        """The model of each adapter's name; empty with a single model."""
        names = {chain.hash: name for name, chain in reversed(self.by_name.items())}
        chains = {name: registry.get(version.hash) for name, version in registry.versions.items()} if names else {}
        return {name: names[record.chain] for name, record in chains.items() if record is not None}

    def count_request(self, hash: str, completions: int) -> None:
        self._counts[hash][0] += completions

    def count_tokens(self, hashes: Iterable[str]) -> None:
        """One sampled token of each of these chains."""
        for hash in hashes:
            self._counts[hash][1] += 1

    def stats(self) -> dict[str, dict[str, Any]]:
        """By name: hash, bytes as a copy of its own, completions, sampled tokens. The last two count once."""
        found: dict[str, dict[str, Any]] = {}
        counted: set[str] = set()
        for name, chain in self.by_name.items():
            completions, tokens = (0, 0) if chain.hash in counted else self._counts[chain.hash]
            counted.add(chain.hash)
            found[name] = {"hash": chain.hash, "bytes": self._bytes[chain.hash], "requests": completions, "tokens": tokens}
        return found


def weight_bytes(*chains: Chain) -> int:
    """Of the weights of these chains, each tensor once."""
    tensors = [tensor for chain in chains for tensor in (*chain.model.parameters(), *chain.model.buffers())]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_key(module: nn.Module) -> StateKey:
    """Where the tensors of a module are: equal for modules of two chains that share all of them."""
    tensors: Mapping[str, Tensor] = module.state_dict(keep_vars=True)
    return tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors.values())


def sort_chains(chains: Sequence[Chain]) -> list[Chain]:
    """In the order of their blocks, compared from the first on: those that share them are neighbours, at every depth."""
    numbers: dict[Any, int] = {}
    keys = [[numbers.setdefault(each, len(numbers)) for each in state_key(chain.model)] for chain in chains]
    return [chains[index] for index in sorted(range(len(chains)), key=lambda index: keys[index])]
