"""Kernels that add a change by themselves against `expand` and their plain references. Without a GPU: TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels import residual_norm, rope_and_store, silu_mul
from symbiosis.kernels.lora.shrink_expand import NOTHING, FusedWidths, LoraBatch, LoraOperand, expand, low_rank, shrink, spread
from symbiosis.kernels.tiles import Segment, Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS, WIDTH, RANK = 5, 48, 8
# whose each row is: the second adapter is of DoRA, the third leaves the last layer alone; nobody's rows are between
SEGMENTS = [Segment(0, 0, 1), Segment(1, 1, 1), Segment(2, 3, 1), Segment(0, 4, 1)]


def random(*shape, dtype, scale=1.0):
    return (scale * torch.randn(shape)).to(DEVICE, dtype)


def changed(widths, dtype, bias):
    """A result, what is kept beside it, and both together."""
    torch.manual_seed(0)
    changes = [
        [
            LoraOperand(
                random(RANK, WIDTH, dtype=dtype, scale=WIDTH**-0.5),
                random(width, RANK, dtype=dtype, scale=RANK**-0.5),
                1 + random(width, dtype=dtype, scale=0.1) if slot == 1 else None,
            )
            for width in widths
        ]
        for slot in range(3)
    ]
    lines = [[change.entry() for change in of_members] for of_members in changes]
    if len(widths) > 1:
        lines[2][-1] = NOTHING
    table = torch.tensor(lines).to(DEVICE)
    x, y = random(ROWS, WIDTH, dtype=dtype), random(ROWS, sum(widths), dtype=dtype)
    own_bias = random(sum(widths), dtype=dtype) if bias else None
    work = LoraBatch(Tiles.of(SEGMENTS, 2, DEVICE, reach=ROWS), ROWS, WIDTH, FusedWidths(widths, DEVICE), 16)
    together = y.clone()
    low_rank(x, together, table, work, own_bias)
    assert not torch.equal(together, y)
    work.make_room()
    work.change_RO.fill_(float("nan"))  # what is there of rows that nobody changes is not read
    shrink(x, table, work, apart=True)
    return y, spread(table, work, like=x, own_bias_O=own_bias), together, changes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_residual_and_norm(twice, bias, dtype):
    y, kept, together, _alive = changed([100], dtype, bias)
    x, weight = random(ROWS, 200, dtype=dtype)[:, :100], random(100, dtype=dtype)
    for given, result in ((None, y), (kept, together)):
        total, norm = residual_norm.residual_norm(x, y, weight, 1e-5, twice=twice, kept=given)
        expected = residual_norm.reference(x, result, weight, 1e-5, twice=twice)
        assert torch.equal(total, expected[0])
        torch.testing.assert_close(norm, expected[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up(bias, dtype):
    y, kept, together, _alive = changed([70, 70], dtype, bias)
    found = silu_mul.gated(*y.chunk(2, dim=1), kept)
    assert torch.equal(found, silu_mul.gated(*together.chunk(2, dim=1)))
    gate, up = together.chunk(2, dim=1)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 16), (3, 3, 10), (14, 2, 128)])
def test_queries_keys_and_values(heads, key_heads, width, bias, dtype):
    y, kept, together, _alive = changed([heads * width, key_heads * width, key_heads * width], dtype, bias)
    angles = torch.randn(ROWS, width, device=DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([7, 2, -1, 0, 5], dtype=torch.int32, device=DEVICE)
    start = random(2, 9, key_heads, width, dtype=dtype)
    for given, result in ((None, y), (kept, together)):
        memory, expected_memory = start.clone(), start.clone()
        found = rope_and_store.enter(y, cos, sin, slots, *memory, given)
        expected = rope_and_store.reference(result, cos, sin, slots, *expected_memory)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(memory, expected_memory, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        untouched = [1, 3, 4, 6, 8]
        assert torch.equal(memory[:, untouched], start[:, untouched])


def test_no_rows():
    empty = torch.empty(0, 64, device=DEVICE)
    assert [t.shape[0] for t in residual_norm.residual_norm(empty, empty, empty.new_ones(64), 1e-5, twice=True)] == [0, 0]
    keys = torch.zeros(4, 1, 16, device=DEVICE)
    none = torch.empty(0, 16, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert rope_and_store.enter(empty, none, none, slots, keys, keys.clone()).shape == (0, 2, 16)


@pytest.mark.skipif(DEVICE == "cpu", reason="streams are a GPU's")
@pytest.mark.parametrize("late", ["change", "result"])
@pytest.mark.parametrize("consumer", ["residual", "gate", "expand"])
def test_whoever_adds_it_waits_for_both_streams(consumer, late):
    """Also in a graph, where it is launched before they have ended."""
    width, out, dtype = 512, 512, torch.bfloat16
    widths = [out // 2] * 2 if consumer == "gate" else [out]
    changes = [
        [LoraOperand(random(8, width, dtype=dtype, scale=0.1), random(w, 8, dtype=dtype)) for w in widths] for _ in range(4)
    ]
    table = torch.tensor([[each.entry() for each in of_members] for of_members in changes]).to(DEVICE)
    tiles = Tiles.of([Segment(n, n, 1) for n in range(4)], 2, DEVICE, reach=4)
    work, other = LoraBatch(tiles, 4, width, FusedWidths(widths, DEVICE), 16), torch.cuda.Stream()
    work.make_room()
    x, weight = random(4, width, dtype=dtype), random(width, out, dtype=dtype, scale=0.1)

    def wait(who):
        if late == who:
            torch.cuda._sleep(300_000)

    def compute(apart):
        here = torch.cuda.current_stream()
        if apart:
            other.wait_stream(here)
            with torch.cuda.stream(other):
                wait("change")
                shrink(x, table, work, apart=True)
                kept = spread(table, work, like=x) if consumer != "expand" else None
        wait("result")
        y = x @ weight
        if apart:
            here.wait_stream(other)
        else:
            kept = None
            low_rank(x, y, table, work)
        if consumer == "gate":
            return silu_mul.gated(*y.chunk(2, dim=1), kept)
        if apart and consumer == "expand":
            expand(y, table, work)
        return residual_norm.residual_norm(x, y, x[0], 1e-5, twice=True, kept=kept)[0]

    compute(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(True)
    for _ in range(20):
        x.normal_()
        expected = compute(False).clone()
        work.change_RO.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
