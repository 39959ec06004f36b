"""A layer program returns what its steps return one by one; invalid programs are rejected."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor.layers import Matrix
from symbiosis.transport.messages import MAX_LAYERS, Kind
from symbiosis.types import Direction, ProgramOp
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, NORM, OTHER, WIDE, WIDTH, ServiceBench

ADD, ADD_FLOAT, PUSH, SAVE, ADD_SAVED, HEADS = (
    ProgramOp.ADD,
    ProgramOp.ADD_FLOAT,
    ProgramOp.PUSH,
    ProgramOp.SAVE,
    ProgramOp.ADD_SAVED,
    ProgramOp.HEADS,
)
LLAMA = (LINEAR, ADD, ADD, PUSH, NORM, BLOCK, ADD_SAVED, NORM, HEADS, LINEAR, OTHER)
HALF = (LINEAR, ADD, ADD_FLOAT, SAVE, NORM, BLOCK, ADD_SAVED)


def rows(count: int = 3, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def send_program(
    bench: ServiceBench, peer, program, *tensors: torch.Tensor, direction: Direction = Direction.PROGRAM, **more
) -> None:
    bench.send(peer, Kind.CALL, layers=tuple(program), direction=direction, tensors=tensors, **more)


def run_layer(bench: ServiceBench, layer: int, x: torch.Tensor) -> torch.Tensor:
    return bench.layers[layer].forward((x,))[0]


def by_hand(bench: ServiceBench, x: torch.Tensor, change: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
    total = total + (run_layer(bench, LINEAR, x) + change)
    total = total + run_layer(bench, BLOCK, run_layer(bench, NORM, total))
    end = run_layer(bench, NORM, total)
    return [end, total, run_layer(bench, LINEAR, end), run_layer(bench, OTHER, end)]


@torch.no_grad()
def test_a_program_returns_what_its_steps_return():
    bench = ServiceBench()
    peer, tensors = bench.connect(), [rows(seed=seed) for seed in range(3)]
    send_program(bench, peer, LLAMA, *tensors)
    assert bench.run() == 1
    for found, expected in zip(bench.reply_to(peer).tensors, by_hand(bench, *tensors), strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_programs_of_several_tenants_share_a_batch_and_stay_isolated():
    bench = ServiceBench()
    peers = [bench.connect(name) for name in ("ann", "bob", "eve")]
    tensors = [[rows(n + 1, seed=10 * n + i) for i in range(3)] for n in range(3)]
    tensors[2][1][0, 0] = float("nan")
    for peer, own in zip(peers, tensors, strict=True):
        send_program(bench, peer, LLAMA, *own)
    assert bench.run() == 1
    for peer, own in zip(peers, tensors, strict=True):
        for found, expected in zip(bench.reply_to(peer).tensors, by_hand(bench, *own), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert peer is peers[2] or found.isfinite().all()


@torch.no_grad()
def test_float32_is_added_before_rounding():
    bench = ServiceBench()
    peer, x, change = bench.connect(), rows().bfloat16(), rows(seed=1)
    weight = bench.layers[LINEAR].weights["weight"].bfloat16()
    bench.layers[LINEAR] = Matrix(bench.layers[LINEAR].spec, {"weight": weight})
    send_program(bench, peer, (LINEAR, ADD_FLOAT), x, change)
    bench.run()
    (found,) = bench.reply_to(peer).tensors
    assert torch.equal(found, (x @ weight.T + change).bfloat16())


def half_by_hand(bench: ServiceBench, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The results of half a layer; the gradients of its inputs; the gradient of its end."""
    with torch.enable_grad():
        x, change, residual = (tensor.clone().requires_grad_() for tensor in tensors)
        total = run_layer(bench, LINEAR, x) + change + residual
        end = total + run_layer(bench, BLOCK, run_layer(bench, NORM, total))
        grad = rows(len(x), seed=99)
        return [end.detach(), total.detach()], list(torch.autograd.grad(end, (x, change, residual), grad)), grad


def test_half_a_layer_and_its_backward_program_match_autograd():
    bench = ServiceBench()
    peers = [bench.connect(name) for name in ("ann", "bob")]
    expected = [half_by_hand(bench, *(rows(n + 2, seed=10 * n + i) for i in range(3))) for n in range(2)]
    for n, peer in enumerate(peers):
        send_program(bench, peer, HALF, *(rows(n + 2, seed=10 * n + i) for i in range(3)), training=True)
    assert bench.run() == 1
    for peer, (results, _, grad) in zip(peers, expected, strict=True):
        found = bench.reply_to(peer).tensors
        torch.testing.assert_close(list(found), results, rtol=1e-5, atol=1e-5)
        send_program(bench, peer, HALF, found[1], grad, direction=Direction.PROGRAM_BACKWARD, training=True)
    assert bench.run() == 1
    for peer, (_, (first, change, residual), _) in zip(peers, expected, strict=True):
        found = bench.reply_to(peer).tensors
        torch.testing.assert_close(list(found), [first, change], rtol=1e-4, atol=1e-5)
        assert torch.equal(change, residual)


@pytest.mark.parametrize(
    ("program", "count", "text"),
    [
        ((LINEAR, ADD, PUSH, NORM, BLOCK, ADD_SAVED), 2, "half a layer"),
        ((LINEAR,), 2, "half a layer"),
        ((), 2, "begins with a layer"),
        (HALF, 1, "takes 2 tensors"),
        (HALF, 3, "takes 2 tensors"),
        ((99, *HALF[1:]), 2, "no layer 99"),
    ],
)
def test_a_backward_program_exists_for_half_a_layer_only(program, count, text):
    bench = ServiceBench()
    peer = bench.connect()
    send_program(bench, peer, program, *(rows(seed=i) for i in range(count)), direction=Direction.PROGRAM_BACKWARD)
    reply = bench.reply_to(peer)
    assert reply.kind is Kind.ERROR
    assert text in reply.body["message"]


def test_the_rows_of_a_backward_program_are_bounded():
    bench = ServiceBench(max_rows=100)
    peer = bench.connect()
    for count, kind in ((14, Kind.REPLY), (15, Kind.ERROR)):
        send_program(bench, peer, HALF, rows(count), rows(count), direction=Direction.PROGRAM_BACKWARD)
        bench.run()
        assert bench.reply_to(peer).kind is kind


@pytest.mark.parametrize(
    ("program", "count", "text"),
    [
        ((), 1, "begins with a layer"),
        ((ADD, LINEAR), 2, "begins with a layer"),
        ((HEADS, LINEAR), 1, "begins with a layer"),
        ((LINEAR, ADD_SAVED), 1, "ADD_SAVED takes"),
        ((LINEAR, PUSH, OTHER, ADD_SAVED), 1, "ADD_SAVED takes"),
        ((LINEAR, HEADS, LINEAR, HEADS, LINEAR), 1, "follow HEADS"),
        ((LINEAR, HEADS, NORM), 1, "follow HEADS"),
        ((LINEAR, HEADS, ADD), 2, "follow HEADS"),
        ((OTHER, LINEAR), 1, "width"),
        ((WIDE, HEADS, LINEAR), 1, "width"),
        ((EXPERTS,), 1, "consists of"),
        ((LINEAR, EXPERTS), 1, "consists of"),
        ((LINEAR, ADD), 1, "takes 2 tensors"),
        ((LINEAR, ADD), 3, "takes 2 tensors"),
        ((LINEAR,), 2, "takes 1 tensors"),
        ((LINEAR, 99), 1, "no layer 99"),
        ((LINEAR, ProgramOp.SAVE - 1), 1, "no layer"),
        ((BLOCK | 1 << 31,), 1, "no bias"),
        ((LINEAR, SAVE), 1, "half a layer"),
        ((LINEAR, SAVE, NORM, BLOCK), 1, "half a layer"),
        ((BLOCK, SAVE, NORM, BLOCK, ADD_SAVED), 1, "half a layer"),
        ((LINEAR, SAVE, NORM, LINEAR, ADD_SAVED), 1, "half a layer"),
        ((LINEAR, SAVE, BLOCK, BLOCK, ADD_SAVED), 1, "half a layer"),
        ((LINEAR, PUSH, SAVE, NORM, BLOCK, ADD_SAVED), 1, "half a layer"),
        ((LINEAR, NORM, SAVE, NORM, BLOCK, ADD_SAVED), 1, "half a layer"),
        ((*HALF[:1], *HALF[3:], HEADS, LINEAR), 1, "half a layer"),
        ((*HALF[:1], *HALF[3:], NORM), 1, "half a layer"),
    ],
)
def test_invalid_programs_are_rejected(program, count, text):
    bench = ServiceBench()
    peer = bench.connect()
    send_program(bench, peer, program, *(rows(seed=i) for i in range(count)))
    reply = bench.reply_to(peer)
    assert reply.kind is Kind.ERROR
    assert text in reply.body["message"]
    send_program(bench, peer, (LINEAR,), rows())
    bench.run()
    assert bench.reply_to(peer).kind is Kind.REPLY


@pytest.mark.parametrize(
    ("tensors", "more"),
    [
        ((rows(), rows(width=16)), {}),
        ((rows(), rows(2)), {}),
        ((rows(), torch.zeros(3, WIDTH, dtype=torch.int64)), {}),
        ((torch.zeros(3, WIDTH, dtype=torch.int64), rows()), {}),
        ((rows(), rows(seed=1)), {"training": True}),
        ((rows(0), rows(0)), {}),
    ],
)
def test_rows_that_do_not_fit_a_program_are_rejected(tensors, more):
    bench = ServiceBench()
    peer = bench.connect()
    send_program(bench, peer, (LINEAR, ADD), *tensors, **more)
    assert bench.reply_to(peer).kind is Kind.ERROR


def test_rows_times_steps_of_a_program_are_bounded():
    bench = ServiceBench(max_rows=100)
    peer = bench.connect()
    for count, kind in ((25, Kind.REPLY), (26, Kind.ERROR)):
        send_program(bench, peer, (LINEAR, NORM, LINEAR, NORM), rows(count))
        bench.run()
        assert bench.reply_to(peer).kind is kind


def test_program_ops_are_unknown_layers_in_plain_calls_and_norms_have_no_backward():
    bench = ServiceBench()
    peer = bench.connect()
    for layers, back in [((LINEAR, ADD), False), ((PUSH,), False), ((NORM,), True), ((NORM, LINEAR), False)]:
        bench.call(peer, rows(), layers=layers, back=back)
        assert bench.reply_to(peer).kind is Kind.ERROR


def test_caches_of_programs_are_bounded():
    bench = ServiceBench()
    peer = bench.connect()
    for number in range(6000):
        bits = f"{number:013b}"
        send_program(bench, peer, (LINEAR, *(PUSH if bit == "1" else NORM for bit in bits))[:MAX_LAYERS], rows(1))
        bench.run()
        assert bench.reply_to(peer).kind is Kind.REPLY
        send_program(
            bench, peer, (LINEAR, *(ADD,) * (number % 10), *HALF[3:]), rows(1), rows(1), direction=Direction.PROGRAM_BACKWARD
        )
        bench.run()
        assert bench.reply_to(peer).kind is Kind.REPLY
    assert bench.service.batcher.validator._program.cache_info().currsize <= 4096
    assert bench.service.batcher.validator._program_backward.cache_info().currsize <= 4096
    assert len(bench.service.batcher.costs._parts) <= 4096
