"""Which CUDA graphs exist: admission by use, bounded eviction, keys that cannot be captured. Pure bookkeeping.

A capture takes longer than the launches that one replay saves, so a key needs several uses before it is worth a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from symbiosis.common.bounded_dict import evict_oldest

_MAX_TRACKED = 8192  # keys without a graph whose uses are counted
_MAX_REJECTED = 4096
_MIN_FREQUENT_USES = 3
_CLEARLY = 4  # times as many recent uses as the graph that would be evicted
_HALVE_EVERY = 128  # uses, after which all counts are halved

_Key = TypeVar("_Key", bound=Hashable)
_Graph = TypeVar("_Graph")


class GraphCache(Generic[_Key, _Graph]):
    """Graphs by key. A key is admitted at its `min_uses`-th miss; a full cache evicts the least recently used graph."""

    def __init__(self, capacity: int, min_uses: int = 1) -> None:
        self._capacity, self._min_uses = capacity, min_uses
        self._graphs: dict[_Key, _Graph] = {}
        self._misses: dict[_Key, int] = {}
        self.rejected: dict[_Key, None] = {}
        """Keys that cannot be captured."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._graphs)

    def get(self, key: _Key) -> _Graph | None:
        """The graph of this key, which becomes the most recently used."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
        return graph

    def admits(self, key: _Key) -> bool:
        """Whether a key without a graph is to be captured. Each call counts as a use."""
        misses = self._misses.pop(key, 0) + 1
        evict_oldest(self._misses, _MAX_TRACKED)
        self._misses[key] = misses
        return misses >= self._min_uses and key not in self.rejected

    def put(self, key: _Key, graph: _Graph | None) -> None:
        """Store a graph. None rejects the key: it is not admitted again."""
        if graph is None:
            evict_oldest(self.rejected, _MAX_REJECTED)
            self.rejected[key] = None
        else:
            self._evict_for_one()
            self._graphs[key] = graph

    def evict(self, is_obsolete: Callable[[_Key], bool]) -> None:
        for key in [key for key in self._graphs if is_obsolete(key)]:
            del self._graphs[key]

    def clear(self) -> None:
        """Drop all graphs. Use counts and rejected keys remain."""
        self._graphs.clear()

    def _evict_for_one(self) -> None:
        evict_oldest(self._graphs, self._capacity)


class FrequencyGraphCache(GraphCache[_Key, _Graph]):
    """For few, large graphs. All uses count and fade; a full cache evicts the rarest graph.

    A key replaces that graph only with clearly more recent uses. Keys that alternate do not evict each other.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, _MIN_FREQUENT_USES)
        self._uses: Counter[_Key] = Counter()
        self._total_uses = 0

    def get(self, key: _Key) -> _Graph | None:
        """The graph of this key. Each call counts as a use."""
        self._uses[key] += 1
        self._total_uses += 1
        if self._total_uses % _HALVE_EVERY == 0:
            self._uses = Counter({each: uses // 2 for each, uses in self._uses.items() if uses > 1})
        return self._graphs.get(key)

    def admits(self, key: _Key) -> bool:
        """Whether a key without a graph is to be captured."""
        return self._uses[key] >= self._min_uses and self.may_admit(key)

    def may_admit(self, key: _Key) -> bool:
        """Whether a key without a graph is captured now or after a few more uses."""
        if key in self.rejected:
            return False
        if len(self._graphs) < self._capacity:
            return True
        return self._uses[key] >= self._min_uses and self._uses[key] > _CLEARLY * self._uses[self._rarest()]

    def _evict_for_one(self) -> None:
        while len(self._graphs) >= self._capacity:
            del self._graphs[self._rarest()]

    def _rarest(self) -> _Key:
        return min(self._graphs, key=lambda each: self._uses[each])
