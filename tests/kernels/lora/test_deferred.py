"""Kernels that add a deferred delta, against `expand` and their plain references. Without a GPU: TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.kernels import residual_norm, rope_and_store, silu_mul
from symbiosis.kernels.lora.fused_widths import FusedWidths
from symbiosis.kernels.lora.shrink_expand import EMPTY_ENTRY, LoraBatch, LoraOperand, add_lora, expand, expand_deferred, shrink
from symbiosis.kernels.tiles import Segment, Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS, WIDTH, RANK = 5, 48, 8
# the second adapter is DoRA, the third has no weights for the last layer; row 2 has no adapter
SEGMENTS = [Segment(0, 0, 1), Segment(1, 1, 1), Segment(2, 3, 1), Segment(0, 4, 1)]


def random(*shape, dtype, scale=1.0):
    return (scale * torch.randn(shape)).to(DEVICE, dtype)


def compute_deferred(widths, dtype, bias):
    """An output, its deferred delta, and their sum."""
    torch.manual_seed(0)
    operands = [
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
    lines = [[operand.entry() for operand in of_members] for of_members in operands]
    if len(widths) > 1:
        lines[2][-1] = EMPTY_ENTRY
    table = torch.tensor(lines).to(DEVICE)
    x, y = random(ROWS, WIDTH, dtype=dtype), random(ROWS, sum(widths), dtype=dtype)
    base_bias = random(sum(widths), dtype=dtype) if bias else None
    work = LoraBatch(Tiles.of(SEGMENTS, 2, DEVICE, reach=ROWS), ROWS, WIDTH, FusedWidths(widths, DEVICE), 16)
    together = y.clone()
    add_lora(x, together, table, work, base_bias)
    assert not torch.equal(together, y)
    work.allocate_delta()
    work.delta_RO.fill_(float("nan"))  # rows without an adapter are not read
    shrink(x, table, work, on_other_stream=True)
    return y, expand_deferred(table, work, like=x, base_bias_O=base_bias), together, operands


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_residual_and_norm(twice, bias, dtype):
    y, deferred, together, _alive = compute_deferred([100], dtype, bias)
    x, weight = random(ROWS, 200, dtype=dtype)[:, :100], random(100, dtype=dtype)
    for given, result in ((None, y), (deferred, together)):
        total, norm = residual_norm.residual_norm(x, y, weight, 1e-5, twice=twice, deferred=given)
        expected = residual_norm.reference(x, result, weight, 1e-5, twice=twice)
        assert torch.equal(total, expected[0])
        torch.testing.assert_close(norm, expected[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up(bias, dtype):
    y, deferred, together, _alive = compute_deferred([70, 70], dtype, bias)
    found = silu_mul.silu_mul(*y.chunk(2, dim=1), deferred)
    assert torch.equal(found, silu_mul.silu_mul(*together.chunk(2, dim=1)))
    gate, up = together.chunk(2, dim=1)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 16), (3, 3, 10), (14, 2, 128)])
def test_queries_keys_and_values(heads, key_heads, width, bias, dtype):
    y, deferred, together, _alive = compute_deferred([heads * width, key_heads * width, key_heads * width], dtype, bias)
    angles = torch.randn(ROWS, width, device=DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([7, 2, -1, 0, 5], dtype=torch.int32, device=DEVICE)
    start = random(2, 9, key_heads, width, dtype=dtype)
    for given, result in ((None, y), (deferred, together)):
        memory, expected_memory = start.clone(), start.clone()
        found = rope_and_store.rope_and_store(y, cos, sin, slots, *memory, given)
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
    assert rope_and_store.rope_and_store(empty, none, none, slots, keys, keys.clone()).shape == (0, 2, 16)


@pytest.mark.skipif(DEVICE == "cpu", reason="streams are a GPU's")
@pytest.mark.parametrize("late", ["delta", "result"])
@pytest.mark.parametrize("consumer", ["residual", "gate", "expand"])
def test_the_kernel_that_adds_a_delta_waits_for_both_streams(consumer, late):
    """Also in a graph, where it is launched before they have ended."""
    width, out, dtype = 512, 512, torch.bfloat16
    widths = [out // 2] * 2 if consumer == "gate" else [out]
    operands = [
        [LoraOperand(random(8, width, dtype=dtype, scale=0.1), random(w, 8, dtype=dtype)) for w in widths] for _ in range(4)
    ]
    table = torch.tensor([[each.entry() for each in of_members] for of_members in operands]).to(DEVICE)
    tiles = Tiles.of([Segment(n, n, 1) for n in range(4)], 2, DEVICE, reach=4)
    work, other = LoraBatch(tiles, 4, width, FusedWidths(widths, DEVICE), 16), torch.cuda.Stream()
    work.allocate_delta()
    x, weight = random(4, width, dtype=dtype), random(width, out, dtype=dtype, scale=0.1)

    def wait(what):
        if late == what:
            torch.cuda._sleep(300_000)

    def compute(two_streams):
        here = torch.cuda.current_stream()
        if two_streams:
            other.wait_stream(here)
            with torch.cuda.stream(other):
                wait("delta")
                shrink(x, table, work, on_other_stream=True)
                deferred = expand_deferred(table, work, like=x) if consumer != "expand" else None
        wait("result")
        y = x @ weight
        if two_streams:
            here.wait_stream(other)
        else:
            deferred = None
            add_lora(x, y, table, work)
        if consumer == "gate":
            return silu_mul.silu_mul(*y.chunk(2, dim=1), deferred)
        if two_streams and consumer == "expand":
            expand(y, table, work)
        return residual_norm.residual_norm(x, y, x[0], 1e-5, twice=True, deferred=deferred)[0]

    compute(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(True)
    for _ in range(20):
        x.normal_()
        expected = compute(False).clone()
        work.delta_RO.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected)
