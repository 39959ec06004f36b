"""Module snapshots notice every change of what a module computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from symbiosis.models.patches.fused_ops import FusedNorm
from symbiosis.models.patches.mixin import mix_in
from symbiosis.split.client.deferred.norm import DeferredNorm
from symbiosis.split.client.module_snapshot import ModuleSnapshot
from symbiosis.split.client.virtual_block import VirtualBlock


class Block(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)
        self.scale, self.limit, self.extra, self.odd, self.act = 2.0, None, [1], float("nan"), torch.relu

    def forward(self, x):
        return self.linear(self.dropout(x)) * self.scale


def same_again(block):
    block.scale = float("2.0")


def something_irrelevant(block):
    block._note = 7
    block.other_list = [2]


def setting(name, value):
    def change(block):
        setattr(block, name, value)

    return change


def one_removed_and_one_added(block):
    del block.extra
    block.other = 5.0


def none_then_a_number(block):
    block.added = torch.tensor(1.0)
    assert block.made.holds(block)
    block.added = 3.0


CHANGES = {
    "something irrelevant to a number": none_then_a_number,
    "something in the place of a class's": setting("factor", torch.tensor(3.0)),
    "a function": setting("act", torch.tanh),
    "a function of its own": setting("_helper", lambda x: x),
    "a number": setting("scale", 3.0),
    "a number to a tensor": setting("scale", torch.tensor([1.0, 2.0])),
    "nothing to a number": setting("limit", 7.0),
    "a list to a number": setting("extra", 3.0),
    "a new number": setting("new", 1),
    "one removed and one added": one_removed_and_one_added,
    "a part's setting": lambda block: setattr(block.dropout, "p", 0.5),
    "a part": setting("linear", nn.Linear(2, 2)),
    "a part more": setting("gate", nn.Identity()),
    "a part's mode": lambda block: block.dropout.eval(),
    "a part's hook": lambda block: block.linear.register_forward_hook(lambda *_: None),
    "a part's function": lambda block: setattr(block.linear, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change):
    block = Block()
    made = ModuleSnapshot(block)
    object.__setattr__(block, "made", made)
    assert made.holds(block)
    assert made.holds(block)  # by the fast check
    change(block)
    assert not made.holds(block)
    assert not made.holds_part_by_part()


@pytest.mark.parametrize("change", [same_again, something_irrelevant, nn.Module.eval])
def test_a_change_without_effect_is_not(change):
    block = Block()
    made = ModuleSnapshot(block)
    assert made.holds(block)
    change(block)
    for _ in range(3):
        assert made.holds(block)
        assert made.holds_part_by_part()


def test_patched_classes_are_noticed(monkeypatch):
    block = Block()
    made = ModuleSnapshot(block)
    assert made.holds(block)
    monkeypatch.setattr(nn.Linear, "forward", lambda _, x: x)
    assert not made.holds(block)


@pytest.mark.parametrize("mixin", [VirtualBlock, DeferredNorm, FusedNorm])
def test_a_patched_class_behind_a_mixin_is_noticed(monkeypatch, mixin):
    block = Block()
    mix_in(block, mixin)
    made = ModuleSnapshot(block)
    assert made.holds(block)
    monkeypatch.setattr(Block, "forward", lambda _, x: x)
    assert not made.holds(block)


def test_a_subclass_that_gets_its_own_forward_is_noticed():
    class Other(Block):
        pass

    block = Other()
    made = ModuleSnapshot(block)
    assert made.holds(block)
    Other.forward = lambda _, x: x
    assert not made.holds(block)


def test_a_part_of_another_class_that_gets_its_own_forward_is_noticed():
    class Other(nn.Linear):
        pass

    block = Block()
    made = ModuleSnapshot(block)
    assert made.holds(block)
    block.linear.__class__ = Other
    for _ in range(3):
        assert made.holds(block) is made.holds_part_by_part() is True
    Other.forward = lambda _, x: x
    assert not made.holds(block)


def test_a_copy_has_its_own_snapshot():
    block = Block()
    object.__setattr__(block, "made", ModuleSnapshot(block))
    other = copy.deepcopy(block)
    assert other.made.holds(other)
    assert not other.made.holds(block)
    block.scale = 3.0
    assert other.made.holds(other)
