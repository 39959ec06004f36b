"""More adapters than fit: each request gets its adapter and version, nobody waits for another's load, nothing leaks."""

from __future__ import annotations

import copy
import random
import threading

import pytest

from symbiosis.errors import BadAdapter, UnknownAdapter, UnsupportedAdapter
from symbiosis.serving.engine import Engine, EngineCore
from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling
from tests.serving.lora.residents import COUNT, PROMPTS, WISH, World, make_world, use_levels

LONG = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory) -> World:
    return make_world(tiny, tmp_path_factory.mktemp("adapters"), 5, same_kind=True)


@pytest.fixture(scope="module")
def size(world) -> int:
    """What one of them takes."""
    return EngineCore(copy.deepcopy(world.base)).prepare(world.path("a0")).packed.nbytes


@pytest.fixture(params=[False, True], ids=["one level", "two levels"], autouse=True)
def copying(request, monkeypatch) -> bool:
    use_levels(monkeypatch, copying=request.param)
    return request.param


def core_for(world: World, device: int, host: int | None = None, **settings) -> EngineCore:
    config = AdapterCacheConfig(device_bytes=device, host_bytes=host or device * 3, **{"slots": 8, **settings})
    return EngineCore(copy.deepcopy(world.base), pages=200, page_size=4, residency=config)


def run(core: EngineCore, *requests, steps: int = 2000) -> None:
    """Until these have ended."""
    for _ in range(steps):
        if all(request.reason is not None for request in requests):
            return
        before = core.passes
        core.step()
        core._residency.check_integrity()
        core.scheduler.check_integrity()
        if core.passes == before:
            core.wait(0.5)
    raise AssertionError("hung")


def settle(core: EngineCore) -> None:
    """Until nothing is on its way."""
    for _ in range(200):
        core.take_up()
        if not core._residency._loading:
            return
        core.wait(0.1)


def says(world: World, core: EngineCore, name: str, prompt: int = 0) -> None:
    request = core.add(PROMPTS[prompt], WISH, adapter=name)
    run(core, request)
    assert request.outputs == world.says[name][prompt]


def on_device(core: EngineCore) -> set[str]:
    return {name for name, hash in core.adapters.items() if hash in core._residency.resident}


def test_more_adapters_than_fit_are_served_each_with_its_own(world, size):
    engine = Engine(
        copy.deepcopy(world.base),
        pages=200,
        page_size=4,
        residency=AdapterCacheConfig(device_bytes=2 * size, host_bytes=3 * size, slots=8, max_wait_s=0.05),
    )
    for name in world.says.keys() - {"base"}:
        engine.add_adapter(name, world.path(name))
    names = [None, "a0", "a1", "a2", "a3", "a4", "a0", "a3"] * 2
    for _ in range(2):
        answers = engine.generate([PROMPTS[i % 4] for i in range(len(names))], names, WISH)
        for i, (name, answer) in enumerate(zip(names, answers, strict=True)):
            assert answer.tokens == world.says[name or "base"][i % 4], name
    figures = engine._core.figures()
    assert figures.device_evictions > 0
    assert figures.device_bytes <= 2 * size
    assert (figures.registered, figures.device) == (5, 2)
    for name in list(engine._core.adapters):
        engine.remove_adapter(name)
    settle(engine._core)
    figures = engine._core.figures()
    assert (figures.registered, figures.resident, figures.device_bytes, figures.host_bytes) == (0, 0, 0, 0)


def test_the_least_recently_used_leaves_and_a_pinned_one_stays(world, size):
    core = core_for(world, 2 * size)
    for name in ("a0", "a1", "a2", "a3"):
        core.add_adapter(name, world.path(name))
    for name in ("a0", "a1", "a0", "a2"):
        says(world, core, name)
    assert on_device(core) == {"a0", "a2"}
    core.pin_adapter("a0")
    for name in ("a1", "a2", "a3"):
        says(world, core, name)
    assert on_device(core) == {"a0", "a3"}
    core.pin_adapter("a0", False)
    for name in ("a1", "a2"):
        says(world, core, name)
    assert on_device(core) == {"a1", "a2"}
    with pytest.raises(UnknownAdapter):
        core.pin_adapter("nobody")


def test_a_pin_gives_way_if_there_is_no_other_way(world, size):
    core = core_for(world, size, max_wait_s=0.0)
    core.add_adapter("a0", world.path("a0"))
    core.add_adapter("a1", world.path("a1"))
    core.pin_adapter("a0")
    for name in ("a0", "a1", "a0"):
        says(world, core, name)


def test_an_adapter_larger_than_everything_is_refused_when_it_is_added(world, size):
    core = core_for(world, size - 256)
    with pytest.raises(UnsupportedAdapter, match="bytes"):
        core.add_adapter("a0", world.path("a0"))
    assert core.adapters == {}


def test_a_name_switches_at_once_and_who_was_accepted_keeps_the_version(world, size):
    core = core_for(world, 3 * size)
    first = core.put_adapter("mine", core.prepare(world.path("a0")))
    old = [core.add(prompt, WISH, adapter="mine") for prompt in PROMPTS]
    core.step()
    second = core.put_adapter("mine", core.prepare(world.path("a1")))
    assert second.generation > first.generation
    new = [core.add(prompt, WISH, adapter="mine") for prompt in PROMPTS]
    run(core, *old, *new)
    assert [request.outputs for request in old] == world.says["a0"]
    assert [request.outputs for request in new] == world.says["a1"]
    settle(core)
    assert core.figures().registered == 1
    assert core.figures().device_bytes <= size
    again = core.put_adapter("mine", core.prepare(world.path("a1")))
    assert (again.hash, again.generation > second.generation) == (second.hash, True)


def test_who_waits_for_a_replaced_version_gets_it_from_disk(world, size):
    core = core_for(world, size, size, max_wait_s=0.0)
    core.add_adapter("mine", world.path("a0"))
    core.add_adapter("other", world.path("a2"))
    blocker = core.add(PROMPTS[0], LONG, adapter="other")
    while not blocker.outputs:
        run_once(core)
    waiting = core.add(PROMPTS[1], WISH, adapter="mine")
    core.put_adapter("mine", core.prepare(world.path("a1")))
    run(core, waiting, blocker)
    assert waiting.outputs == world.says["a0"][1]
    late = core.add(PROMPTS[1], WISH, adapter="mine")
    run(core, late)
    assert late.outputs == world.says["a1"][1]


def run_once(core: EngineCore) -> None:
    before = core.passes
    core.step()
    if core.passes == before and not core.is_idle():
        core.wait(0.5)


def test_unloading_drains_and_frees(world, size):
    core = core_for(world, 2 * size)
    core.add_adapter("mine", world.path("a0"))
    running = core.add(PROMPTS[0], WISH, adapter="mine")
    core.step()
    core.remove_adapter("mine")
    with pytest.raises(UnknownAdapter):
        core.add(PROMPTS[0], WISH, adapter="mine")
    run(core, running)
    assert running.outputs == world.says["a0"][0]
    settle(core)
    figures = core.figures()
    assert (figures.registered, figures.resident, figures.device_bytes, figures.host_bytes) == (0, 0, 0, 0)


def test_equal_content_under_two_names_is_in_memory_once(world, size, tmp_path):
    core = core_for(world, 4 * size)
    core.add_adapter("one", world.path("a0"))
    core.add_adapter("two", world.copied("a0", tmp_path / "copy"))
    for name in ("one", "two"):
        request = core.add(PROMPTS[0], WISH, adapter=name)
        run(core, request)
        assert request.outputs == world.says["a0"][0]
    assert core.figures().device_bytes == size
    core.remove_adapter("one")
    assert core.figures().device_bytes == size
    core.remove_adapter("two")
    settle(core)
    assert core.figures().device_bytes == core.figures().host_bytes == 0


def cold(world: World, size: int, folder) -> EngineCore:
    """A core where the adapter "mine", read from `folder`, is in no memory."""
    core = core_for(world, size, size)
    core.add_adapter("mine", folder)
    core.add_adapter("other", world.path("a1"))
    request = core.add(PROMPTS[0], WISH, adapter="other")
    run(core, request)
    return core


def test_a_load_that_fails_ends_those_who_wait_for_it_and_nobody_else(world, size, tmp_path):
    folder = world.copied("a0", tmp_path / "mine")
    core = cold(world, size, folder)
    (folder / "adapter_model.safetensors").unlink()
    waiting = core.add_several(2, PROMPTS[0], WISH, adapter="mine")
    other = core.add(PROMPTS[1], WISH)
    run(core, *waiting, other)
    assert other.outputs == world.says["base"][1]
    failed = core.take_failed()
    assert {request.id for request, _ in failed} == {request.id for request in waiting}
    assert all(isinstance(error, BadAdapter) for _, error in failed)
    assert {request.reason for request in waiting} == {FinishReason.FAILED}
    with pytest.raises(BadAdapter, match="mine"):
        core.add(PROMPTS[0], WISH, adapter="mine")
    world.copied("a0", folder)
    core.add_adapter("mine", folder)  # loading it again repairs it
    again = core.add(PROMPTS[0], WISH, adapter="mine")
    run(core, again)
    assert again.outputs == world.says["a0"][0]
    assert core.figures().failures == 1


def test_files_that_changed_since_they_were_loaded_are_not_served(world, size, tmp_path):
    folder = world.copied("a0", tmp_path / "mine")
    core = cold(world, size, folder)
    world.copied("a2", folder)
    request = core.add(PROMPTS[0], WISH, adapter="mine")
    run(core, request)
    assert request.outputs == []
    ((failed, error),) = core.take_failed()
    assert failed is request
    assert "changed" in str(error)


def test_another_folder_with_the_same_content_will_do(world, size, tmp_path):
    core = cold(world, size, world.path("a0"))
    gone = world.copied("a0", tmp_path / "gone")
    core.add_adapter("twin", gone)
    other = core.add(PROMPTS[0], WISH, adapter="other")
    run(core, other)
    (gone / "adapter_model.safetensors").unlink()
    request = core.add(PROMPTS[0], WISH, adapter="twin")
    run(core, request)
    assert request.outputs == world.says["a0"][0]


def test_an_adapter_that_runs_all_the_time_lets_another_have_its_turn(world, size):
    """Room for one: `a0` always has requests, and `a1` is asked for once."""
    core = core_for(world, size, max_wait_s=0.0)
    for name in ("a0", "a1"):
        core.add_adapter(name, world.path(name))
    busy = [core.add(PROMPTS[i], WISH, adapter="a0", tenant="busy") for i in range(4)]
    core.step()
    once = core.add(PROMPTS[1], WISH, adapter="a1", tenant="rare")
    for _ in range(400):
        run_once(core)
        if once.reason is not None:
            break
        if sum(request.reason is None for request in busy) < 4:
            busy.append(core.add(PROMPTS[0], WISH, adapter="a0", tenant="busy"))
    assert once.outputs == world.says["a1"][1]
    run(core, *busy)
    assert all(request.outputs in world.says["a0"] for request in busy)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_everything_adds_up(world, size, seed, tmp_path):
    """Random loads, reloads, unloads, requests and cancels: each answer is that of what it was accepted with."""
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
            request = core.add(PROMPTS[prompt], WISH, adapter=name, tenant=rng.choice("ab"))
            alive.append((request, names[name] if name else "base", prompt))
        run_once(core)
        core._residency.check_integrity()
        core.scheduler.check_integrity()
    run(core, *(request for request, _, _ in alive))
    for request, content, prompt in alive:
        assert request.outputs == world.says[content][prompt]
        done += 1
    assert done > 10
    for name in names:
        core.remove_adapter(name)
    for _ in range(200):
        settle(core)
        if core.figures().host_bytes == 0:
            break
        core.wait(0.1)  # one that was just read is being kept, and let go when it is
    figures = core.figures()
    assert (figures.registered, figures.device_bytes, figures.host_bytes) == (0, 0, 0)


class TestTwoLevels:
    """Only where adapters are copied."""

    @pytest.fixture(autouse=True)
    def needs_copies(self, copying):
        if not copying:
            pytest.skip("nothing is copied on one level")

    def test_nobody_waits_for_another_adapters_load(self, world, size):
        core = core_for(world, 2 * size)
        core.add_adapter("a0", world.path("a0"))
        core.add_adapter("a1", world.path("a1"))
        says(world, core, "a0")
        core._residency._device.gate.clear()
        waits = core.add(PROMPTS[0], WISH, adapter="a1")
        others = [core.add(PROMPTS[1], WISH, adapter="a0"), core.add(PROMPTS[2], WISH)]
        run(core, *others, steps=3 * COUNT)
        assert [request.outputs for request in others] == [world.says["a0"][1], world.says["base"][2]]
        assert waits.outputs == []
        core._residency._device.gate.set()
        run(core, waits)
        assert waits.outputs == world.says["a1"][0]

    def test_what_is_unloaded_on_its_way_is_freed_when_it_arrives(self, world, size):
        core = core_for(world, 2 * size)
        core.add_adapter("a0", world.path("a0"))
        core._residency._device.gate.clear()
        request = core.add(PROMPTS[0], WISH, adapter="a0")
        core.step()
        assert core.figures().loading == 1
        core.cancel(request)
        core.remove_adapter("a0")
        core._residency._device.gate.set()
        settle(core)
        figures = core.figures()
        assert (figures.loading, figures.device_bytes, figures.host_bytes, figures.loads) == (0, 0, 0, 0)

    def test_what_is_in_host_memory_is_not_read_again(self, world, size):
        core = core_for(world, size, 3 * size)
        for name in ("a0", "a1", "a2"):
            core.add_adapter(name, world.path(name))
        for name in ("a0", "a1", "a2", "a0", "a1"):
            says(world, core, name)
        assert (core.figures().reads, core.figures().loads) == (0, 5)

    def test_what_is_in_host_memory_does_not_wait_for_a_disk(self, world, size, monkeypatch):
        core = core_for(world, 4 * size, 2 * size, max_disk_loads=1)
        for name in ("a0", "a1", "a2", "a3"):
            core.add_adapter(name, world.path(name))
        core._residency._loader._reader.submit(int).result()  # all that could be kept is kept
        slow, carrier = threading.Event(), core._residency._loader
        read = carrier.read
        monkeypatch.setattr(carrier, "read", lambda folder: slow.wait(60) and read(folder))
        waits = [core.add(PROMPTS[0], WISH, adapter=name) for name in ("a0", "a1")]
        core.step()
        others = [core.add(PROMPTS[1], WISH, adapter=name) for name in ("a2", "a3")]
        run(core, *others)
        assert [request.outputs for request in others] == [world.says["a2"][1], world.says["a3"][1]]
        assert [request.outputs for request in waits] == [[], []]
        slow.set()
        run(core, *waits)
        assert [request.outputs for request in waits] == [world.says["a0"][0], world.says["a1"][0]]

    def test_an_error_of_ours_ends_those_who_wait_and_the_next_tries_again(self, world, size, monkeypatch):
        core = core_for(world, size)
        core.add_adapter("a0", world.path("a0"))
        with monkeypatch.context() as patch:
            patch.setattr(type(core._residency._device), "copy_in", lambda *_: 1 / 0)
            request = core.add(PROMPTS[0], WISH, adapter="a0")
            run(core, request)
            ((_, error),) = core.take_failed()
            assert "ZeroDivisionError" in str(error)
        says(world, core, "a0")


def test_the_table_has_a_line_for_every_layer_of_every_adapter_here(world, size):
    core = core_for(world, 2 * size)
    for name in ("a0", "a1"):
        core.add_adapter(name, world.path(name))
        says(world, core, name)
    slots, residency = core._residency.slots, core._residency
    q, k, v = (f"model.layers.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    for hash in core.adapters.values():
        lines = slots.columns_of(q, k, v)[residency.slots.slot_of(residency.resident[hash])].tolist()
        lows = [residency.resident[hash].parts[path][0] for path in (q, k, v)]
        assert lines == [[low.a_rI.data_ptr(), low.b_Or.data_ptr(), 4, 0] for low in lows]
    with pytest.raises(ValueError, match="adjacent"):
        slots.columns_of(q, v)
    slot = residency.slots.slot_of(residency.resident[core.adapters["a0"]])
    core.remove_adapter("a0")
    assert not slots.table_SM4[slot].any()
