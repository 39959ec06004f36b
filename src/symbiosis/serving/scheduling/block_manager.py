"""Blocks of the KV cache: reference counts, and prefix caching by content hash.

Pure bookkeeping: blocks are numbers, the tensors belong to the model runner. A full block of computed tokens is hashed:
SHA-256 of the cache salt, the hashes of adapter and chain and all tokens up to the block's end. A sequence that begins with
the same tokens under the same salt, adapter and chain shares the block; no other sequence finds it. A hashed block without
references stays cached until its memory is needed, evicted in LRU order.

Shared blocks are never written. A sequence copies a block instead in two cases: its last token lies in a cached block (it
is always recomputed, for its logits), or it forks from a parent in the middle of a block.

With host blocks, a cached block whose memory is needed is copied to host memory first, and is found there later.

Hashes are equal in all engines that serve the same model, so engines name the blocks that they exchange by them. Blocks that
another engine has sent lie ahead of the tokens that their sequence has computed. When the computed tokens meet them they
count as computed, too.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable

from symbiosis.serving.scheduling.host_blocks import HostBlocks
from symbiosis.serving.scheduling.sequence import Sequence

BlockCopy = tuple[int, int]
"""(source, destination). All sources are read before the step writes anything."""


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostBlocks(host_blocks)
        self.num_sent = 0
        """Blocks sent to other engines so far."""
        self.num_received = 0
        """Blocks received from other engines so far."""
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # hashed, without references; least recently used first
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones without references included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache."""
        return len(self._cached)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the longest prefix of its tokens, in full blocks. Changes nothing."""
        found = []
        for index in range(len(sequence.tokens) // self.block_size):
            block = self._cached.get(self._hash(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def allocate(
        self, sequence: Sequence, length: int, *, reserved: int = 0, parent: Sequence | None = None
    ) -> list[BlockCopy] | None:
        """Allocate blocks for `length` tokens to a sequence without any, cached ones where possible.

        Returns the copies to make before the step, or None (nothing has changed) if fewer than `reserved` blocks would
        remain free. The partial block of `parent` is copied; the tokens it has computed must stem from an earlier step.
        """
        assert not sequence.block_table, f"{sequence.id} has blocks already"
        shared = self.find_prefix(sequence)
        last = len(sequence.tokens) - 1
        computed, source = len(shared) * self.block_size, None
        stored: list[bytes] = []
        if computed > last:
            computed, source = last, shared.pop()
        else:
            stored = self._find_stored(sequence, len(shared))
            if parent is not None and not stored:
                computed, source = self._find_partial(sequence, parent, computed)
        if source is not None and self.host.is_restoring(source):  # it is written in this step, after all copies were read
            computed, source = len(shared) * self.block_size, None
        computed += len(stored) * self.block_size
        needed = -(-length // self.block_size) - len(shared)
        if needed + reserved > self.num_free_blocks - sum(block in self._evictable for block in shared):
            return None
        for block in shared:
            self._references[block] += 1
            self._evictable.pop(block, None)
        if source is not None and source in self._evictable:
            self._evictable.move_to_end(source)
        self.host.pin(stored)
        fresh = self._take(needed)
        for hash, block in zip(stored, fresh, strict=False):
            self.host.restore(hash, block)
            self._cached[hash] = block
            self._hashes[block] = hash
        copies: list[BlockCopy] = []
        if source is not None:
            copies = self._copy_on_write(source, fresh)
        sequence.block_table = shared + fresh
        sequence.num_computed_tokens = computed
        sequence.num_hashed_blocks = len(shared) + len(stored)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = computed
        return copies

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Extend the block table to `length` tokens; False (nothing has changed) if too few blocks are free."""
        needed = -(-length // self.block_size) - len(sequence.block_table)
        if needed <= 0:
            return True
        if needed > self.num_free_blocks:
            return False
        sequence.block_table += self._take(needed)
        return True

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Add the blocks that were filled since the last call to the prefix cache."""
        full = sequence.num_computed_tokens // self.block_size
        for index in range(sequence.num_hashed_blocks, full):
            hash, block = self._hash(sequence, index), sequence.block_table[index]
            # Two sequences may compute equal tokens in one step: one block is cached, the other stays private.
            if hash not in self._cached and self._hashes[block] is None:
                self._cached[hash] = block
                self._hashes[block] = hash
        sequence.num_hashed_blocks = max(sequence.num_hashed_blocks, full)

    def free(self, sequence: Sequence) -> None:
        """Release all its blocks. Hashed ones stay cached until their memory is needed."""
        for block in reversed(sequence.block_table):  # LRU order: a prefix's end is useless without its beginning
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was freed twice"
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None
        sequence.block_table, sequence.received = [], range(0)
        sequence.num_computed_tokens = sequence.num_hashed_blocks = 0

    # Blocks of other engines

    def missing_blocks(self, sequence: Sequence) -> range:
        """Full blocks of a running sequence without a token computed or received. The last token is always computed."""
        first = -(-sequence.num_computed_tokens // self.block_size)
        end = sequence.received.start if sequence.received else (len(sequence.tokens) - 1) // self.block_size
        return range(first, max(first, end))

    def hashes(self, sequence: Sequence, blocks: range) -> list[bytes]:
        """Of these blocks of its table."""
        return [self._hash(sequence, index) for index in blocks]

    def add_received(self, sequence: Sequence, blocks: range) -> None:
        """The last of its missing blocks have been written."""
        missing = self.missing_blocks(sequence)
        assert blocks, "at least one"
        assert missing.start <= blocks.start, f"{sequence.id} has begun a received block"
        assert blocks.stop == missing.stop or (not sequence.received and blocks.stop < missing.stop), "received in order"
        sequence.received = range(blocks.start, sequence.received.stop or blocks.stop)
        self.num_received += len(blocks)
        self.skip_received(sequence)

    def skip_received(self, sequence: Sequence) -> None:
        """Count received blocks as computed, if the computed tokens meet them."""
        received = sequence.received
        if sequence.num_computed_tokens == received.start * self.block_size:
            sequence.num_computed_tokens, sequence.received = received.stop * self.block_size, range(0)
            self.cache_full_blocks(sequence)

    def find_sent(self, hashes: Iterable[bytes]) -> tuple[list[int], bool]:
        """The first of these blocks, up to one that is missing: on the device, or (True) all in host memory.

        They are valid until the next step.
        """
        on_device: list[int] = []
        on_host: list[int] = []
        for hash in hashes:
            if (block := self._cached.get(hash)) is not None and not on_host:
                on_device.append(block)
            elif block is None and not on_device and (place := self.host.find(hash)) is not None:
                on_host.append(place)
            else:
                break
        return (on_host, True) if on_host else (on_device, False)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """These blocks are needed for a while: blocks without references that were used before are evicted first."""
        for hash in hashes:
            block = self._cached.get(hash)
            if block is not None and block in self._evictable:
                self._evictable.move_to_end(block)

    def reset_cache(self) -> None:
        """Forget all cached blocks, on host and device: their content is unknown. Blocks of sequences stay theirs."""
        self.host.clear()
        self._free += self._evictable
        self._evictable.clear()
        self._hashes = [None] * self.num_blocks
        self._cached.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each block is free, evictable, or referenced by exactly the block tables of `sequences`."""
        owned: Counter[int] = Counter()
        for sequence in sequences:
            blocks = sequence.block_table
            assert len(set(blocks)) == len(blocks), f"{sequence.id} has a block twice"
            assert sequence.num_computed_tokens <= len(blocks) * self.block_size, f"{sequence.id} has keys without blocks"
            assert sequence.num_hashed_blocks <= len(blocks)
            owned.update(blocks)
            if received := sequence.received:
                assert sequence.num_computed_tokens < received.start * self.block_size, f"{sequence.id} has met its blocks"
                assert received.stop * self.block_size < len(sequence.tokens), f"{sequence.id} received its last token"
            writable = blocks[sequence.num_computed_tokens // self.block_size :]
            assert all(self._references[block] == 1 for block in writable), f"{sequence.id} could write a shared block"
            assert all(self._hashes[block] is None for block in writable), f"{sequence.id} could write a cached block"
        assert [owned[block] for block in range(self.num_blocks)] == self._references
        free, evictable, used = set(self._free), set(self._evictable), set(owned)
        assert len(free) == len(self._free)
        assert free.isdisjoint(evictable)
        assert used.isdisjoint(free | evictable)
        assert len(free) + len(evictable) + len(used) == self.num_blocks, "a block is lost"
        assert {block: hash for block, hash in enumerate(self._hashes) if hash} == {b: h for h, b in self._cached.items()}
        assert all(self._hashes[block] is None for block in free)
        assert all(self._hashes[block] is not None for block in evictable)
        self.host.check_integrity()

    def _take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._evictable.popitem(last=False)
                hash = self._hashes[block]
                assert hash is not None
                self.host.store(hash, block)
                del self._cached[hash]
                self._hashes[block] = None
            self._references[block] = 1
            taken.append(block)
        return taken

    def _find_stored(self, sequence: Sequence, index: int) -> list[bytes]:
        """Hashes of its blocks from `index` on that are in host memory only. The block of its last token is recomputed."""
        found: list[bytes] = []
        while index < (len(sequence.tokens) - 1) // self.block_size:
            hash = self._hash(sequence, index)
            if hash in self._cached or not self.host.has(hash):
                break
            found.append(hash)
            index += 1
        return found

    def _copy_on_write(self, source: int, fresh: list[int]) -> list[BlockCopy]:
        """Make the first fresh block a copy of `source`, which may itself have been evicted into `fresh`."""
        if source in fresh:
            index = fresh.index(source)
            fresh[0], fresh[index] = fresh[index], fresh[0]
            return []
        return [(source, fresh[0])]

    def _find_partial(self, sequence: Sequence, parent: Sequence, computed: int) -> tuple[int, int | None]:
        """How many tokens are computed with a copy of the parent's next block, and that block."""
        index = computed // self.block_size
        known = min(parent.num_computed_tokens, len(sequence.tokens) - 1, computed + self.block_size)
        if known <= computed or index >= len(parent.block_table):
            return computed, None
        is_same_prefix = parent.cache_salt == sequence.cache_salt and parent.adapter == sequence.adapter
        is_same_prefix = is_same_prefix and parent.chain == sequence.chain
        if not is_same_prefix or parent.tokens[:known] != sequence.tokens[:known]:
            return computed, None
        return known, parent.block_table[index]

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of its block `index`: it covers the previous block's hash, the first one salt, adapter and chain."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            if hashes:
                before = hashes[-1]
            else:
                salt, adapter = sequence.cache_salt, sequence.adapter.encode()
                key = b"%d,%d:" % (len(salt), len(adapter)) + salt + adapter + sequence.chain.encode()
                before = hashlib.sha256(key).digest()
            start = len(hashes) * self.block_size
            hashes.append(hashlib.sha256(before + sequence.tokens[start : start + self.block_size].tobytes()).digest())
        return hashes[index]
