"""Engines that exchange blocks, stepped by the test: everything between two threads happens when the test says so."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Empty, SimpleQueue

from symbiosis.models.loading import shared_copy
from symbiosis.serving.block_exchange.exchange import BlockExchange
from symbiosis.serving.engine_core import EngineCore
from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, EngineListener
from symbiosis.transport.shm import runtime_folder

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, keys and values, tokens, key heads, width, float32
KEY = ClusterKey.of("a secret of this test")
DEADLINE_S = 60.0


class Node:
    """One engine and its exchange. Its thread is that of the test."""

    def __init__(self, model, *, on_host=False, is_local=False, fingerprint="a model", pages=400, **settings):
        self.core = EngineCore(shared_copy(model), pages=pages, page_size=BLOCK_SIZE, **settings)
        self.core.block_fetches.start_s = 0.0  # prompts are short: the test does not depend on the machine's speed
        self.blocks = self.core.scheduler.block_manager
        self.listener = EngineListener(host="127.0.0.1", clients=KEY) if on_host else EngineListener(Path(runtime_folder()))
        self.calls = SimpleQueue()
        parts = self.blocks, self.core.block_memory, self.core.block_fetches
        self.exchange = BlockExchange(self.listener, fingerprint, *parts, self.calls.put)
        key = self.listener._keys[0].decode() if on_host else ""
        local = self.listener._found["local"] if is_local else ""
        self.address = EngineAddress("", "", key, self.listener._found["blocks"], local)

    def add(self, prompt, sampling, n=1, **more):
        return self.core.add_several(n, prompt, sampling, **more)

    def run_calls(self, seconds=0.0):
        """What other threads asked for."""
        while True:
            try:
                call = self.calls.get(timeout=seconds) if seconds else self.calls.get(block=False)
            except Empty:
                return
            call()
            seconds = 0.0
            self.core.scheduler.check_integrity()

    def step(self):
        self.run_calls()
        self.core.step()
        self.core.scheduler.check_integrity()

    def finish(self):
        while not self.core.is_idle():
            self.step()

    def limit(self, tokens):
        """Compute so many tokens in each step while blocks are fetched: then the test decides where the two meet."""
        self.core.block_fetches._limit = lambda gap, silence_s: tokens

    def close(self):
        self.exchange.close()


def exchange_until(condition, *nodes):
    """Let blocks come, without steps."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing has come"
        for node in nodes:
            node.run_calls(0.005)


def complete(node, prompt, sampling, n=1, **more):
    """All tokens of a request that is alone."""
    sequences = node.add(prompt, sampling, n, **more)
    node.finish()
    return [sequence.outputs for sequence in sequences]
