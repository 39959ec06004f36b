"""The kernels against their plain reference. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels.lora.deferred import add_deferred
from symbiosis.kernels.lora.fused_widths import FusedWidths
from symbiosis.kernels.lora.shrink_expand import (
    EMPTY_ENTRY,
    LaunchPlan,
    LoraBatch,
    LoraOperand,
    add_lora,
    expand,
    expand_deferred,
    reference,
    shrink,
    tile_rows,
)
from symbiosis.kernels.tiles import Segment, Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
# Triton's interpreter cuts bfloat16 instead of rounding
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def adapters(ranks, width, widths, dtype, dora_slots=()):
    """By slot and member; rank 0 is no delta."""
    operands = [
        [
            LoraOperand(
                random(rank, width, dtype=dtype, scale=width**-0.5),
                random(out, rank, dtype=dtype, scale=rank**-0.5),
                1 + random(out, dtype=dtype, scale=0.1) if slot in dora_slots else None,
            )
            if rank
            else None
            for rank, out in zip(of_members, widths, strict=True)
        ]
        for slot, of_members in enumerate(ranks)
    ]
    table = torch.tensor([[EMPTY_ENTRY if c is None else c.entry() for c in of_members] for of_members in operands])
    return operands, table.to(DEVICE)


def check(segments, ranks, *, rows, width, widths, dtype=torch.float32, dora_slots=(), bias=False, tile=None, chosen=None):
    torch.manual_seed(0)
    operands, table = adapters(ranks, width, widths, dtype, dora_slots)
    x, y = random(rows, width, dtype=dtype), random(rows, sum(widths), dtype=dtype)
    base_bias = random(sum(widths), dtype=dtype) if bias else None
    expected = y.clone()
    reference(x, expected, segments, operands, widths, base_bias)
    max_rank = max(16, -(-max(max(r) for r in ranks) // 16) * 16)
    tiles = Tiles.of(segments, tile or tile_rows(rows, len(segments), max_rank), DEVICE, reach=rows)
    work, plain = LoraBatch(tiles, rows, width, FusedWidths(widths, DEVICE), max_rank, chosen), y.clone()
    add_lora(x, y, table, work, base_bias)
    torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    work.allocate_delta()
    shrink(x, table, work, on_other_stream=True)
    add_deferred(plain, expand_deferred(table, work, like=x, base_bias_O=base_bias), work.members)
    assert torch.equal(plain, y), "a deferred delta is the same"
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 20, 24, 64, 100])
@pytest.mark.parametrize("count", [1, 3])
def test_any_rank_and_width(rank, count, dtype):
    segments = [Segment(0, 1, count), Segment(1, 1 + count, count)]
    check(segments, [[rank], [rank]], rows=8, width=600, widths=[530], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [20, 33, 64, 300])
@pytest.mark.parametrize("rank", [36, 64])
def test_many_rows_of_one_adapter(rank, rows, dtype):
    check([Segment(0, 0, rows - 1)], [[rank, rank]], rows=rows, width=300, widths=[530, 16], dtype=dtype)


@pytest.mark.parametrize(("width", "out"), [(16, 16), (513, 77), (1024, 512), (100, 1030)])
def test_widths_that_do_not_fill_blocks(width, out):
    check([Segment(0, 0, 1), Segment(1, 1, 5)], [[8], [24]], rows=6, width=width, widths=[out])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_ranks_and_members_of_unequal_width_in_one_batch(dtype):
    ranks = [[8, 8, 8], [16, 0, 40], [0, 0, 0], [128, 5, 16]]
    segments = [Segment(0, 0, 1), Segment(1, 1, 1), Segment(-1, 2, 3), Segment(3, 5, 18), Segment(2, 23, 2), Segment(1, 25, 2)]
    check(segments, ranks, rows=27, width=256, widths=[256, 64, 64], dtype=dtype)


def test_rows_of_no_adapter_are_left_alone():
    y = check([Segment(-1, 0, 4)], [[16]], rows=4, width=64, widths=[64])
    torch.manual_seed(0)
    adapters([[16]], 64, [64], torch.float32)
    random(4, 64)
    assert torch.equal(y, random(4, 64))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dora_outputs(bias, dtype):
    segments = [Segment(0, 0, 1), Segment(1, 1, 1), Segment(1, 2, 6), Segment(0, 8, 2)]
    check(segments, [[16, 0], [8, 24]], rows=10, width=64, widths=[96, 40], dtype=dtype, dora_slots=[1], bias=bias)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_prefill_and_decode_rows_in_one_batch(tile):
    segments = [Segment(0, 0, 1), Segment(1, 1, 1), Segment(0, 2, 150), Segment(1, 152, 33)]
    check(segments, [[16, 8], [40, 0]], rows=190, width=320, widths=[200, 136], tile=tile)


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("rank_programs", [1, 3])
@pytest.mark.parametrize("tile", [1, 2, 16])
@pytest.mark.parametrize(("ranks", "blocks"), [((70, 32), 1), ((48, 32), 2)])
def test_other_plans_give_the_same(splits, rank_programs, tile, ranks, blocks):
    block_k = 256 // splits if tile <= 2 and splits != 3 else 128 if tile <= 2 else 32
    chosen = LaunchPlan(splits=splits, rank_programs=rank_programs, block_k=block_k, block_n=32, blocks=blocks)
    operands = [[rank] for rank in ranks]
    check([Segment(0, 0, 1), Segment(1, 1, 7)], operands, rows=8, width=200, widths=[100], tile=tile, chosen=chosen)


def test_tiles_are_filled_again_in_place_and_the_rest_is_idle():
    tiles = Tiles(4, 16, DEVICE)
    at = tiles.device_3T.data_ptr()
    tiles.fill([Segment(2, 0, 20), Segment(-1, 20, 3), Segment(1, 23, 1)])
    assert tiles.device_3T.T.tolist() == [[2, 0, 16], [2, 16, 4], [1, 23, 1], [-1, 0, 0]]
    tiles.fill([])
    assert tiles.device_3T.T.tolist() == [[-1, 0, 0]] * 4
    assert tiles.device_3T.data_ptr() == at
    with pytest.raises(ValueError, match="5 needed"):
        tiles.fill([Segment(0, 0, 80)])


def test_rows_and_outputs_that_are_parts_of_larger_tensors():
    torch.manual_seed(0)
    operands, tables = adapters([[16, 16, 8], [8, 8, 8]], 64, [48, 48, 48], torch.float32)
    x, y = random(6, 200)[:, 32:96], random(6, 300)[:, 16 : 16 + 48]
    expected, segments = y.clone(), [Segment(0, 0, 1), Segment(1, 1, 4)]
    reference(x, expected, segments, [[of[1]] for of in operands], [48])
    add_lora(x, y, tables[:, 1:2], LoraBatch(Tiles.of(segments, 16, DEVICE), 6, 64, FusedWidths([48], DEVICE), 16))
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_weights_that_cannot_be_read_in_place_are_rejected():
    with pytest.raises(ValueError, match="contiguous"):
        LoraOperand(random(64, 16).T, random(8, 16)).entry()
    with pytest.raises(ValueError, match="16 bytes"):
        LoraOperand(random(16 * 64 + 1)[1:].view(16, 64), random(8, 16)).entry()
    with pytest.raises(ValueError, match="ranks or dtypes differ"):
        LoraOperand(random(16, 64), random(8, 8)).entry()


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph")
@pytest.mark.parametrize("mode", ["one stream", "two streams", "deferred"])
@pytest.mark.parametrize("tile", [2, 16])
def test_a_graph_serves_other_adapters_and_rows_when_replayed(tile, mode):
    torch.manual_seed(0)
    width, widths, dtype = 512, [512, 128], torch.bfloat16
    operands, table = adapters([[16, 8], [64, 0], [24, 24]], width, widths, dtype)
    x, y, tiles, members = (
        random(8, width, dtype=dtype),
        random(8, 640, dtype=dtype),
        Tiles(8, tile, DEVICE, reach=8),
        FusedWidths(widths, DEVICE),
    )
    work = LoraBatch(tiles, 8, width, members, 64)
    start, other = y.clone(), torch.cuda.Stream()
    work.allocate_delta()

    def compute() -> None:
        if mode == "one stream":
            add_lora(x, y, table, work)
            return
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            shrink(x, table, work, on_other_stream=True)
            deferred = expand_deferred(table, work, like=x) if mode == "deferred" else None
        y.mul_(1.0)  # stands in for the layer's own product
        here.wait_stream(other)
        if deferred is not None:
            add_deferred(y, deferred, members)
        else:
            expand(y, table, work)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    for segments in ([Segment(0, 0, 8)], [Segment(1, 0, 1), Segment(2, 1, 1), Segment(0, 4, 3)], []):
        y.copy_(start)
        expected = start.clone()
        reference(x, expected, segments, operands, widths)
        tiles.fill(segments)
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
