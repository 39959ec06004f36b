"""Packed adapters and the host pool."""

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


def engine_adapter(hash: str, value: float = 1.0, rank: int = 4) -> EngineAdapter:
    return EngineAdapter(hash, {"layer": (LoraWeights(torch.full((rank, 64), value), torch.full((8, rank), value)),)})


def packed(hash: str, value: float = 1.0, rank: int = 4) -> PackedAdapter:
    return pack(engine_adapter(hash, value, rank), ())


SIZE = packed("x").nbytes


def test_a_packed_adapter_keeps_its_tensors_after_a_rebase():
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
        lora, scale = made.adapter.parts["a"]
        for name in ("a_rI", "b_Or", "bias_O", "mag_norm_scale_O"):
            assert torch.equal(getattr(lora, name), getattr(parts["a"][0], name))
        assert lora.a_rI.stride() == parts["a"][0].a_rI.stride()
        assert scale.of_input
        assert torch.equal(scale.vector, parts["a"][1].vector)
        own, rows = made.adapter.parts["b"]
        assert own.weight_OI is weight  # shared with the base model: not packed
        assert rows.ids.tolist() == [4, 2]
        first, second = made.adapter.parts["c"]
        assert torch.equal(first.weight_OI, twice)
        assert first.weight_OI.data_ptr() == second.weight_OI.data_ptr()  # stored once
        assert made.adapter.virtual.count == 2
        assert torch.equal(made.adapter.virtual.keys_LTKD, before.virtual.keys_LTKD)
        starts = {
            tensor.data_ptr() - made.memory.data_ptr() for tensor in (lora.a_rI, lora.b_Or, scale.vector, first.weight_OI)
        }
        assert all(start % ALIGNMENT == 0 and 0 <= start < made.nbytes for start in starts)


def test_eviction_is_lru_and_skips_adapters_with_references():
    host = HostPool(torch.empty(2 * SIZE, dtype=torch.uint8))
    for hash in ("a", "b"):
        host.release(host.put(packed(hash)))
    host.release(host.acquire("a"))
    held = host.put(packed("c", 3.0))
    assert host.hashes() == {"a", "c"}
    assert held.adapter.parts["layer"][0].a_rI.unique().item() == 3.0
    a = host.acquire("a")
    host.check_integrity()
    d = host.put(packed("d"))  # no adapter can be evicted: not stored
    assert host.hashes() == {"a", "c"}
    host.release(d)
    host.release(a)
    host.release(held)
    assert host.used == 2 * SIZE
    host.check_integrity()


def test_a_dropped_adapter_is_freed_with_its_last_reference_unless_it_is_put_again():
    host = HostPool(torch.empty(2 * SIZE, dtype=torch.uint8))
    host.drop("unknown")
    first = host.put(packed("a"))
    host.drop("a")
    assert host.hashes() == {"a"}
    host.release(first)
    assert host.used == 0
    first = host.put(packed("a"))
    host.drop("a")
    second = host.put(packed("a"))
    assert second is first
    host.release(first)
    host.release(second)
    assert host.hashes() == {"a"}
    host.drop("a")
    assert host.used == 0
    host.check_integrity()


@pytest.mark.parametrize("rank", [2, 16])
def test_adapters_of_different_sizes_fit(rank):
    host = HostPool(torch.empty(4 * SIZE, dtype=torch.uint8))
    for number in range(30):
        size = rank if number % 3 == 0 else 4
        host.release(host.put(packed(f"{number}", rank=size)))
        host.check_integrity()
    assert "29" in host.hashes()
    assert host.evictions > 0
