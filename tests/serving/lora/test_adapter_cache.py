"""More adapters than fit: each request runs with its version, loads do not delay other requests, nothing leaks."""

from __future__ import annotations

import copy
import random
import threading

import pytest

from symbiosis.errors import BadAdapter, UnknownAdapter, UnsupportedAdapter
from symbiosis.serving.engine import Engine
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.serving.lora.adapter_world import NUM_TOKENS, PROMPTS, SAMPLING, World, make_world, use_pools

LONG = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory) -> World:
    return make_world(tiny, tmp_path_factory.mktemp("adapters"), 5, same_kind=True)


@pytest.fixture(scope="module")
def size(world) -> int:
    """Bytes of one adapter."""
    return EngineCore(copy.deepcopy(world.base)).prepare(world.path("a0")).packed.nbytes


@pytest.fixture(params=[False, True], ids=["device pool", "host and device pools"], autouse=True)
def copying(request, monkeypatch) -> bool:
    use_pools(monkeypatch, copying=request.param)
    return request.param


def core_for(world: World, device: int, host: int | None = None, **settings) -> EngineCore:
    config = AdapterCacheConfig(device_bytes=device, host_bytes=host or device * 3, **{"slots": 8, **settings})
    return EngineCore(copy.deepcopy(world.base), pages=200, page_size=4, residency=config)


def run(core: EngineCore, *requests, steps: int = 2000) -> None:
    """Step until these have ended."""
    for _ in range(steps):
        if all(request.reason is not None for request in requests):
            return
        before = core.num_steps
        core.step()
        core._adapter_cache.check_integrity()
        core.scheduler.check_integrity()
        if core.num_steps == before:
            core.wait(0.5)
    raise AssertionError("hung")


def settle(core: EngineCore) -> None:
    """Poll until no load is in flight."""
    for _ in range(200):
        core.poll_adapters()
        if not core._adapter_cache._loading:
            return
        core.wait(0.1)


def check_completion(world: World, core: EngineCore, name: str, prompt: int = 0) -> None:
    request = core.add(PROMPTS[prompt], SAMPLING, adapter=name)
    run(core, request)
    assert request.outputs == world.completions[name][prompt]


def on_device(core: EngineCore) -> set[str]:
    return {name for name, hash in core.adapters.items() if hash in core._adapter_cache.resident}


def test_more_adapters_than_fit_are_served(world, size):
    engine = Engine(
        copy.deepcopy(world.base),
        pages=200,
        page_size=4,
        residency=AdapterCacheConfig(device_bytes=2 * size, host_bytes=3 * size, slots=8, max_wait_s=0.05),
    )
    for name in world.completions.keys() - {"base"}:
        engine.add_adapter(name, world.path(name))
    names = [None, "a0", "a1", "a2", "a3", "a4", "a0", "a3"] * 2
    for _ in range(2):
        completions = engine.generate([PROMPTS[i % 4] for i in range(len(names))], names, SAMPLING)
        for i, (name, completion) in enumerate(zip(names, completions, strict=True)):
            assert completion.tokens == world.completions[name or "base"][i % 4], name
    figures = engine._core.adapter_stats()
    assert figures.device_evictions > 0
    assert figures.device_bytes <= 2 * size
    assert (figures.registered, figures.device) == (5, 2)
    for name in list(engine._core.adapters):
        engine.remove_adapter(name)
    settle(engine._core)
    figures = engine._core.adapter_stats()
    assert (figures.registered, figures.resident, figures.device_bytes, figures.host_bytes) == (0, 0, 0, 0)


def test_eviction_is_by_recency_and_frequency_and_skips_pinned_adapters(world, size):
    core = core_for(world, 2 * size)
    for name in ("a0", "a1", "a2", "a3"):
        core.add_adapter(name, world.path(name))
    for name in ("a0", "a1", "a0", "a2"):
        check_completion(world, core, name)
    assert on_device(core) == {"a0", "a2"}
    core.pin_adapter("a0")
    for name in ("a1", "a2", "a3"):
        check_completion(world, core, name)
    assert on_device(core) == {"a0", "a3"}
    core.pin_adapter("a0", False)
    for name in ("a1", "a2"):
        check_completion(world, core, name)
    assert on_device(core) == {"a1", "a2"}
    for name in ("a2", "a2", "a0", "a3"):
        check_completion(world, core, name)
    assert on_device(core) == {"a2", "a3"}, "a2 was used longer ago than a0, and more often"
    with pytest.raises(UnknownAdapter):
        core.pin_adapter("unknown")


def test_a_pinned_adapter_is_evicted_as_a_last_resort(world, size):
    core = core_for(world, size, max_wait_s=0.0)
    core.add_adapter("a0", world.path("a0"))
    core.add_adapter("a1", world.path("a1"))
    core.pin_adapter("a0")
    for name in ("a0", "a1", "a0"):
        check_completion(world, core, name)


def test_an_adapter_larger_than_the_pool_is_rejected_when_it_is_added(world, size):
    core = core_for(world, size - 256)
    with pytest.raises(UnsupportedAdapter, match="bytes"):
        core.add_adapter("a0", world.path("a0"))
    assert core.adapters == {}


def test_a_name_switches_at_once_and_accepted_requests_keep_their_version(world, size):
    core = core_for(world, 3 * size)
    first = core.put_adapter("mine", core.prepare(world.path("a0")))
    old = [core.add(prompt, SAMPLING, adapter="mine") for prompt in PROMPTS]
    core.step()
    second = core.put_adapter("mine", core.prepare(world.path("a1")))
    assert second.generation > first.generation
    new = [core.add(prompt, SAMPLING, adapter="mine") for prompt in PROMPTS]
    run(core, *old, *new)
    assert [request.outputs for request in old] == world.completions["a0"]
    assert [request.outputs for request in new] == world.completions["a1"]
    settle(core)
    assert core.adapter_stats().registered == 1
    assert core.adapter_stats().device_bytes <= size
    again = core.put_adapter("mine", core.prepare(world.path("a1")))
    assert (again.hash, again.generation > second.generation) == (second.hash, True)


def test_a_replaced_version_is_read_from_disk_for_waiting_requests(world, size):
    core = core_for(world, size, size, max_wait_s=0.0)
    core.add_adapter("mine", world.path("a0"))
    core.add_adapter("other", world.path("a2"))
    blocker = core.add(PROMPTS[0], LONG, adapter="other")
    while not blocker.outputs:
        run_once(core)
    waiting = core.add(PROMPTS[1], SAMPLING, adapter="mine")
    core.put_adapter("mine", core.prepare(world.path("a1")))
    run(core, waiting, blocker)
    assert waiting.outputs == world.completions["a0"][1]
    late = core.add(PROMPTS[1], SAMPLING, adapter="mine")
    run(core, late)
    assert late.outputs == world.completions["a1"][1]


def run_once(core: EngineCore) -> None:
    before = core.num_steps
    core.step()
    if core.num_steps == before and not core.is_idle():
        core.wait(0.5)


def test_unregistering_drains_and_frees(world, size):
    core = core_for(world, 2 * size)
    core.add_adapter("mine", world.path("a0"))
    running = core.add(PROMPTS[0], SAMPLING, adapter="mine")
    core.step()
    core.remove_adapter("mine")
    with pytest.raises(UnknownAdapter):
        core.add(PROMPTS[0], SAMPLING, adapter="mine")
    run(core, running)
    assert running.outputs == world.completions["a0"][0]
    settle(core)
    figures = core.adapter_stats()
    assert (figures.registered, figures.resident, figures.device_bytes, figures.host_bytes) == (0, 0, 0, 0)


def test_equal_content_under_two_names_is_stored_once(world, size, tmp_path):
    core = core_for(world, 4 * size)
    core.add_adapter("one", world.path("a0"))
    core.add_adapter("two", world.copied("a0", tmp_path / "copy"))
    for name in ("one", "two"):
        request = core.add(PROMPTS[0], SAMPLING, adapter=name)
        run(core, request)
        assert request.outputs == world.completions["a0"][0]
    assert core.adapter_stats().device_bytes == size
    core.remove_adapter("one")
    assert core.adapter_stats().device_bytes == size
    core.remove_adapter("two")
    settle(core)
    assert core.adapter_stats().device_bytes == core.adapter_stats().host_bytes == 0


def cold(world: World, size: int, folder) -> EngineCore:
    """A core where the adapter "mine", read from `folder`, is in no pool."""
    core = core_for(world, size, size)
    core.add_adapter("mine", folder)
    core.add_adapter("other", world.path("a1"))
    request = core.add(PROMPTS[0], SAMPLING, adapter="other")
    run(core, request)
    return core


def test_a_failed_load_ends_only_the_requests_that_wait_for_it(world, size, tmp_path):
    folder = world.copied("a0", tmp_path / "mine")
    core = cold(world, size, folder)
    (folder / "adapter_model.safetensors").unlink()
    waiting = core.add_several(2, PROMPTS[0], SAMPLING, adapter="mine")
    other = core.add(PROMPTS[1], SAMPLING)
    run(core, *waiting, other)
    assert other.outputs == world.completions["base"][1]
    failed = core.take_failed()
    assert {request.id for request, _ in failed} == {request.id for request in waiting}
    assert all(isinstance(error, BadAdapter) for _, error in failed)
    assert {request.reason for request in waiting} == {FinishReason.FAILED}
    with pytest.raises(BadAdapter, match="mine"):
        core.add(PROMPTS[0], SAMPLING, adapter="mine")
    world.copied("a0", folder)
    core.add_adapter("mine", folder)  # a new registration clears the error
    again = core.add(PROMPTS[0], SAMPLING, adapter="mine")
    run(core, again)
    assert again.outputs == world.completions["a0"][0]
    assert core.adapter_stats().failures == 1


def test_files_that_changed_after_registration_are_not_served(world, size, tmp_path):
    folder = world.copied("a0", tmp_path / "mine")
    core = cold(world, size, folder)
    world.copied("a2", folder)
    request = core.add(PROMPTS[0], SAMPLING, adapter="mine")
    run(core, request)
    assert request.outputs == []
    ((failed, error),) = core.take_failed()
    assert failed is request
    assert "changed" in str(error)


def test_another_folder_with_the_same_content_is_a_fallback(world, size, tmp_path):
    core = cold(world, size, world.path("a0"))
    gone = world.copied("a0", tmp_path / "gone")
    core.add_adapter("twin", gone)
    other = core.add(PROMPTS[0], SAMPLING, adapter="other")
    run(core, other)
    (gone / "adapter_model.safetensors").unlink()
    request = core.add(PROMPTS[0], SAMPLING, adapter="twin")
    run(core, request)
    assert request.outputs == world.completions["a0"][0]


def test_an_adapter_with_constant_traffic_does_not_starve_another(world, size):
    """The pool fits one adapter. `a0` always has requests, `a1` has one."""
    core = core_for(world, size, max_wait_s=0.0)
    for name in ("a0", "a1"):
        core.add_adapter(name, world.path(name))
    busy = [core.add(PROMPTS[i], SAMPLING, adapter="a0", tenant="busy") for i in range(4)]
    core.step()
    once = core.add(PROMPTS[1], SAMPLING, adapter="a1", tenant="rare")
    for _ in range(400):
        run_once(core)
        if once.reason is not None:
            break
        if sum(request.reason is None for request in busy) < 4:
            busy.append(core.add(PROMPTS[0], SAMPLING, adapter="a0", tenant="busy"))
    assert once.outputs == world.completions["a1"][1]
    run(core, *busy)
    assert all(request.outputs in world.completions["a0"] for request in busy)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_completions_and_memory_right(world, size, seed, tmp_path):
    """Random registrations, requests and cancels: each completion is that of the version it was accepted with."""
    rng = random.Random(seed)
    core = core_for(world, 2 * size, 3 * size, slots=3, max_wait_s=0.0, max_disk_loads=2)
    names: dict[str, str] = {}
    alive: list[tuple[object, str, int]] = []
    done = 0
    for _ in range(150):
        act = rng.random()
        if act < 0.2:
            name, content = rng.choice(["x", "y", "z", "w"]), rng.choice(["a0", "a1", "a2", "a3", "a4"])
            core.add_adapter(name, world.path(content))
            names[name] = content
        elif act < 0.25 and names:
            name = rng.choice(sorted(names))
            core.remove_adapter(name)
            del names[name]
        elif act < 0.3 and alive:
            core.cancel(alive.pop(rng.randrange(len(alive)))[0])
        elif act < 0.33 and names:
            core.pin_adapter(rng.choice(sorted(names)), rng.random() < 0.5)
        elif act < 0.7:
            name, prompt = rng.choice([*sorted(names), None]), rng.randrange(4)
            request = core.add(PROMPTS[prompt], SAMPLING, adapter=name, tenant=rng.choice("ab"))
            alive.append((request, names[name] if name else "base", prompt))
        run_once(core)
        core._adapter_cache.check_integrity()
        core.scheduler.check_integrity()
    run(core, *(request for request, _, _ in alive))
    for request, content, prompt in alive:
        assert request.outputs == world.completions[content][prompt]
        done += 1
    assert done > 10
    for name in names:
        core.remove_adapter(name)
    for _ in range(200):
        settle(core)
        if core.adapter_stats().host_bytes == 0:
            break
        core.wait(0.1)  # the loader may still be storing an adapter in the host pool
    figures = core.adapter_stats()
    assert (figures.registered, figures.device_bytes, figures.host_bytes) == (0, 0, 0)


class TestHostAndDevicePools:
    """Only with copies from the host pool to the device pool."""

    @pytest.fixture(autouse=True)
    def needs_copies(self, copying):
        if not copying:
            pytest.skip("no copies without a host pool")

    def test_a_load_does_not_delay_requests_of_other_adapters(self, world, size):
        core = core_for(world, 2 * size)
        core.add_adapter("a0", world.path("a0"))
        core.add_adapter("a1", world.path("a1"))
        check_completion(world, core, "a0")
        core._adapter_cache._device.gate.clear()
        waits = core.add(PROMPTS[0], SAMPLING, adapter="a1")
        others = [core.add(PROMPTS[1], SAMPLING, adapter="a0"), core.add(PROMPTS[2], SAMPLING)]
        run(core, *others, steps=3 * NUM_TOKENS)
        assert [request.outputs for request in others] == [world.completions["a0"][1], world.completions["base"][2]]
        assert waits.outputs == []
        core._adapter_cache._device.gate.set()
        run(core, waits)
        assert waits.outputs == world.completions["a1"][0]

    def test_an_adapter_unregistered_during_its_load_is_freed(self, world, size):
        core = core_for(world, 2 * size)
        core.add_adapter("a0", world.path("a0"))
        core._adapter_cache._device.gate.clear()
        request = core.add(PROMPTS[0], SAMPLING, adapter="a0")
        core.step()
        assert core.adapter_stats().loading == 1
        core.cancel(request)
        core.remove_adapter("a0")
        core._adapter_cache._device.gate.set()
        settle(core)
        figures = core.adapter_stats()
        assert (figures.loading, figures.device_bytes, figures.host_bytes, figures.loads) == (0, 0, 0, 0)

    def test_an_adapter_in_the_host_pool_is_not_read_again(self, world, size):
        core = core_for(world, size, 3 * size)
        for name in ("a0", "a1", "a2"):
            core.add_adapter(name, world.path(name))
        for name in ("a0", "a1", "a2", "a0", "a1"):
            check_completion(world, core, name)
        assert (core.adapter_stats().reads, core.adapter_stats().loads) == (0, 5)

    def test_a_load_from_the_host_pool_does_not_wait_for_a_disk(self, world, size, monkeypatch):
        core = core_for(world, 4 * size, 2 * size, max_disk_loads=1)
        for name in ("a0", "a1", "a2", "a3"):
            core.add_adapter(name, world.path(name))
        core._adapter_cache._loader._reader.submit(int).result()  # the host pool is full
        slow, loader = threading.Event(), core._adapter_cache._loader
        read = loader.read
        monkeypatch.setattr(loader, "read", lambda folder: slow.wait(60) and read(folder))
        waits = [core.add(PROMPTS[0], SAMPLING, adapter=name) for name in ("a0", "a1")]
        core.step()
        others = [core.add(PROMPTS[1], SAMPLING, adapter=name) for name in ("a2", "a3")]
        run(core, *others)
        assert [request.outputs for request in others] == [world.completions["a2"][1], world.completions["a3"][1]]
        assert [request.outputs for request in waits] == [[], []]
        slow.set()
        run(core, *waits)
        assert [request.outputs for request in waits] == [world.completions["a0"][0], world.completions["a1"][0]]

    def test_an_internal_error_fails_waiting_requests_and_the_next_request_retries(self, world, size, monkeypatch):
        core = core_for(world, size)
        core.add_adapter("a0", world.path("a0"))
        with monkeypatch.context() as patch:
            patch.setattr(type(core._adapter_cache._device), "copy_in", lambda *_: 1 / 0)
            request = core.add(PROMPTS[0], SAMPLING, adapter="a0")
            run(core, request)
            ((_, error),) = core.take_failed()
            assert "ZeroDivisionError" in str(error)
        check_completion(world, core, "a0")


def test_the_slot_table_has_an_entry_for_every_layer_of_every_resident_adapter(world, size):
    core = core_for(world, 2 * size)
    for name in ("a0", "a1"):
        core.add_adapter(name, world.path(name))
        check_completion(world, core, name)
    slots, residency = core._adapter_cache.slots, core._adapter_cache
    q, k, v = (f"model.layers.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    for hash in core.adapters.values():
        entries = slots.columns_of(q, k, v)[residency.slots.slot_of(residency.resident[hash])].tolist()
        loras = [residency.resident[hash].parts[path][0] for path in (q, k, v)]
        assert entries == [[lora.a_rI.data_ptr(), lora.b_Or.data_ptr(), 4, 0] for lora in loras]
    with pytest.raises(ValueError, match="adjacent"):
        slots.columns_of(q, v)
    slot = residency.slots.slot_of(residency.resident[core.adapters["a0"]])
    core.remove_adapter("a0")
    assert not slots.table_SM4[slot].any()
