"""The queue of a block instance: returning requests first, and batches of a size that suits the block."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from symbiosis.cluster.policies.blocks.block_cost import BlockCost
from symbiosis.cluster.policies.blocks.catalog import Application, MeasuredChain


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Limits of the batches of one block. Each block has its own size: that of its `stretch`."""

    max_rows: int = 32
    """Decode rows and prompts: the batch of Punica, and of BlockLLM's measurements."""
    stretch: float = 8.0
    """A batch takes at most so many times the block's fixed time, or one request: larger ones save less than an eighth."""


@dataclass(slots=True, eq=False)
class ChainRequest:
    """A request on its way through the blocks of a chain, once for its prompt and once for each later token."""

    number: int
    """By arrival."""
    application: Application
    prompt: int
    output: int
    arrived: float
    chains: tuple[MeasuredChain, ...]
    """That begin with the blocks that have served it; one when its first pass has ended."""
    generated: int = 0
    position: int = 0
    """Of the next block in the chain."""
    blocks: list[str] = field(default_factory=list)
    """That serve it, by position: those of one of its chains, as far as its first pass came."""
    devices: list[int] = field(default_factory=list)
    """Owners of its keys and values, by position."""
    held: list[int] = field(default_factory=list)
    """Tokens reserved there."""
    kv_ready: list[float] = field(default_factory=list)
    """When keys and values that moved are there."""
    is_prefill: bool = True
    recomputed: int = 0
    """Tokens to compute again at the next block, besides the row itself."""
    has_lost_kv: bool = False
    """A block of its chain lacks them: it computes its chain again from the first block."""
    epoch: int = 0
    """Preemptions so far."""

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def has_owner(self) -> bool:
        """Whether a device has the keys and values of its next block."""
        return self.position < len(self.devices)


@dataclass(slots=True)
class BlockBatch:
    """Requests that a block runs together."""

    requests: list[ChainRequest]
    seconds: float


class BlockQueue:
    """Requests that wait for one instance."""

    def __init__(self, cost: BlockCost, config: BatchConfig, adapter_share: float = 0.0) -> None:
        self._cost, self._config, self._adapter_s = cost, config, adapter_share * cost.fixed_s
        self.max_rows = config.max_rows
        self._returning: deque[tuple[float, ChainRequest]] = deque()
        self._fresh: list[tuple[int, float, ChainRequest]] = []
        self.prefill_s = 0.0
        """Work of the prompts that wait."""

    def __len__(self) -> int:
        return len(self._returning) + len(self._fresh)

    def __contains__(self, request: ChainRequest) -> bool:
        return any(each is request for _, each in self._returning) or any(each is request for _, _, each in self._fresh)

    def add(self, request: ChainRequest, now: float) -> None:
        """Decode rows return; prompts are new, and ordered by arrival."""
        if request.is_prefill:
            self.prefill_s += self._cost.prompt_s(request.tokens)
            heapq.heappush(self._fresh, (request.number, now, request))
        else:
            self._returning.append((now, request))

    def remove(self, request: ChainRequest) -> None:
        """It was preempted, or goes to another instance. Nothing happens if it does not wait here."""
        for entry in self._returning:
            if entry[1] is request:
                self._returning.remove(entry)
                return
        for index, found in enumerate(self._fresh):
            if found[2] is request:
                del self._fresh[index]
                heapq.heapify(self._fresh)
                self.prefill_s = self.prefill_s - self._cost.prompt_s(request.tokens) if self._fresh else 0.0
                return

    @property
    def waits_since(self) -> float:
        """Since when the next request waits. The queue must not be empty."""
        return self._returning[0][0] if self._returning else self._fresh[0][1]

    @property
    def depth(self) -> int:
        """Position of the next request in its chain. The queue must not be empty."""
        return (self._returning[0][1] if self._returning else self._fresh[0][2]).position

    def take(self) -> BlockBatch:
        """The next batch. The queue must not be empty."""
        cost, most_s, most_rows = self._cost, self._config.stretch * self._cost.fixed_s, self._config.max_rows
        taken: list[ChainRequest] = []
        adapters: set[str] = set()
        seconds = cost.fixed_s
        while self._returning or self._fresh:
            request = self._returning[0][1] if self._returning else self._fresh[0][2]
            more = self.work_s(request)
            application = request.application
            if application.has_adapter and application.name not in adapters:
                more += self._adapter_s if adapters else 0.0
                adapters.add(application.name)
            if taken and (seconds + more > most_s or len(taken) >= most_rows):
                break
            if self._returning:
                self._returning.popleft()
            else:
                heapq.heappop(self._fresh)
                self.prefill_s -= cost.prompt_s(request.tokens)
            seconds += more
            taken.append(request)
        if not self._fresh:
            self.prefill_s = 0.0
        return BlockBatch(taken, seconds)

    def work_s(self, request: ChainRequest) -> float:
        """Seconds that a request adds to a batch of this block."""
        cost = self._cost
        if request.is_prefill:
            return cost.prompt_s(request.tokens)
        return cost.row_s + cost.context_s * request.tokens + cost.prompt_s(request.recomputed)
