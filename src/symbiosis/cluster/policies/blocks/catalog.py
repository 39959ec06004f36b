"""What is served: blocks with their costs, and applications with the chains that may serve them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from symbiosis.cluster.policies.blocks.block_cost import BlockCost


@dataclass(frozen=True, slots=True)
class MeasuredChain:
    """A chain, and what it loses: measured over the whole chain, since single blocks do not predict it."""

    blocks: tuple[str, ...]
    loss: float = 0.0
    """Above that of the application's own chain, in nats per token."""


@dataclass(frozen=True, slots=True)
class Application:
    """A tenant's model."""

    name: str
    chains: tuple[MeasuredChain, ...]
    """Its own first, with a loss of 0; then equivalent ones."""
    weight: float = 1.0
    """Expected requests, relative to other applications."""
    max_loss: float = 0.0
    """The tenant's bound; 0: its own chain only."""
    has_adapter: bool = False

    @property
    def own(self) -> MeasuredChain:
        return self.chains[0]

    @property
    def allowed(self) -> tuple[MeasuredChain, ...]:
        """The own chain, and equivalent ones within the tenant's bound."""
        return (self.chains[0], *(chain for chain in self.chains[1:] if chain.loss <= self.max_loss))


class BlockCatalog:
    """Blocks and applications. Requests of all applications of a block run in one batch.

    `weights` names the weights of a block, if it shares them with another one: they are on a device once, and each of the two
    has its own batches.
    """

    def __init__(
        self,
        blocks: dict[str, BlockCost],
        applications: Iterable[Application],
        *,
        adapter_share: float = 0.0,
        weights: Mapping[str, str] | None = None,
    ) -> None:
        """Raises `ValueError` for a chain with an unknown block, or an own chain that loses."""
        self.blocks = blocks
        self.applications = {each.name: each for each in applications}
        self.adapter_share = adapter_share
        self._weights = weights or {}
        for application in self.applications.values():
            unknown = {block for chain in application.chains for block in chain.blocks} - blocks.keys()
            if unknown:
                raise ValueError(f"{application.name} has the unknown block {min(unknown)}")
            if application.own.loss:
                raise ValueError(f"the own chain of {application.name} loses {application.own.loss}, expected 0")

    def added_bytes(self, block: str, present: Iterable[str]) -> int:
        """Bytes of weights that a block adds on a device with other blocks."""
        name = self._weights.get(block, block)
        shared = any(self._weights.get(each, each) == name for each in present if each != block)
        return 0 if shared else self.blocks[block].weight_bytes

    @property
    def used(self) -> list[str]:
        """Blocks that some own chain has, in the order of chains."""
        return list(dict.fromkeys(block for each in self.applications.values() for block in each.own.blocks))
