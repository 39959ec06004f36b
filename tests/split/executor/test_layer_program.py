"""Calls onward: layers, norms and sums one after the other give what each by itself gives, and nothing else is let in."""

from __future__ import annotations

import pytest
import torch

from symbiosis.split.executor.layers import Matrix
from symbiosis.transport.messages import MAX_LAYERS, Kind
from symbiosis.types import Direction, ProgramOp
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, NORM, OTHER, WIDE, WIDTH, Desk

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


def ask(desk: Desk, peer, program, *tensors: torch.Tensor, direction: Direction = Direction.PROGRAM, **more) -> None:
    desk.say(peer, Kind.CALL, layers=tuple(program), direction=direction, tensors=tensors, **more)


def alone(desk: Desk, layer: int, x: torch.Tensor) -> torch.Tensor:
    return desk.layers[layer].forward((x,))[0]


def by_hand(desk: Desk, x: torch.Tensor, change: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
    total = total + (alone(desk, LINEAR, x) + change)
    total = total + alone(desk, BLOCK, alone(desk, NORM, total))
    end = alone(desk, NORM, total)
    return [end, total, alone(desk, LINEAR, end), alone(desk, OTHER, end)]


@torch.no_grad()
def test_a_way_gives_what_its_steps_give():
    desk = Desk()
    peer, tensors = desk.tenant(), [rows(seed=seed) for seed in range(3)]
    ask(desk, peer, LLAMA, *tensors)
    assert desk.run() == 1
    for found, expected in zip(desk.answer(peer).tensors, by_hand(desk, *tensors), strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_tenants_go_the_same_way_together_and_none_sees_anothers_rows():
    desk = Desk()
    peers = [desk.tenant(name) for name in ("ann", "bob", "eve")]
    tensors = [[rows(n + 1, seed=10 * n + i) for i in range(3)] for n in range(3)]
    tensors[2][1][0, 0] = float("nan")
    for peer, own in zip(peers, tensors, strict=True):
        ask(desk, peer, LLAMA, *own)
    assert desk.run() == 1
    for peer, own in zip(peers, tensors, strict=True):
        for found, expected in zip(desk.answer(peer).tensors, by_hand(desk, *own), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert peer is peers[2] or found.isfinite().all()


@torch.no_grad()
def test_float32_is_added_before_rounding():
    desk = Desk()
    peer, x, change = desk.tenant(), rows().bfloat16(), rows(seed=1)
    weight = desk.layers[LINEAR].weights["weight"].bfloat16()
    desk.layers[LINEAR] = Matrix(desk.layers[LINEAR].spec, {"weight": weight})
    ask(desk, peer, (LINEAR, ADD_FLOAT), x, change)
    desk.run()
    (found,) = desk.answer(peer).tensors
    assert torch.equal(found, (x @ weight.T + change).bfloat16())


def half_by_hand(desk: Desk, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Half a layer's end and what is saved; gradients of all it starts from; that of its end."""
    with torch.enable_grad():
        x, change, residual = (tensor.clone().requires_grad_() for tensor in tensors)
        total = alone(desk, LINEAR, x) + change + residual
        end = total + alone(desk, BLOCK, alone(desk, NORM, total))
        grad = rows(len(x), seed=99)
        return [end.detach(), total.detach()], list(torch.autograd.grad(end, (x, change, residual), grad)), grad


def test_half_a_layer_and_its_way_home_give_what_autograd_gives():
    desk = Desk()
    peers = [desk.tenant(name) for name in ("ann", "bob")]
    expected = [half_by_hand(desk, *(rows(n + 2, seed=10 * n + i) for i in range(3))) for n in range(2)]
    for n, peer in enumerate(peers):
        ask(desk, peer, HALF, *(rows(n + 2, seed=10 * n + i) for i in range(3)), training=True)
    assert desk.run() == 1
    for peer, (results, _, grad) in zip(peers, expected, strict=True):
        found = desk.answer(peer).tensors
        torch.testing.assert_close(list(found), results, rtol=1e-5, atol=1e-5)
        ask(desk, peer, HALF, found[1], grad, direction=Direction.PROGRAM_BACKWARD, training=True)
    assert desk.run() == 1
    for peer, (_, (first, change, residual), _) in zip(peers, expected, strict=True):
        found = desk.answer(peer).tensors
        torch.testing.assert_close(list(found), [first, change], rtol=1e-4, atol=1e-5)
        assert torch.equal(change, residual)


@pytest.mark.parametrize(
    ("program", "count", "words"),
    [
        ((LINEAR, ADD, PUSH, NORM, BLOCK, ADD_SAVED), 2, "half a layer"),
        ((LINEAR,), 2, "half a layer"),
        ((), 2, "begins with a layer"),
        (HALF, 1, "takes 2 tensors"),
        (HALF, 3, "takes 2 tensors"),
        ((99, *HALF[1:]), 2, "no layer 99"),
    ],
)
def test_there_is_no_way_home_but_from_half_a_layer(program, count, words):
    desk = Desk()
    peer = desk.tenant()
    ask(desk, peer, program, *(rows(seed=i) for i in range(count)), direction=Direction.PROGRAM_BACKWARD)
    answer = desk.answer(peer)
    assert answer.kind is Kind.ERROR
    assert words in answer.body["message"]


def test_a_way_home_of_many_rows_is_refused_too():
    desk = Desk(max_rows=100)
    peer = desk.tenant()
    for count, kind in ((14, Kind.REPLY), (15, Kind.ERROR)):
        ask(desk, peer, HALF, rows(count), rows(count), direction=Direction.PROGRAM_BACKWARD)
        desk.run()
        assert desk.answer(peer).kind is kind


@pytest.mark.parametrize(
    ("program", "count", "words"),
    [
        ((), 1, "begins with a layer"),
        ((ADD, LINEAR), 2, "begins with a layer"),
        ((HEADS, LINEAR), 1, "begins with a layer"),
        ((LINEAR, ADD_SAVED), 1, "kept"),
        ((LINEAR, PUSH, OTHER, ADD_SAVED), 1, "kept"),
        ((LINEAR, HEADS, LINEAR, HEADS, LINEAR), 1, "read"),
        ((LINEAR, HEADS, NORM), 1, "read"),
        ((LINEAR, HEADS, ADD), 2, "read"),
        ((OTHER, LINEAR), 1, "width"),
        ((WIDE, HEADS, LINEAR), 1, "width"),
        ((EXPERTS,), 1, "on the way"),
        ((LINEAR, EXPERTS), 1, "on the way"),
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
def test_ways_that_lead_nowhere_are_refused(program, count, words):
    desk = Desk()
    peer = desk.tenant()
    ask(desk, peer, program, *(rows(seed=i) for i in range(count)))
    answer = desk.answer(peer)
    assert answer.kind is Kind.ERROR
    assert words in answer.body["message"]
    ask(desk, peer, (LINEAR,), rows())
    desk.run()
    assert desk.answer(peer).kind is Kind.REPLY


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
def test_rows_that_do_not_fit_a_way_are_refused(tensors, more):
    desk = Desk()
    peer = desk.tenant()
    ask(desk, peer, (LINEAR, ADD), *tensors, **more)
    assert desk.answer(peer).kind is Kind.ERROR


def test_a_long_way_of_many_rows_is_refused_since_everybody_would_wait_for_it():
    desk = Desk(max_rows=100)
    peer = desk.tenant()
    for count, kind in ((25, Kind.REPLY), (26, Kind.ERROR)):
        ask(desk, peer, (LINEAR, NORM, LINEAR, NORM), rows(count))
        desk.run()
        assert desk.answer(peer).kind is kind


def test_turns_mean_nothing_in_other_directions_and_norms_have_no_backward():
    desk = Desk()
    peer = desk.tenant()
    for layers, back in [((LINEAR, ADD), False), ((PUSH,), False), ((NORM,), True), ((NORM, LINEAR), False)]:
        desk.call(peer, rows(), layers=layers, back=back)
        assert desk.answer(peer).kind is Kind.ERROR


def test_inventing_ways_costs_no_memory_for_ever():
    desk = Desk()
    peer = desk.tenant()
    for number in range(6000):
        bits = f"{number:013b}"
        ask(desk, peer, (LINEAR, *(PUSH if bit == "1" else NORM for bit in bits))[:MAX_LAYERS], rows(1))
        desk.run()
        assert desk.answer(peer).kind is Kind.REPLY
        ask(desk, peer, (LINEAR, *(ADD,) * (number % 10), *HALF[3:]), rows(1), rows(1), direction=Direction.PROGRAM_BACKWARD)
        desk.run()
        assert desk.answer(peer).kind is Kind.REPLY
    assert desk.service._way.cache_info().currsize <= 4096
    assert desk.service._way_home.cache_info().currsize <= 4096
    assert len(desk.service._costs._parts) <= 4096
