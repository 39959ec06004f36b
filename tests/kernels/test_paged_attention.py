"""The kernels against their plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.attention_batch import AttentionBatch
from symbiosis.kernels.block_tables import BlockTables
from symbiosis.kernels.paged_attention import attend, plan_launch, reference, store
from symbiosis.kernels.tiles import Span

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
# Triton's interpreter cuts bfloat16 instead of rounding
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16


def spans_of(sizes, block_size=BLOCK_SIZE):
    """Sequences of (tokens before, rows), on blocks in random order; block 0 belongs to no sequence."""
    needed = [-(-(before + count) // block_size) for before, count in sizes]
    free = (1 + torch.randperm(sum(needed))).tolist()
    spans, row = [], 0
    for (before, count), blocks in zip(sizes, needed, strict=True):
        spans.append(Span(row, count, before, [free.pop() for _ in range(blocks)]))
        row += count
    return spans, row, (1 + sum(needed)) * block_size


def memory_of(slots, key_heads, width, dtype):
    """All NaN until written: slots that no sequence owns must not be read."""
    return torch.full((2, slots, key_heads, width), float("nan"), device=DEVICE, dtype=dtype)


def fill(memory, spans, block_size=BLOCK_SIZE):
    for span in spans:
        for position in range(span.before):
            slot = span.block_table[position // block_size] * block_size + position % block_size
            memory[:, slot] = torch.randn(memory[:, slot].shape, device=DEVICE)


def check(sizes, *, heads=4, key_heads=2, width=64, dtype=torch.float32, block_size=BLOCK_SIZE, splits=None, **options):
    torch.manual_seed(0)
    spans, rows, slots = spans_of(sizes, block_size)
    memory = memory_of(slots, key_heads, width, dtype)
    fill(memory, spans, block_size)
    q, k, v = (torch.randn(rows, h, width, device=DEVICE).to(dtype) for h in (heads, key_heads, key_heads))
    batch = AttentionBatch.of(spans, block_size, DEVICE)
    store(k, v, batch.slots_R, *memory)
    for span in spans:
        for row in range(span.count):
            block, offset = divmod(span.before + row, block_size)
            slot = span.block_table[block] * block_size + offset
            assert torch.equal(memory[0, slot], k[span.start + row])
            assert torch.equal(memory[1, slot], v[span.start + row])
    chosen = plan_launch(batch.num_decodes, key_heads, width, batch.longest, q.element_size())
    chosen = replace(chosen, splits=splits or chosen.splits)
    found = attend(q, *memory, batch, scale=width**-0.5, chosen=chosen, **options)
    expected = reference(q, *memory, spans, block_size, width**-0.5, **options)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_any_width_of_a_head(width, dtype):
    check([(0, 1), (70, 1), (15, 1), (16, 1), (5, 20), (0, 40)], width=width, dtype=dtype)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (32, 1)])
def test_any_grouping_of_heads(heads, key_heads):
    check([(33, 1), (3, 7)], heads=heads, key_heads=key_heads)


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 20, 64, 100])
def test_splits_are_merged(splits, window):
    check([(0, 1), (63, 1), (64, 1), (200, 1)], splits=splits, window=window)


@pytest.mark.parametrize("window", [None, 1, 5, 40, 300])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_windows_and_caps_of_prefill(window, cap):
    check([(100, 130), (0, 3), (17, 1), (0, 65)], window=window, cap=cap)


@pytest.mark.parametrize("splits", [1, 3])
def test_caps_of_decode_rows(splits):
    check([(100, 1), (0, 1)], cap=1.5, splits=splits)


@pytest.mark.parametrize("block_size", [1, 8, 64, 128])
def test_other_block_sizes(block_size):
    check([(70, 1), (5, 20), (0, 1)], block_size=block_size)


@pytest.mark.parametrize("sizes", [[(12, 4)], [(0, 16), (3, 2)], [(64, 64)], [(0, 129), (63, 65)]])
def test_chunked_prefill(sizes):
    check(sizes)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_no_sequence_are_zeros_and_a_batch_is_filled_again_in_place(splits):
    torch.manual_seed(0)
    batch = AttentionBatch(rows=5, tables=BlockTables(5, 8, BLOCK_SIZE, DEVICE))
    addresses = [part.data_ptr() for part in (batch.spans_3B, batch.slots_R, batch.block_table_BP)]
    for sizes in ([(40, 1), (100, 1)], [], [(3, 1), (16, 1), (99, 1), (0, 1), (31, 1)], [(127, 1)]):
        spans, used, _ = spans_of(sizes)
        memory = memory_of(30 * BLOCK_SIZE, 2, 64, torch.float32)
        fill(memory, spans)
        q, k, v = (torch.randn(5, h, 64, device=DEVICE) for h in (4, 2, 2))
        batch.fill([span.before for span in spans], [span.block_table for span in spans])
        store(k, v, batch.slots_R, *memory)
        found = attend(q, *memory, batch, scale=0.1, chosen=replace(plan_launch(5, 2, 64, batch.longest, 4), splits=splits))
        assert not found[used:].any()
        torch.testing.assert_close(found, reference(q, *memory, spans, BLOCK_SIZE, 0.1), rtol=2e-5, atol=2e-5)
    assert [part.data_ptr() for part in (batch.spans_3B, batch.slots_R, batch.block_table_BP)] == addresses
    with pytest.raises(ValueError, match="one row each"):
        batch.fill([0] * 6, [[1]] * 6)


def test_queries_and_keys_that_are_parts_of_a_fused_projection():
    torch.manual_seed(0)
    spans, rows, slots = spans_of([(20, 1), (4, 3)])
    memory = memory_of(slots, 2, 64, torch.float32)
    fill(memory, spans)
    q, k, v = torch.randn(rows, 8, 64, device=DEVICE).split([4, 2, 2], dim=1)
    q_transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    batch = AttentionBatch.of(spans, BLOCK_SIZE, DEVICE)
    store(k, v, batch.slots_R.long(), *memory)
    expected = reference(q, *memory, spans, BLOCK_SIZE, 0.125)
    for queries in (q, q_transposed):
        found = attend(queries, *memory, batch, scale=0.125)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_rows_without_a_slot_are_not_stored():
    memory = torch.zeros(2, 32, 3, 80, device=DEVICE)
    k, v = torch.randn(3, 3, 80, device=DEVICE), torch.randn(3, 3, 80, device=DEVICE)
    store(k, v, torch.tensor([-1, 7, -1], device=DEVICE), *memory)
    assert torch.equal(memory[:, 7], torch.stack((k[1], v[1])))
    memory[:, 7] = 0
    assert not memory.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_graph_serves_other_sequences_when_replayed(splits):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    batch = AttentionBatch(rows=4, tables=BlockTables(4, 16, BLOCK_SIZE, DEVICE))
    memory = memory_of(80 * BLOCK_SIZE, 2, 128, dtype)
    q, k, v = (torch.randn(4, h, 128, device=DEVICE, dtype=dtype) for h in (8, 2, 2))
    chosen = replace(plan_launch(4, 2, 128, batch.longest, 2), splits=splits)

    def step():
        store(k, v, batch.slots_R, *memory)
        return attend(q, *memory, batch, scale=0.1, chosen=chosen)

    batch.fill([], [])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for sizes in ([(200, 1), (3, 1)], [], [(16, 1), (17, 1), (255, 1), (0, 1)]):
        spans, _, _ = spans_of(sizes)
        fill(memory, spans)
        batch.fill([span.before for span in spans], [span.block_table for span in spans])
        graph.replay()
        torch.testing.assert_close(found, reference(q, *memory, spans, BLOCK_SIZE, 0.1), rtol=2e-2, atol=2e-2)


def test_rows_between_spans_have_no_slot():
    batch = AttentionBatch.of([Span(1, 2, 15, [4, 2]), Span(5, 1, 3, [7])], BLOCK_SIZE, DEVICE)
    assert batch.slots_R.tolist() == [-1, 79, 32, -1, -1, 115]


BATCHES = (
    [(0, 40), (7, 1), (16, 30)],
    [(3, 1)],
    [],
    [(0, 64), (15, 1), (0, 1), (31, 2), (100, 17)],
    [(63, 65), (16, 1)],
)


def mixed_batch():
    batch = AttentionBatch(rows=128, tables=BlockTables(128, 9, BLOCK_SIZE, DEVICE), decodes=3, prefills=4)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return (
        batch,
        memory_of(80 * BLOCK_SIZE, 2, 64, dtype),
        [torch.randn(128, h, 64, device=DEVICE).to(dtype) for h in (4, 2, 2)],
    )


def check_refilled(step, batch, memory, q):
    """`step` attends over each of several batches; rows of no span are not compared."""
    for sizes in BATCHES:
        spans, rows, _ = spans_of(sizes)
        fill(memory, spans)
        batch.fill_spans(spans)
        found = step()
        tolerance = TOLERANCE[q.dtype]
        expected = reference(q, *memory, spans, BLOCK_SIZE, 0.125)
        torch.testing.assert_close(found[:rows], expected[:rows], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 3])
def test_spans_of_any_number_of_rows_are_refilled_in_place(splits):
    torch.manual_seed(0)
    batch, memory, (q, k, v) = mixed_batch()
    chosen = replace(plan_launch(3, 2, 64, batch.longest, q.element_size()), splits=splits)

    def step():
        store(k, v, batch.slots_R, *memory)
        return attend(q, *memory, batch, scale=0.125, chosen=chosen)

    check_refilled(step, batch, memory, q)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph")
@pytest.mark.parametrize("splits", [1, 3])
def test_a_graph_serves_other_spans_when_replayed(splits):
    torch.manual_seed(0)
    batch, memory, (q, k, v) = mixed_batch()
    chosen = replace(plan_launch(3, 2, 64, batch.longest, 2), splits=splits)

    def step():
        store(k, v, batch.slots_R, *memory)
        return attend(q, *memory, batch, scale=0.125, chosen=chosen)

    batch.fill_spans([])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay():
        graph.replay()
        return found

    check_refilled(replay, batch, memory, q)
