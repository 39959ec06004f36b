"""The engine with host blocks gives the tokens it gives without: on real tensors, in small pools."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from symbiosis.errors import OutOfHostMemory, OutOfRange
from symbiosis.gpu import host_memory
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.model.host_kv import HostKV
from symbiosis.serving.scheduling.sequence import Sampling

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, key heads, width, float32, tokens


def serve(model, prompts, *, pages, host_blocks, max_tokens=12):
    core = EngineCore(
        copy.deepcopy(model), pages=pages, page_size=4, host_cache_bytes=host_blocks * BLOCK_BYTES, max_rows=65, max_running=8
    )
    core.host_tier.copy_s = 0.0  # copies always pay: the test does not depend on the machine's speed
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sequences = [core.add(prompt, sampling) for prompt in prompts]
    while not core.is_idle():
        core.step()
        core.scheduler.check_integrity()
    return [sequence.outputs for sequence in sequences], core


@pytest.mark.parametrize("seed", range(3))
def test_same_tokens_as_without_preemption(tiny, seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(128) for _ in range(rng.randrange(3, 40))] for _ in range(10)]
    expected, roomy = serve(tiny, prompts, pages=200, host_blocks=0)
    assert roomy.scheduler.num_preemptions == 0
    recomputed, small = serve(tiny, prompts, pages=24, host_blocks=0)
    found, core = serve(tiny, prompts, pages=24, host_blocks=100)
    assert small.scheduler.num_preemptions > 0
    assert core.scheduler.num_preemptions > 0
    assert core.scheduler.block_manager.host.num_restored > 0
    assert core.num_rows < small.num_rows, "restored tokens are not computed again"
    assert found == recomputed == expected


def test_an_evicted_prompt_comes_back(tiny):
    prompts = [[number * 7 % 128] * 40 for number in range(5)]
    expected, _ = serve(tiny, prompts, pages=200, host_blocks=0, max_tokens=4)
    core = EngineCore(copy.deepcopy(tiny), pages=16, page_size=4, host_cache_bytes=100 * BLOCK_BYTES)
    core.host_tier.copy_s = 0.0
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            sequence = core.add(prompt, Sampling(temperature=0, max_tokens=4, ignore_eos=True))
            while not core.is_idle():
                core.step()
            assert sequence.outputs == tokens
    assert sequence.num_cached_tokens == 36


def test_blocks_are_copied_out_and_back(tiny):
    cache = torch.randn(2, 2, 6, 4, 2, 16)
    before, host = cache.clone(), HostKV(40, cache)
    pairs = [(number % 6, number) for number in range(40)]
    host.store(pairs)
    cache.zero_()
    host.restore([(6 + (number + 1) % 6, number) for number in range(6)])
    assert torch.equal(cache, before[:, :, [1, 2, 3, 4, 5, 0]])
    assert host.measure() > 0
    assert torch.equal(cache, before[:, :, [1, 2, 3, 4, 5, 0]])


def test_copies_stop_where_computing_is_cheaper(tiny):
    core = EngineCore(copy.deepcopy(tiny), pages=16, page_size=4, host_cache_bytes=8 * BLOCK_BYTES)
    assert core.host_tier.copy_s > 0
    core.host_tier.copy_s = 1e9
    core.add([1] * 40, Sampling(temperature=0, max_tokens=1))
    core.step()
    assert not core.scheduler.block_manager.host.is_worthwhile
    core.host_tier.copy_s = 0.0
    core.add([2] * 40, Sampling(temperature=0, max_tokens=1))
    core.step()
    assert core.scheduler.block_manager.host.is_worthwhile


def test_failed_transfers_fail_the_step_and_forget_cached_blocks(tiny, monkeypatch):
    core = EngineCore(copy.deepcopy(tiny), pages=12, page_size=4, host_cache_bytes=30 * BLOCK_BYTES)
    core.host_tier.copy_s = 0.0
    sampling = Sampling(temperature=0, max_tokens=2, ignore_eos=True)
    for prompt in ([1] * 40, [2] * 40):
        core.add(prompt, sampling)
        while not core.is_idle():
            core.step()
    assert core.scheduler.block_manager.host.num_used > 0

    def fail(blocks):
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(core.host_tier.memory, "restore", fail)
        core.add([1] * 40, sampling)
        with pytest.raises(Exception, match="step"):
            core.step()
    core.scheduler.check_integrity()
    assert core.scheduler.block_manager.num_cached_blocks == core.scheduler.block_manager.host.num_used == 0
    again = core.add([1] * 40, sampling)
    while not core.is_idle():
        core.step()
    assert again.num_cached_tokens == 0


def test_settings_are_checked(tiny, monkeypatch):
    with pytest.raises(OutOfRange, match="host_cache_bytes"):
        EngineCore(copy.deepcopy(tiny), host_cache_bytes=-1)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 10_000)
    with pytest.raises(OutOfHostMemory, match="host_cache_bytes"):
        EngineCore(copy.deepcopy(tiny), pages=16, page_size=4, host_cache_bytes=100 * BLOCK_BYTES)
