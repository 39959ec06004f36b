"""Flat parameters: optimizer steps and state are those of separate parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symbiosis.adapters.parts import Ia3Part
from symbiosis.errors import BadCall
from symbiosis.finetuning.adapters.flat_parameters import FlatGradients, FlatParameters, can_flatten
from symbiosis.finetuning.adapters.lora_math import TrainableLora
from symbiosis.finetuning.optimizer import FlatOptimizer, Optimizer, StepSettings


def adapter(seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "a.lora_A.weight": (3, 7),
        "a.lora_B.weight": (5, 3),
        "q_norm.lora_A.weight": (2, 5),
        "q_norm.lora_B.weight": (9, 2),
    }
    parameters = {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in shapes.items()}
    a, b, c, d = parameters.values()
    return parameters, {"a": TrainableLora(a, b, 2.0), "q_norm": TrainableLora(c, d, 0.5)}


def test_parameters_keep_their_values_and_become_views():
    parameters, parts = adapter()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    flat = FlatParameters(parameters, parts)
    assert all(torch.equal(parameters[name], before[name]) for name in before)
    flat.values_N.zero_()
    assert all(not p.any() and p.data_ptr() % 16 == flat.values_N.data_ptr() % 16 for p in parameters.values())
    assert flat.weights_P3[:, 2].tolist() == [3, 2]
    assert [parts["q_norm"].a_rI.data_ptr(), parts["q_norm"].b_Or.data_ptr()] == flat.weights_P3[1, :2].tolist()


@pytest.mark.parametrize("longest", [0.0, 0.7, 1e6])
def test_steps_are_those_of_the_reference(longest):
    (plain, _), (mine, parts) = adapter(), adapter()
    flat = FlatParameters(mine, parts)
    theirs, ours = Optimizer(plain), FlatOptimizer(flat)
    random = torch.Generator().manual_seed(1)
    for step in range(5):
        settings = StepSettings(learning_rate=0.1 / (step + 1), max_grad_norm=longest, weight_decay=0.3)
        for _ in range(2):
            gradients_N = torch.zeros_like(flat.values_N)
            gradients = FlatGradients(flat, gradients_N)
            for name in plain:
                gradients[name].copy_(torch.randn(plain[name].shape, generator=random))
            theirs.accumulate({name: g.clone() for name, g in gradients.items()})
            ours.accumulate(gradients)
        assert float(ours.step(settings)) == pytest.approx(float(theirs.step(settings)), rel=1e-6)
        if step == 2:  # the state can be restored into another optimizer
            kept = ours.state()
            assert {name: each.shape for name, each in kept.items()} == {n: each.shape for n, each in theirs.state().items()}
            ours = FlatOptimizer(flat)
            ours.restore(kept)
    for name in plain:
        torch.testing.assert_close(mine[name], plain[name], rtol=1e-5, atol=1e-6)


def test_a_nan_gradient_changes_nothing():
    parameters, parts = adapter()
    flat = FlatParameters(parameters, parts)
    optimizer, before = FlatOptimizer(flat), flat.values_N.clone()
    with pytest.raises(BadCall):
        optimizer.step(StepSettings())
    gradients_N = torch.ones_like(before)
    gradients_N[3] = float("nan")
    optimizer.accumulate(FlatGradients(flat, gradients_N))
    assert optimizer.step(StepSettings()).isnan()
    assert torch.equal(flat.values_N, before)
    assert not any(float(value) for name, value in optimizer.state().items() if name.endswith("/step"))


def test_which_adapters_can_be_flattened():
    parameters, parts = adapter()
    assert can_flatten(parameters, parts)
    assert not can_flatten(parameters, {})
    assert not can_flatten({**parameters, "more": nn.Parameter(torch.zeros(1))}, parts)
    a, b, *_ = parameters.values()
    for part in (
        TrainableLora(a, b, 1.0, dropout=0.1),
        TrainableLora(a, b, 1.0, magnitude_O=b),
        Ia3Part(a, of_input=True),
    ):
        assert not can_flatten(parameters, {**parts, "a": part})
