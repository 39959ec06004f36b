"""An engine without tensors: its cache remembers what was written, its model reads nothing else.

A token is a hash of everything that attention would see. So an answer is right
only if every page holds the right keys of the right sequence at the right time.
"""

from __future__ import annotations

import hashlib

from symbiosis.serving.scheduling.block_manager import BlockManager
from symbiosis.serving.scheduling.scheduler import Scheduler, SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling, Sequence, SequenceState

VOCABULARY = 32


def told(seen, number):
    """The token that follows what attention sees."""
    text = repr((seen, number)).encode()
    return hashlib.sha256(text).digest()[0] % VOCABULARY


def expected(sequence, count):
    """The first `count` tokens of the answer, computed with no engine at all."""
    tokens = list(sequence.tokens[: sequence.prompt_length])
    for _ in range(count):
        tokens.append(told([(sequence.salt, sequence.adapter, token) for token in tokens], sequence.number))
    return tokens[sequence.prompt_length :]


class Simulated:
    """Steps a scheduler; the clock moves one second a step."""

    def __init__(self, pages=64, page_size=4, resident=lambda adapter: True, **config):
        settings = {"vocabulary": VOCABULARY, "max_length": 1000, "max_rows": 16, "max_running": 8, "max_chunk": 8, **config}
        self.pool = BlockManager(pages, page_size)
        self.scheduler = Scheduler(SchedulerConfig(**settings), self.pool, resident)
        self.slots = {}
        self.now = 0.0
        self.last = None
        self.added = {}
        self.ended = {}
        self.admitted = {}
        self.preemptions = 0

    def add(self, id, tenant="ann", prompt=range(5), max_tokens=4, n=1, **changes):
        sampling = changes.pop("sampling", None) or Sampling(max_tokens=max_tokens, temperature=0)
        one = Sequence(id=id, tenant=tenant, prompt=prompt, sampling=sampling, arrival=self.now, **changes)
        everybody = one.siblings(n)
        self.scheduler.add(*everybody)
        self.added.update({each.id: each for each in everybody})
        return everybody if n > 1 else one

    def cancel(self, id):
        if self.scheduler.cancel(id):
            self._end(self.added[id])
            assert self.added[id].reason is FinishReason.CANCELLED

    def plan(self):
        were = {one for one in self.added.values() if one.state is SequenceState.RUNNING}
        self.last = made = self.scheduler.plan(self.now)
        self.preemptions += len(made.preempted)
        rows = sum(chunk.count for chunk in made.chunks)
        assert rows == made.rows <= self.scheduler.config.max_rows
        groups = [chunk.sequence.adapter for chunk in made.chunks]
        blocks = [adapter for index, adapter in enumerate(groups) if index == 0 or groups[index - 1] != adapter]
        assert len(blocks) == len(set(blocks)), "rows of one adapter are not together"
        assert len({chunk.sequence for chunk in made.chunks}) == len(made.chunks)
        assert not made.preempted or {chunk.sequence for chunk in made.chunks} <= were, "admitted while pages ran out"
        for chunk in made.chunks:
            self.admitted.setdefault(chunk.sequence.id, self.now)
            assert chunk.start == chunk.sequence.computed
            assert chunk.count >= 1
            assert chunk.samples == (chunk.start + chunk.count == len(chunk.sequence.tokens))
        return made

    def run(self, made):
        size, before = self.pool.page_size, dict(self.slots)
        for source, target in made.copies:
            for offset in range(size):
                self.slots[target, offset] = before.get((source, offset))
        tokens = []
        for chunk in made.chunks:
            one = chunk.sequence
            for position in range(chunk.start, chunk.start + chunk.count):
                self.slots[one.pages[position // size], position % size] = (one.salt, one.adapter, one.tokens[position])
        for one in made.sampled:
            seen = [self.slots[one.pages[position // size], position % size] for position in range(len(one.tokens))]
            tokens.append(told(seen, one.number))
        return tokens

    def finish(self, made, tokens):
        for one in self.scheduler.done(made, tokens):
            self._end(one)
        self.scheduler.check_integrity()
        self.now += 1.0

    def step(self):
        made = self.plan()
        self.finish(made, self.run(made))
        return made

    def drain(self, most=10_000):
        for _ in range(most):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError("it never ends")

    def _end(self, one):
        assert one.id not in self.ended, "ended twice"
        self.ended[one.id] = one
        assert one.pages == []
        assert one.outputs == expected(one, one.output_length)
