"""Pages of the key-value cache: who has which, and which can be found again by what is in them.

Pure bookkeeping: pages are numbers, the tensors are the runner's. A full page
whose tokens have been computed gets a name: the SHA-256 of the salt, the
adapter's content and all tokens up to its end. Who begins with the same
prefix under the same salt and adapter shares the page; nobody else can find
it. A page that nobody has is kept under its name until its room is needed,
least recently used first.

Shared pages are never written. Where a sequence needs the beginning of a page
that is another's (its last token is always computed, since its logits are
wanted; siblings share the prompt's last, unfinished page), it gets a copy.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable

from symbiosis.serving.scheduling.sequence import Sequence, within

Copy = tuple[int, int]
"""(from, to): the runner copies the whole page before the pass writes anything; all sources are read as they were."""


class BlockManager:
    """`count` pages of `page_size` tokens, with reference counts and names."""

    def __init__(self, count: int, page_size: int) -> None:
        within("count", count, 1, 1 << 31, whole=True)
        within("page_size", page_size, 1, 1 << 16, whole=True)
        self.count = count
        self.page_size = page_size
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, nobody's; least recently used first
        self._names: list[bytes | None] = [None] * count
        self._named: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that can be had now."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that can be found by their content."""
        return len(self._named)

    def pages_for(self, length: int) -> int:
        """How many pages `length` tokens need."""
        return -(-length // self.page_size)

    def match(self, sequence: Sequence) -> list[int]:
        """The pages that hold the longest prefix of its tokens in full pages. They stay as they are."""
        found = []
        for index in range(len(sequence.tokens) // self.page_size):
            page = self._named.get(self._name(sequence, index))
            if page is None:
                break
            found.append(page)
        return found

    def allocate(self, sequence: Sequence, length: int, *, spare: int = 0, parent: Sequence | None = None) -> list[Copy] | None:
        """Give a sequence without pages those for `length` tokens, computed ones where there are any.

        Returns what has to be copied before the pass, or None (and nothing has
        changed) if fewer than `spare` pages would be left. `parent` may lend its
        unfinished page; what it has computed must have been computed before this pass.
        """
        assert not sequence.pages, f"{sequence.id} has pages already"
        shared = self.match(sequence)
        last = len(sequence.tokens) - 1
        computed, source = len(shared) * self.page_size, None
        if computed > last:
            computed, source = last, shared.pop()
        elif parent is not None:
            computed, source = self._lent(sequence, parent, computed)
        needed = self.pages_for(length) - len(shared)
        if needed + spare > self.available - sum(page in self._idle for page in shared):
            return None
        for page in shared:
            self._references[page] += 1
            self._idle.pop(page, None)
        if source is not None and source in self._idle:
            self._idle.move_to_end(source)
        fresh = self._take(needed)
        copies: list[Copy] = []
        if source is not None:
            copies = self._copy_on_write(source, fresh)
        sequence.pages = shared + fresh
        sequence.computed = computed
        sequence.committed = len(shared)
        if sequence.cached is None:
            sequence.cached = computed
        return copies

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Pages for `length` tokens in all; False (and nothing has changed) if there are not enough."""
        needed = -(-length // self.page_size) - len(sequence.pages)
        if needed <= 0:
            return True
        if needed > self.available:
            return False
        sequence.pages += self._take(needed)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Let others find the pages that were filled since the last time."""
        full = sequence.computed // self.page_size
        for index in range(sequence.committed, full):
            name, page = self._name(sequence, index), sequence.pages[index]
            # the same tokens may have been computed twice at the same time: one page has the name, the other stays private
            if name not in self._named and self._names[page] is None:
                self._named[name] = page
                self._names[page] = name
        sequence.committed = max(sequence.committed, full)

    def free(self, sequence: Sequence) -> None:
        """Take all pages back. Those with a name can be found until their room is needed."""
        for page in reversed(sequence.pages):  # the end of a prefix goes first: it is of no use without its beginning
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was freed twice"
            if self._references[page] == 0:
                if self._names[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None
        sequence.pages = []
        sequence.computed = sequence.committed = 0

    def forget(self) -> None:
        """No page can be found any more; those in use stay with who has them."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._named.clear()
        self._names = [None] * self.count

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every page is free, idle or in use by exactly those of `sequences` that say so."""
        owned: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.pages)) == len(sequence.pages), f"{sequence.id} has a page twice"
            assert sequence.computed <= len(sequence.pages) * self.page_size, f"{sequence.id} has keys without pages"
            assert sequence.committed <= len(sequence.pages)
            owned.update(sequence.pages)
            writable = sequence.pages[sequence.computed // self.page_size :]
            assert all(self._references[page] == 1 for page in writable), f"{sequence.id} could write a shared page"
            assert all(self._names[page] is None for page in writable), f"{sequence.id} could write a named page"
        assert [owned[page] for page in range(self.count)] == self._references
        free, idle, used = set(self._free), set(self._idle), set(owned)
        assert len(free) == len(self._free)
        assert free.isdisjoint(idle)
        assert used.isdisjoint(free | idle)
        assert len(free) + len(idle) + len(used) == self.count, "a page is lost"
        assert {page: name for page, name in enumerate(self._names) if name} == {p: n for n, p in self._named.items()}
        assert all(self._names[page] is None for page in free)
        assert all(self._names[page] is not None for page in idle)

    def _take(self, number: int) -> list[int]:
        taken = []
        for _ in range(number):
            if self._free:
                page = self._free.pop()
            else:
                page, _none = self._idle.popitem(last=False)
                name = self._names[page]
                assert name is not None
                del self._named[name]
                self._names[page] = None
            self._references[page] = 1
            taken.append(page)
        return taken

    def _copy_on_write(self, source: int, fresh: list[int]) -> list[Copy]:
        """Fill the first fresh page from `source`. No page is needed beyond `fresh`, even if the source was the last one."""
        if source in fresh:  # its room was needed, and it is the sequence's own now
            place = fresh.index(source)
            fresh[0], fresh[place] = fresh[place], fresh[0]
            return []
        return [(source, fresh[0])]

    def _lent(self, sequence: Sequence, parent: Sequence, computed: int) -> tuple[int, int | None]:
        """How far the parent's next page takes a sequence, and that page."""
        index = computed // self.page_size
        known = min(parent.computed, len(sequence.tokens) - 1, computed + self.page_size)
        if known <= computed or index >= len(parent.pages):
            return computed, None
        if (parent.salt, parent.adapter) != (sequence.salt, sequence.adapter) or parent.tokens[:known] != sequence.tokens[
            :known
        ]:
            return computed, None
        return known, parent.pages[index]

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """The name of its page `index`: each name holds the one before it, the first one salt and adapter."""
        names = sequence.keys
        while len(names) <= index:
            if names:
                before = names[-1]
            else:
                adapter = sequence.adapter.encode()
                root = b"%d,%d:" % (len(sequence.salt), len(adapter)) + sequence.salt + adapter
                before = hashlib.sha256(root).digest()
            start = len(names) * self.page_size
            names.append(hashlib.sha256(before + sequence.tokens[start : start + self.page_size].tobytes()).digest())
        return names[index]
