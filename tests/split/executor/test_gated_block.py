"""GatedBlock against the module itself, run by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symbiosis.split.executor.layers import Block, GatedBlock, make_layer, run
from symbiosis.types import Direction, LayerKind, LayerSpec

SPEC = LayerSpec(handle=0, kind=LayerKind.BLOCK, paths=("mlp",), in_width=16, out_width=16, weights=(), identity="mlp")


class Mlp(nn.Module):
    def __init__(self, act_fn: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 40, bias=bias), nn.Linear(16, 40, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(40, 16, bias=bias), act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Other(Mlp):
    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.ReLU()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 12, 130])
@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_results_and_gradients_equal_those_of_the_module(act_fn, bias, rows, in_place):
    torch.manual_seed(0)
    module = Mlp(act_fn, bias)
    layer = make_layer(SPEC, {}, None, module)
    assert type(layer) is GatedBlock
    x, grad = torch.randn(rows, 16), torch.randn(rows, 16)
    for direction, sent in ((Direction.FORWARD, (x,)), (Direction.BACKWARD, (x, grad))):
        out = (torch.empty(rows, 16),) if in_place else None
        (found,) = run((layer,), direction, sent, out)
        (expected,) = run((Block(SPEC, module),), direction, sent)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert not in_place or found is out[0]


class Clamped(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=10) * self.up_proj(x))


def test_a_module_that_clamps_large_values_runs_as_a_plain_block():
    assert type(make_layer(SPEC, {}, None, Clamped(nn.SiLU()))) is Block


def test_an_activation_that_writes_to_its_input_gives_equal_results():
    layer = make_layer(SPEC, {}, None, Mlp(nn.ReLU(inplace=True)))
    x, grad = torch.randn(3, 16), torch.randn(3, 16)
    plain = Block(SPEC, layer.module)
    with torch.no_grad():
        torch.testing.assert_close(layer.forward((x,))[0], plain.forward((x,))[0])
        torch.testing.assert_close(layer.backward((x, grad))[0], plain.backward((x, grad))[0])


def test_a_module_with_the_same_children_but_other_results_runs_as_a_plain_block():
    assert type(make_layer(SPEC, {}, None, Other(nn.SiLU()))) is Block
