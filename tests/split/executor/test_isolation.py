"""Rows of one tenant never affect the results of another."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from symbiosis.transport.base import Peer
from symbiosis.transport.inproc import InprocPort, PendingReply
from symbiosis.transport.messages import Kind, Message
from tests.split.executor.service_bench import BLOCK, EXPERTS, LINEAR, OTHER, WIDE, WIDTH, ServiceBench

POISONS = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38]


def calls_of(kind: str, rows: int, seed: int):
    """(layers, backward, tensors) of one call."""
    torch.manual_seed(seed)
    x, grad = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
    weight = torch.rand(rows, 2)
    return {
        "matrix": ((LINEAR,), False, (x,)),
        "matrix back": ((LINEAR,), True, (grad,)),
        "group": ((LINEAR, OTHER), False, (x,)),
        "group back": ((LINEAR, OTHER), True, (grad, torch.randn(rows, 48))),
        "conv1d": ((WIDE,), False, (x,)),
        "block": ((BLOCK,), False, (x,)),
        "block back": ((BLOCK,), True, (x, grad)),
        "experts": ((EXPERTS,), False, (x, index, weight)),
        "experts back": ((EXPERTS,), True, (x, index, weight, grad)),
    }[kind]


KINDS = ["matrix", "matrix back", "group", "group back", "conv1d", "block", "block back", "experts", "experts back"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_poisoned_rows_do_not_change_other_results_by_a_bit(kind: str, poison: float, rows: int):
    layers, back, victim = calls_of(kind, rows, seed=1)
    _, _, harmless = calls_of(kind, 5, seed=2)
    poisoned = tuple(t.clone().fill_(poison) if t.is_floating_point() else t for t in harmless)

    def results_of_victim(other: tuple[torch.Tensor, ...], first: bool):
        bench = ServiceBench()
        ann, eve = bench.connect("ann"), bench.connect("eve")
        for peer, tensors in ((eve, other), (ann, victim)) if first else ((ann, victim), (eve, other)):
            bench.call(peer, *tensors, layers=layers, back=back)
        bench.run()
        assert bench.service.stats()["mean_batch"] == 2
        assert bench.reply_to(eve).kind is Kind.REPLY
        return bench.reply_to(ann).tensors

    for first in (True, False):
        for expected, actual in zip(results_of_victim(harmless, first), results_of_victim(poisoned, first), strict=True):
            assert torch.equal(expected, actual)
            assert torch.isfinite(actual).all()


def test_poisoned_rows_have_poisoned_results():
    bench = ServiceBench()
    eve = bench.connect("eve")
    rows = torch.randn(3, WIDTH)
    rows[1] = float("nan")
    bench.call(eve, rows)
    bench.run()
    (result,) = bench.reply_to(eve).tensors
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_batch_returns_what_single_batches_return(kind: str):
    alone, bench = ServiceBench(), ServiceBench()
    peers = [bench.connect(f"t{i}") for i in range(4)]
    expected = []
    for i, peer in enumerate(peers):
        layers, back, tensors = calls_of(kind, 3 + i, seed=i)
        bench.call(peer, *tensors, layers=layers, back=back)
        solo = alone.connect()
        alone.call(solo, *tensors, layers=layers, back=back)
        alone.run()
        expected.append(alone.reply_to(solo).tensors)
    bench.run()
    assert bench.service.stats()["batches"] == 1
    for peer, tensors in zip(peers, expected, strict=True):
        for actual, own in zip(bench.reply_to(peer).tensors, tensors, strict=True):
            torch.testing.assert_close(actual, own, rtol=1e-5, atol=1e-6)


def test_calls_that_shared_a_forward_batch_need_not_share_the_backward_batch():
    bench = ServiceBench()
    ann, bob = bench.connect("ann"), bench.connect("bob")
    x, y, grad = torch.randn(3, WIDTH), torch.randn(5, WIDTH), torch.randn(3, WIDTH)
    bench.call(ann, x, layers=(BLOCK,))
    bench.call(bob, y, layers=(BLOCK,))
    bench.run()
    together = bench.reply_to(ann).tensors[0]
    bench.call(ann, x, grad, layers=(BLOCK,), back=True)
    bench.run()
    x = x.clone().requires_grad_()
    plain = bench.layers[BLOCK].module(x)
    torch.testing.assert_close(together, plain.detach(), rtol=1e-5, atol=1e-6)
    (expected,) = torch.autograd.grad(plain, x, grad)
    torch.testing.assert_close(bench.reply_to(ann).tensors[0], expected, rtol=1e-5, atol=1e-6)
    bench.reply_to(bob)


def test_calls_of_different_dtypes_share_a_batch_and_results_keep_their_dtype():
    bench = ServiceBench()
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    peers = [bench.connect() for _ in dtypes]
    rows = torch.randn(3, WIDTH)
    for peer, dtype in zip(peers, dtypes, strict=True):
        bench.call(peer, rows.to(dtype))
    bench.run()
    assert bench.service.stats()["batches"] == 1
    for peer, dtype in zip(peers, dtypes, strict=True):
        (result,) = bench.reply_to(peer).tensors
        assert result.dtype is dtype
        expected = rows.to(dtype).float() @ bench.layers[LINEAR].weights["weight"].t()
        torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_no_views_of_weights(kind: str):
    bench = ServiceBench()
    peers = [bench.connect(f"t{i}") for i in range(3)]
    for i, peer in enumerate(peers):
        layers, back, tensors = calls_of(kind, 4, seed=i)
        bench.call(peer, *tensors, layers=layers, back=back)
    bench.run()
    places = [t.untyped_storage().data_ptr() for peer in peers for t in bench.reply_to(peer).tensors]
    weights = [w.untyped_storage().data_ptr() for layer in bench.layers for w in layer.weights.values()]
    assert not set(places) & set(weights)


def test_replies_over_the_inproc_link_do_not_share_memory():
    port, batch = InprocPort(), torch.arange(12.0).view(6, 2)
    results = []
    for rows in (batch[:3], batch[3:], batch.t()):
        port.submit(Peer(port, b"", None), asked := Message(Kind.CALL), reply := PendingReply())
        assert port.reply(Peer(port, b"", None), Message(Kind.REPLY, asked.request, tensors=(rows,)))
        (got,) = reply.wait().tensors
        assert got.is_contiguous()
        assert torch.equal(got, rows)
        results.append(got)
    places = {tensor.untyped_storage().data_ptr() for tensor in (batch, *results)}
    assert len(places) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_a_call_outlives_its_reply(kind: str):
    bench = ServiceBench()
    peers = [bench.connect(f"t{i}") for i in range(2)]
    traces = []
    for i, peer in enumerate(peers):
        layers, back, tensors = calls_of(kind, 6, seed=i)
        bench.call(peer, *tensors, layers=layers, back=back)
        traces += [weakref.ref(t) for t in tensors]
    del tensors
    bench.run()
    traces += [weakref.ref(t) for peer in peers for t in bench.reply_to(peer).tensors]
    gc.collect()
    assert [trace for trace in traces if trace() is not None] == []


def held(tenants: int, rows: int) -> tuple[int, int]:
    """Bytes of live tensors after calls of this many tenants and rows, and `bytes_held` of the service."""
    bench = ServiceBench()
    peers = [bench.connect(f"t{i}") for i in range(tenants)]
    for back, peer in itertools.product((False, True), peers):
        bench.call(peer, torch.randn(rows, WIDTH), back=back)
        bench.run()
        bench.reply_to(peer)
    gc.collect()
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _reachable_tensors(bench.service)}
    return sum(alive.values()), bench.service.stats()["bytes_held"]


def _reachable_tensors(root: object) -> list[torch.Tensor]:
    seen, todo, found = set(), [root], []
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type) or type(thing).__name__ in ("module", "function", "method"):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        else:
            todo.extend(gc.get_referents(thing))
    return found


def test_memory_of_the_executor_depends_neither_on_tenants_nor_on_rows():
    figures = {held(tenants, rows) for tenants, rows in itertools.product((1, 8), (64, 2048))}
    assert len(figures) == 1
    reachable, reported = figures.pop()
    assert reachable == reported
