"""The adapter cache on a GPU: concurrent copies, slot table, no overwrite of memory that a batch still reads."""

from __future__ import annotations

import copy

import pytest
import torch

from symbiosis.serving.engine import Engine
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.lora.device_pool import CudaPool
from symbiosis.serving.lora.host_pool import HostPool
from symbiosis.serving.lora.lora_weights import EngineAdapter, LoraWeights
from symbiosis.serving.lora.packed_adapter import PackedAdapter, pack
from symbiosis.serving.scheduling.sequence import Sampling
from tests.serving.lora.adapter_world import PROMPTS, SAMPLING, make_world

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDTH, RANK, MEMBERS = 4096, 16, 224


def pinned(packed: PackedAdapter) -> tuple[HostPool, PackedAdapter]:
    host = HostPool(torch.empty(packed.nbytes, dtype=torch.uint8, pin_memory=True))
    return host, host.put(packed)


def large(value: float) -> PackedAdapter:
    """About the size of rank 16 on all layers of a 7B model."""
    lora = [torch.full(shape, value, dtype=torch.bfloat16) for shape in ((RANK, WIDTH), (WIDTH, RANK))]
    return pack(
        EngineAdapter(f"{value}", {f"{i}": (LoraWeights(lora[0].clone(), lora[1].clone()),) for i in range(MEMBERS)}), ()
    )


def test_a_copy_from_the_host_pool_arrives_whole():
    _, packed = pinned(large(1.0))
    device = CudaPool(packed.nbytes, CUDA)
    on_device = device.copy_in(packed, 0, device.record_fence())
    assert torch.equal(on_device.memory.cpu(), packed.memory)


def test_a_copy_waits_for_launched_work_that_reads_the_memory():
    (_, first), (_, second) = pinned(large(1.0)), pinned(large(2.0))
    device = CudaPool(first.nbytes, CUDA)
    on_device = device.copy_in(first, 0, None)
    torch.cuda._sleep(200_000_000)  # a slow batch
    seen = on_device.adapter.parts["0"][0].a_rI.clone()
    now = device.copy_in(second, 0, device.record_fence())
    assert seen.unique().item() == 1.0
    assert now.adapter.parts["0"][0].a_rI.unique().item() == 2.0


def test_more_adapters_than_fit_are_served_through_the_slot_table(tiny, tmp_path):
    world = make_world(tiny, tmp_path, 5, same_kind=True)
    size = EngineCore(copy.deepcopy(tiny)).prepare(world.path("a0")).packed.nbytes
    config = AdapterCacheConfig(device_bytes=2 * size, host_bytes=3 * size, slots=4, max_wait_s=0.05)
    engine = Engine(copy.deepcopy(tiny).to(CUDA), pages=200, page_size=4, residency=config)
    for number in range(5):
        engine.add_adapter(f"a{number}", world.path(f"a{number}"))
    names = [None, "a0", "a1", "a2", "a3", "a4", "a0", "a3"] * 2
    for _ in range(3):
        completions = engine.generate([PROMPTS[i % 4] for i in range(len(names))], names, SAMPLING)
        for i, (name, completion) in enumerate(zip(names, completions, strict=True)):
            assert completion.tokens == world.completions[name or "base"][i % 4], name
    residency = engine._core._adapter_cache
    residency.check_integrity()
    assert residency.stats().device_evictions > 0
    q, k, v = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    assert residency.slots.table_SM4.is_cuda
    for hash, adapter in residency.resident.items():
        loras = [adapter.parts[path][0] for path in (q, k, v)]
        assert all(lora.a_rI.is_cuda and lora.a_rI.is_contiguous() and lora.b_Or.is_contiguous() for lora in loras)
        entries = residency.slots.columns_of(q, k, v)[residency.slots.slot_of(residency.resident[hash])].tolist()
        assert entries == [[lora.a_rI.data_ptr(), lora.b_Or.data_ptr(), 4, 0] for lora in loras]
    for name in list(engine._core.adapters):
        engine.remove_adapter(name)
    for _ in range(50):
        engine._core.poll_adapters()
        engine._core.wait(0.02)
    figures = residency.stats()
    assert (figures.device_bytes, figures.host_bytes) == (0, 0)
    assert not residency.slots.table_SM4.any()


def test_a_running_sequence_gets_a_token_a_step_while_adapters_are_loaded(tiny, tmp_path):
    world = make_world(tiny, tmp_path, 4, same_kind=True)
    size = EngineCore(copy.deepcopy(tiny)).prepare(world.path("a0")).packed.nbytes
    core = EngineCore(
        copy.deepcopy(tiny).to(CUDA),
        pages=400,
        page_size=16,
        residency=AdapterCacheConfig(device_bytes=2 * size, host_bytes=4 * size),
    )
    for number in range(4):
        core.add_adapter(f"a{number}", world.path(f"a{number}"))
    running = core.add([1, 2, 3], Sampling(temperature=0.0, max_tokens=600, ignore_eos=True))
    core.step()

    stepped_while_loading = 0
    for number in range(200):
        core.add([5, 6], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True), adapter=f"a{number % 4}")
        loading = core.adapter_stats().loading
        emitted = [sequence for sequence, *_ in core.step()]
        assert running in emitted, f"step {number}"
        stepped_while_loading += loading > 0
    assert stepped_while_loading > 0
    assert core.adapter_stats().loads > 10
