"""Micro-batches in flight add up to the gradients of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.errors import SymbiosisError
from tests.conftest import Serve
from tests.lora import ALL_LINEAR, with_random_lora


def micro_batches(count: int) -> list[dict[str, torch.Tensor]]:
    data = torch.Generator().manual_seed(2)
    lengths = [5 + 3 * number for number in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in (torch.randint(0, 128, (2, n), generator=data) for n in lengths)]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["inproc", "tcp"])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), tuple(ALL_LINEAR)], ids=["q, v", "all"])
def test_gradients_and_loss_are_those_of_the_plain_loop(serve: Serve, kind: str, in_flight: int, targets):
    model, batches = with_random_lora(serve(kind).connect(), targets), micro_batches(5)
    losses = []
    for batch in batches:
        loss = model(**batch).loss / len(batches)
        loss.backward()
        losses.append(loss.detach())
    expected = gradients(model)
    model.zero_grad()
    loss = symbiosis.accumulate_gradients(model, batches, in_flight=in_flight)
    torch.testing.assert_close(loss, sum(losses), rtol=1e-5, atol=1e-6)
    assert gradients(model).keys() == expected.keys()
    for name, tensor in gradients(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


def test_gradients_are_added_to_those_there_are(serve: Serve):
    model, batches = with_random_lora(serve("inproc").connect()), micro_batches(2)
    symbiosis.accumulate_gradients(model, batches)
    once = gradients(model)
    symbiosis.accumulate_gradients(model, batches)
    for name, tensor in gradients(model).items():
        torch.testing.assert_close(tensor, 2 * once[name], rtol=1e-4, atol=1e-6)


def test_a_failure_leaves_the_gradients_as_they_were(serve: Serve):
    model, batches = with_random_lora(serve("tcp").connect()), micro_batches(4)
    symbiosis.accumulate_gradients(model, batches)
    before = gradients(model)
    wrong = {"input_ids": torch.full((1, 3), 10_000), "labels": torch.zeros(1, 3, dtype=torch.long)}
    with pytest.raises(IndexError):
        symbiosis.accumulate_gradients(model, [*batches, wrong])
    assert all(torch.equal(tensor, before[name]) for name, tensor in gradients(model).items())


def test_autocast_applies_in_every_micro_batch(serve: Serve):
    model, batches = with_random_lora(serve("inproc").connect()), micro_batches(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sum(model(**batch).loss / 3 for batch in batches).backward()
        expected = gradients(model)
        model.zero_grad()
        symbiosis.accumulate_gradients(model, batches)
    for name, tensor in gradients(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.05, atol=1e-3)


def test_wrong_arguments_are_refused(serve: Serve, tiny):
    model = with_random_lora(serve("inproc").connect())
    with pytest.raises(SymbiosisError, match="expected one micro-batch or more and in_flight >= 1, got 0 and 4"):
        symbiosis.accumulate_gradients(model, [])
    with pytest.raises(SymbiosisError, match="in_flight >= 1, got 2 and 0"):
        symbiosis.accumulate_gradients(model, micro_batches(2), in_flight=0)
    with pytest.raises(SymbiosisError, match="no parameter of the model requires a gradient"):
        symbiosis.accumulate_gradients(tiny, micro_batches(2))
