"""Metadata of attention that is refilled in place is that of a batch made for these spans."""

from __future__ import annotations

import random

import pytest
import torch

from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.block_tables import BlockTables
from symbiosis.kernels.tiles import Span

BLOCK_SIZE, ROWS, DECODES, PREFILLS, MAX_BLOCKS = 4, 160, 5, 4, 24


def make(decodes=DECODES, tables=None):
    tables = tables or BlockTables(DECODES + PREFILLS, MAX_BLOCKS, BLOCK_SIZE, "cpu")
    return AttentionBatch(rows=ROWS, tables=tables, decodes=decodes, prefills=PREFILLS)


def slots_by_hand(spans):
    slots = [-1] * ROWS
    for span in spans:
        for row in range(span.count):
            block, offset = divmod(span.before + row, BLOCK_SIZE)
            slots[span.start + row] = span.block_table[block] * BLOCK_SIZE + offset
    return slots


def random_spans(numbers):
    """Decodes and prefills in any order, with rows of no span at the end."""
    counts = [1] * numbers.randrange(DECODES + 1) + [numbers.randrange(2, 30) for _ in range(numbers.randrange(PREFILLS + 1))]
    numbers.shuffle(counts)
    spans, row = [], 0
    for count in counts:
        before = numbers.choice([0, 1, 3, 4, 5, 15, 16, 17, 50])
        needed = -(-(before + count) // BLOCK_SIZE)
        spans.append(Span(row, count, before, numbers.sample(range(200), needed + numbers.randrange(2))))
        row += count
    return spans


def test_refilled_spans_are_those_of_the_last_batch():
    numbers, batch = random.Random(0), make()
    for _ in range(50):
        spans = random_spans(numbers)
        batch.fill_spans(spans)
        assert batch.slots_R.tolist() == slots_by_hand(spans)
        decodes, prefills = ([s for s in spans if (s.count > 1) == several] for several in (False, True))
        found = batch.spans_3B.T.tolist()
        assert found[: len(decodes)] == [[s.start, 1, s.before] for s in decodes]
        assert all(count == -1 for _, count, _ in found[len(decodes) : DECODES]), "they are no rows"
        assert found[DECODES : DECODES + len(prefills)] == [[s.start, s.count, s.before] for s in prefills]
        for b, span in [*enumerate(decodes), *enumerate(prefills, DECODES)]:
            assert batch.block_table_BP[b, : len(span.block_table)].tolist() == span.block_table
        rows = {}
        for b, start, count in batch.tiles.device_3T.T.tolist():
            if b >= 0:
                rows.setdefault(b, []).extend(range(start, start + count))
        assert rows == {b: [*range(s.start, s.start + s.count)] for b, s in enumerate(prefills, DECODES)}


def test_a_batch_made_for_its_spans_has_the_same_slots():
    numbers = random.Random(1)
    for _ in range(20):
        spans = random_spans(numbers)
        found = AttentionBatch.of(spans, BLOCK_SIZE, "cpu").slots_R.tolist()
        assert found == slots_by_hand(spans)[: len(found)]


def test_a_block_table_that_has_grown_is_copied_again():
    batch, table = make(), [7, 8]
    batch.fill_spans([Span(0, 6, 0, table)])
    table.append(9)
    batch.fill_spans([Span(0, 3, 6, table)])
    assert batch.block_table_BP[DECODES, :3].tolist() == [7, 8, 9]
    assert batch.slots_R[:3].tolist() == [34, 35, 36]


def test_batches_of_other_sizes_share_tables():
    tables = BlockTables(8, MAX_BLOCKS, BLOCK_SIZE, "cpu")
    batches = make(tables=tables, decodes=0), make(tables=tables, decodes=3)
    lists = [[10 * b + block for block in range(3)] for b in range(4)]
    for turn in range(3):
        for batch in batches:
            prefills = lists[turn : turn + 2]
            for table in lists:
                table.append(turn)
            batch.fill_spans([Span(9 * n, 9, 0, table) for n, table in enumerate(prefills)])
            for line, table in enumerate(prefills, batch.num_decodes):
                assert batch.block_table_BP[line, : len(table)].tolist() == table
                assert batch.slots_R[9 * (line - batch.num_decodes) + 8] == table[2] * BLOCK_SIZE


@pytest.mark.parametrize("counts", [[1] * (DECODES + 1), [2] * (PREFILLS + 1)])
def test_too_many_spans_are_refused(counts):
    with pytest.raises(ValueError, match="do not fit"):
        make().fill_spans([Span(2 * n, count, 0, [n]) for n, count in enumerate(counts)])


def test_a_batch_without_decodes_has_none():
    batch = make(decodes=0)
    batch.fill_spans([Span(0, 5, 0, [3, 4])])
    assert batch.num_decodes == 0
    assert batch.spans_3B[:, 0].tolist() == [0, 5, 0]
    assert torch.equal(batch.tiles.device_3T[:, 0], torch.tensor([0, 0, 5], dtype=torch.int32))
