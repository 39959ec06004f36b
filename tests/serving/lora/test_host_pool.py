"""Adapters in host memory and in one piece."""

from __future__ import annotations

import pytest
import torch

from symbiosis.adapters.parts import Ia3Part
from symbiosis.serving.lora.host_pool import HostPool
from symbiosis.serving.lora.lora_weights import (
    EngineAdapter,
    LoraWeights,
    ReplacedWeights,
    TokenRows,
    VirtualTokens,
)
from symbiosis.serving.lora.packed_adapter import ALIGNMENT, PackedAdapter, pack


def loaded(hash: str, value: float = 1.0, rank: int = 4) -> EngineAdapter:
    return EngineAdapter(hash, {"layer": (LoraWeights(torch.full((rank, 64), value), torch.full((8, rank), value)),)})


def flat(hash: str, value: float = 1.0, rank: int = 4) -> PackedAdapter:
    return pack(loaded(hash, value, rank), ())


SIZE = flat("x").nbytes


def test_an_adapter_in_one_piece_is_the_same_adapter_wherever_it_lies():
    weight, twice = torch.randn(6, 5), torch.randn(3, 7, dtype=torch.bfloat16)
    parts = {
        "a": (
            LoraWeights(torch.randn(5, 2).T, torch.randn(8, 2), torch.randn(8), torch.randn(8)),
            Ia3Part(torch.randn(9), True),
        ),
        "b": (ReplacedWeights(weight, torch.randn(6)), TokenRows(torch.tensor([4, 2]), twice)),
        "c": (ReplacedWeights(twice), ReplacedWeights(twice)),
    }
    before = EngineAdapter("h", parts, VirtualTokens(2, keys_LTKD=torch.randn(2, 3), values_LTKD=torch.randn(2, 3)))
    once = pack(before, {weight.untyped_storage().data_ptr()})
    space = torch.full((once.nbytes + ALIGNMENT,), 7, dtype=torch.uint8)
    moved = once.rebase(space[ALIGNMENT:])
    space[ALIGNMENT:].copy_(once.memory)
    for made in (once, moved):
        low, scale = made.adapter.parts["a"]
        for name in ("a_rI", "b_Or", "bias_O", "mag_norm_scale_O"):
            assert torch.equal(getattr(low, name), getattr(parts["a"][0], name))
        assert low.a_rI.stride() == parts["a"][0].a_rI.stride()
        assert scale.of_input
        assert torch.equal(scale.vector, parts["a"][1].vector)
        own, rows = made.adapter.parts["b"]
        assert own.weight_OI is weight  # the base model's: it is not the adapter's to move
        assert rows.ids.tolist() == [4, 2]
        first, second = made.adapter.parts["c"]
        assert torch.equal(first.weight_OI, twice)
        assert first.weight_OI.data_ptr() == second.weight_OI.data_ptr()  # kept once
        assert made.adapter.virtual.count == 2
        assert torch.equal(made.adapter.virtual.keys_LTKD, before.virtual.keys_LTKD)
        starts = {tensor.data_ptr() - made.memory.data_ptr() for tensor in (low.a_rI, low.b_Or, scale.vector, first.weight_OI)}
        assert all(start % ALIGNMENT == 0 and 0 <= start < made.nbytes for start in starts)


def test_the_least_recently_used_leaves_and_who_is_held_stays():
    host = HostPool(torch.empty(2 * SIZE, dtype=torch.uint8))
    for hash in ("a", "b"):
        host.release(host.put(flat(hash)))
    host.release(host.acquire("a"))
    held = host.put(flat("c", 3.0))
    assert host.hashes() == {"a", "c"}
    assert held.adapter.parts["layer"][0].a_rI.unique().item() == 3.0
    a = host.acquire("a")
    host.check_integrity()
    d = host.put(flat("d"))  # everything is held: this one from where it was
    assert host.hashes() == {"a", "c"}
    host.release(d)
    host.release(a)
    host.release(held)
    assert host.used == 2 * SIZE
    host.check_integrity()


def test_what_is_dropped_goes_when_nobody_holds_it_and_not_if_it_comes_back():
    host = HostPool(torch.empty(2 * SIZE, dtype=torch.uint8))
    host.drop("never seen")
    first = host.put(flat("a"))
    host.drop("a")
    assert host.hashes() == {"a"}
    host.release(first)
    assert host.used == 0
    first = host.put(flat("a"))
    host.drop("a")
    second = host.put(flat("a"))
    assert second is first
    host.release(first)
    host.release(second)
    assert host.hashes() == {"a"}
    host.drop("a")
    assert host.used == 0
    host.check_integrity()


@pytest.mark.parametrize("rank", [2, 16])
def test_adapters_of_other_sizes_find_room(rank):
    host = HostPool(torch.empty(4 * SIZE, dtype=torch.uint8))
    for number in range(30):
        size = rank if number % 3 == 0 else 4
        host.release(host.put(flat(f"{number}", rank=size)))
        host.check_integrity()
    assert "29" in host.hashes()
    assert host.evictions > 0
