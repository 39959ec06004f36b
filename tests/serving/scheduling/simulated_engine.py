"""An engine without tensors: its cache records what was written, its model reads nothing else.

A token is a hash of everything that attention would see. So a completion is right
only if every block holds the right keys of the right sequence at the right time.
"""

from __future__ import annotations

import hashlib

from symbiosis.serving.scheduling.batch import Batch
from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.scheduler import Scheduler, SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling, Sequence, SequenceState

VOCABULARY = 32


def next_token(seen, number):
    """The token after what attention sees."""
    text = repr((seen, number)).encode()
    return hashlib.sha256(text).digest()[0] % VOCABULARY


def expected(sequence, count):
    """The first `count` tokens of the completion, computed without an engine."""
    tokens = list(sequence.tokens[: sequence.prompt_length])
    for _ in range(count):
        tokens.append(next_token([(sequence.cache_salt, sequence.adapter, token) for token in tokens], sequence.number))
    return tokens[sequence.prompt_length :]


class SimulatedEngine:
    """Steps a scheduler; the clock moves one second a step."""

    def __init__(self, num_blocks=64, block_size=4, resident=lambda adapter: True, host_blocks=0, **config):
        settings = {"vocab_size": VOCABULARY, "max_length": 1000, "max_rows": 16, "max_running": 8, "max_chunk": 8, **config}
        self.blocks = BlockManager(num_blocks, block_size, host_blocks)
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.blocks, resident)
        self.slots = {}
        self.host_slots = {}
        self.now = 0.0
        self.last = None
        self.added = {}
        self.ended = {}
        self.admitted = {}
        self.preemptions = 0

    def add(self, id, tenant="ann", prompt=range(5), max_tokens=4, n=1, **changes):
        sampling = changes.pop("sampling", None) or Sampling(max_tokens=max_tokens, temperature=0)
        one = Sequence(id=id, tenant=tenant, prompt=prompt, sampling=sampling, arrival=self.now, **changes)
        sequences = one.fork(n)
        self.scheduler.add(*sequences)
        self.added.update({each.id: each for each in sequences})
        return sequences if n > 1 else one

    def cancel(self, id):
        if self.scheduler.cancel(id):
            self._end(self.added[id])
            assert self.added[id].reason is FinishReason.CANCELLED

    def schedule(self):
        before = {one for one in self.added.values() if one.state is SequenceState.RUNNING}
        self.last = batch = self.scheduler.schedule(self.now)
        self.preemptions += len(batch.preempted)
        assert sum(chunk.count for chunk in batch.chunks) <= self.scheduler.config.max_rows
        groups = [chunk.sequence.adapter for chunk in batch.chunks]
        runs = [adapter for index, adapter in enumerate(groups) if index == 0 or groups[index - 1] != adapter]
        assert len(runs) == len(set(runs)), "rows of one adapter are not together"
        assert len({chunk.sequence for chunk in batch.chunks}) == len(batch.chunks)
        assert not batch.preempted or {chunk.sequence for chunk in batch.chunks} <= before, "admitted while blocks ran out"
        for chunk in batch.chunks:
            self.admitted.setdefault(chunk.sequence.id, self.now)
            assert chunk.start == chunk.sequence.num_computed_tokens
            assert chunk.count >= 1
            assert chunk.samples == (chunk.start + chunk.count == len(chunk.sequence.tokens))
        return batch

    def receive(self, one, count):
        """Another engine sends the last of the blocks that are missing, before a step."""
        missing = self.blocks.missing_blocks(one)
        blocks = missing[max(0, len(missing) - count) :]
        for index in blocks:
            for offset in range(size := self.blocks.block_size):
                token = one.tokens[index * size + offset]
                self.slots[one.block_table[index], offset] = (one.cache_salt, one.adapter, token)
        if blocks:
            self.blocks.add_received(one, blocks)
        return len(blocks)

    def run(self, batch):
        size, transfers = self.blocks.block_size, self.blocks.host.take_transfers()
        for source, target in transfers.stores:
            for offset in range(size):
                self.host_slots[target, offset] = self.slots.get((source, offset))
        before = dict(self.slots)
        for source, target in batch.copies:
            for offset in range(size):
                self.slots[target, offset] = before.get((source, offset))
        for source, target in transfers.restores:
            for offset in range(size):
                self.slots[target, offset] = self.host_slots[source, offset]
        tokens = []
        for chunk in batch.chunks:
            one = chunk.sequence
            for position in range(chunk.start, chunk.start + chunk.count):
                self.slots[one.block_table[position // size], position % size] = (
                    one.cache_salt,
                    one.adapter,
                    one.tokens[position],
                )
        for one in batch.sampled:
            seen = [self.slots[one.block_table[position // size], position % size] for position in range(len(one.tokens))]
            tokens.append(next_token(seen, one.number))
        return tokens

    def finish(self, batch, tokens):
        for one in self.scheduler.update(batch, tokens):
            self._end(one)
        self.scheduler.check_integrity()
        self.now += 1.0

    def step(self):
        batch = self.schedule()
        self.finish(batch, self.run(batch))
        return batch

    def drain(self, most=10_000):
        for _ in range(most):
            if not self.scheduler.num_running and not self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("the engine does not become idle")

    def _end(self, one):
        assert one.id not in self.ended, "finished twice"
        self.ended[one.id] = one
        assert one.block_table == []
        assert one.outputs == expected(one, one.output_length)


def rows(batch: Batch) -> dict[str, int]:
    """Tokens of each sequence in a batch."""
    return {chunk.sequence.id: chunk.count for chunk in batch.chunks}
