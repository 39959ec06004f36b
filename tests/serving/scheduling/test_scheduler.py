"""Passes are planned with an injected clock and computed by nobody: see simulated.py."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.errors import ContextTooLong, OutOfRange, TooManyRequests
from symbiosis.serving.scheduling.scheduler import SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling, SequenceState
from tests.serving.scheduling.simulated import Simulated, expected
from tests.work import lines_run


def rows(made):
    return {chunk.sequence.id: chunk.count for chunk in made.chunks}


class TestPasses:
    def test_a_prompt_is_computed_in_chunks_and_then_decodes_row_by_row(self):
        engine = Simulated(max_chunk=8)
        one = engine.add("a", prompt=range(20), max_tokens=3)
        assert [rows(engine.step()).get("a") for _ in range(5)] == [8, 8, 4, 1, 1]
        assert one.state is SequenceState.DONE
        assert one.reason is FinishReason.LENGTH
        assert one.outputs == expected(one, 3)
        assert engine.step().chunks == ()

    def test_decoding_and_prompts_share_a_pass_and_decoding_comes_first(self):
        engine = Simulated(max_rows=9, max_chunk=8)
        engine.add("a", max_tokens=10)
        engine.step()
        engine.add("b", prompt=range(30))
        assert rows(engine.step()) == {"a": 1, "b": 8}
        engine.add("c", prompt=range(30, 32))
        assert rows(engine.step()) == {"a": 1, "b": 8}  # no rows were left for c
        assert [chunk.sequence.id for chunk in engine.step().chunks] == ["a", "b"]

    def test_a_long_prompt_leaves_rows_to_short_ones(self):
        engine = Simulated(max_rows=16, max_chunk=8)
        engine.add("long", prompt=[*range(32)] * 5)
        engine.add("short", prompt=range(5, 10))
        assert rows(engine.step()) == {"long": 8, "short": 5}

    def test_rows_of_one_adapter_are_together_and_the_base_model_comes_first(self):
        engine = Simulated(max_rows=64)
        for id, adapter in [("a", "x"), ("b", "y"), ("c", ""), ("d", "x"), ("e", "y"), ("f", "")]:
            engine.add(id, adapter=adapter, tenant=id)
        assert [chunk.sequence.adapter for chunk in engine.step().chunks] == ["", "", "x", "x", "y", "y"]

    def test_a_stop_token_ends_an_answer_and_is_its_last_token(self):
        engine = Simulated()
        sequence = engine.add("probe", max_tokens=3)
        engine.drain()
        stop = sequence.outputs[1]
        sampling = Sampling(max_tokens=9, stop_ids=(stop,))
        ended = engine.add("a", sampling=sampling)
        engine.drain()
        assert (ended.reason, ended.outputs) == (FinishReason.STOP, sequence.outputs[: sequence.outputs.index(stop) + 1])
        by_eos = engine.add("b", max_tokens=9, eos_ids=(stop,))
        engine.drain()
        assert (by_eos.reason, by_eos.outputs) == (FinishReason.STOP, ended.outputs)

    def test_an_answer_ends_where_the_context_ends(self):
        engine = Simulated(max_length=12)
        one = engine.add("a", prompt=range(10), max_tokens=None)
        engine.drain()
        assert (one.reason, len(one.tokens)) == (FinishReason.LENGTH, 12)

    def test_a_row_that_cannot_be_chosen_from_fails_alone(self):
        engine = Simulated()
        engine.add("a")
        engine.add("b")
        made = engine.plan()
        good = engine.run(made)
        engine.finish(made, [-1 if one.id == "a" else token for one, token in zip(made.sampled, good, strict=True)])
        assert engine.added["a"].reason is FinishReason.FAILED
        engine.drain()
        assert engine.added["b"].reason is FinishReason.LENGTH

    def test_nobody_is_lost_when_a_pass_fails(self):
        engine = Simulated()
        engine.add("a", prompt=range(8), max_tokens=6)
        engine.step()
        engine.add("b", prompt=range(8), max_tokens=6)
        engine.scheduler.abandon(engine.plan())
        engine.scheduler.check_integrity()
        engine.drain()
        assert [engine.added[id].outputs == expected(engine.added[id], 6) for id in "ab"] == [True, True]


class TestDoor:
    def test_what_is_wrong_is_refused_before_it_meets_others(self):
        engine = Simulated(pages=4, page_size=4)
        with pytest.raises(OutOfRange, match="prompt"):
            engine.add("a", prompt=[1, 99])
        with pytest.raises(ContextTooLong):
            engine.add("b", prompt=range(10), max_tokens=7)
        engine.add("c", prompt=range(10), max_tokens=6)
        with pytest.raises(OutOfRange, match="known already"):
            engine.add("c")
        engine.drain()
        assert list(engine.ended) == ["c"]

    def test_a_tenant_may_only_queue_so_many_and_nobody_else_notices(self):
        engine = Simulated(tenant_queued=3, max_queued=5)
        for number in range(3):
            engine.add(f"a{number}")
        with pytest.raises(TooManyRequests, match="ann"):
            engine.add("a3")
        with pytest.raises(TooManyRequests):
            engine.add("many", tenant="cid", n=3)
        assert "many" not in engine.added
        engine.add("b0", tenant="bob")
        engine.add("b1", tenant="bob")
        with pytest.raises(TooManyRequests, match="Try again"):
            engine.add("c0", tenant="cid")
        engine.drain()
        assert len(engine.ended) == 5

    def test_a_tenant_may_only_run_so_many(self):
        engine = Simulated(tenant_running=2, max_rows=100)
        for number in range(6):
            engine.add(f"a{number}")
        engine.add("b", tenant="bob")
        assert set(rows(engine.step())) == {"a0", "a1", "b"}
        engine.drain()

    def test_admission_is_by_pages_for_the_prompt_and_one_token(self):
        engine = Simulated(pages=4, page_size=4, watermark=0)
        engine.add("a", prompt=range(8), max_tokens=2)
        engine.add("b", prompt=range(10, 14), max_tokens=2)
        assert set(rows(engine.step())) == {"a"}
        engine.drain()
        assert len(engine.ended) == 2

    def test_the_watermark_leaves_pages_to_those_who_decode(self):
        engine = Simulated(pages=10, page_size=4, watermark=0.5)
        engine.add("a", prompt=range(8))
        engine.add("b", prompt=range(10, 18))
        assert set(rows(engine.step())) == {"a"}

    def test_config_is_checked(self):
        good = {"vocabulary": 10, "max_length": 10}
        for bad in ({"max_rows": 4, "max_running": 4}, {"watermark": 0.9}, {"max_chunk": 0}, {"max_wait_s": -1}):
            with pytest.raises(OutOfRange):
                SchedulerConfig(**good, **bad)


class TestCancel:
    def test_cancel_frees_pages_at_once(self):
        engine = Simulated()
        engine.add("a", prompt=range(8), max_tokens=9)
        engine.step()
        assert engine.pool.available < 64
        engine.cancel("a")
        assert engine.pool.available == 64
        assert not engine.scheduler.cancel("a")
        assert not engine.scheduler.cancel("nobody")

    def test_cancel_in_mid_pass_drops_the_token(self):
        engine = Simulated()
        engine.add("a")
        engine.add("b")
        made = engine.plan()
        engine.cancel("a")
        assert engine.pool.available == 64 - 2
        engine.finish(made, engine_tokens := [0] * len(made.sampled))
        assert len(engine_tokens) == 2
        assert engine.added["a"].outputs == []
        assert engine.added["b"].outputs == [0]

    def test_cancel_of_a_waiting_one_never_runs_it(self):
        engine = Simulated(max_running=1)
        engine.add("a")
        engine.add("b")
        engine.step()
        engine.cancel("b")
        engine.drain()
        assert "b" not in engine.admitted


class TestPreemption:
    def test_the_youngest_makes_room_and_says_the_same_again(self):
        engine = Simulated(pages=8, page_size=4, watermark=0)
        for id in "ab":
            engine.add(id, prompt=[ord(id) % 32] * 8, max_tokens=20)
            engine.step()
        seen = None
        while not engine.preemptions:
            seen = list(engine.added["b"].outputs)
            engine.step()
        young = engine.added["b"]
        assert engine.last.preempted == (young,)
        assert (young.state, young.outputs) == (SequenceState.PREEMPTED, [*seen])
        engine.drain()
        assert young.outputs == expected(young, 20)
        assert engine.added["a"].preemptions == 0

    def test_less_weight_makes_room_first(self):
        engine = Simulated(pages=8, page_size=4, watermark=0)
        engine.add("light", tenant="bob", prompt=[1] * 8, max_tokens=20, weight=1.0)
        engine.step()
        engine.add("heavy", tenant="ann", prompt=[2] * 8, max_tokens=20, weight=2.0)
        engine.drain()
        assert engine.added["light"].preemptions > 0
        assert engine.added["heavy"].preemptions == 0

    def test_who_made_room_once_is_not_asked_again_by_newcomers(self):
        engine = Simulated(pages=8, page_size=4, watermark=0, max_running=4)
        light = engine.add("light", tenant="bob", prompt=[1] * 8, max_tokens=20, weight=1.0)
        engine.step()
        for number in range(40):
            engine.add(f"h{number}", tenant="ann", prompt=[2, number % 32] * 4, max_tokens=20, weight=100.0)
            engine.step()
        engine.drain()
        assert light.preemptions == 1

    def test_one_sequence_can_fill_all_pages(self):
        engine = Simulated(pages=4, page_size=4)
        one = engine.add("a", prompt=range(8), max_tokens=8)
        engine.drain()
        assert one.outputs == expected(one, 8)


class TestCache:
    def test_a_second_request_computes_only_what_is_new(self):
        engine = Simulated()
        first = engine.add("a", prompt=range(17))
        engine.drain()
        second = engine.add("b", prompt=[*range(16), 30, 31])
        assert rows(engine.step()) == {"b": 2}
        assert (first.cached, second.cached) == (0, 16)
        engine.drain()

    def test_the_very_same_prompt_computes_one_row(self):
        engine = Simulated()
        engine.add("a", prompt=range(16))
        engine.drain()
        engine.add("b", prompt=range(16))
        made = engine.step()
        assert rows(made) == {"b": 1}
        assert len(made.copies) == 1
        engine.drain()

    @pytest.mark.parametrize("change", [{"salt": b"other"}, {"adapter": "other"}])
    def test_another_salt_or_adapter_computes_all(self, change):
        engine = Simulated()
        engine.add("a", prompt=range(8), salt=b"s", adapter="x")
        engine.drain()
        engine.add("b", **{"prompt": range(8), "salt": b"s", "adapter": "x", **change})
        assert rows(engine.step()) == {"b": 8}
        engine.drain()

    def test_siblings_wait_for_the_prompt_and_then_compute_one_row_each(self):
        engine = Simulated(max_rows=64, max_chunk=8)
        answers = engine.add("a", prompt=range(14), max_tokens=3, n=3)
        assert rows(engine.step()) == {"a": 8}
        assert rows(engine.step()) == {"a": 6}
        made = engine.step()
        assert rows(made) == {"a": 1, "a.1": 1, "a.2": 1}
        assert len(made.copies) == 2
        engine.drain()
        assert all(one.outputs == expected(one, 3) for one in answers)

    def test_siblings_hold_up_nobody_behind_them(self):
        engine = Simulated(max_rows=64, max_chunk=8)
        engine.add("a", prompt=range(30), n=2)
        engine.add("b")
        assert set(rows(engine.step())) == {"a", "b"}

    def test_a_page_that_is_about_to_be_filled_by_a_copy_is_not_copied_from(self):
        engine = Simulated(max_running=1)
        parent, child = engine.add("a", prompt=range(6), max_tokens=4, n=2)
        before = engine.add("b", tenant="bob", prompt=[*range(6), *expected(parent, 2)], max_tokens=1)
        engine.cancel("a")
        engine.cancel("a.1")
        engine.drain()
        assert before.reason is FinishReason.LENGTH
        parent, child = engine.add("c", prompt=range(6), max_tokens=4, n=2)
        engine.step()
        engine.step()
        engine.scheduler.abandon(engine.plan())
        assert (len(parent.tokens), parent.state) == (8, SequenceState.PREEMPTED)
        engine.scheduler.config = dataclasses.replace(engine.scheduler.config, max_running=2)
        made = engine.step()
        assert set(rows(made)) == {"c", "c.1"}
        assert len({source for source, _ in made.copies} & {target for _, target in made.copies}) == 0
        engine.drain()
        assert child.outputs == expected(child, 4)

    def test_siblings_get_on_without_their_parent(self):
        engine = Simulated()
        engine.add("a", prompt=range(30), n=3)
        engine.step()
        engine.cancel("a.1")
        engine.cancel("a")
        engine.drain()
        assert engine.added["a.2"].reason is FinishReason.LENGTH


class TestFairness:
    def flood(self, engine, tenant="flood", number=200, **changes):
        for each in range(number):
            engine.add(f"{tenant}{each}", tenant=tenant, prompt=[each % 32, each // 32, 3, 4], max_tokens=8, **changes)

    def test_a_flood_does_not_hold_up_another_tenant(self):
        engine = Simulated(max_running=4, tenant_running=4)
        self.flood(engine)
        for _ in range(20):
            engine.step()
        engine.add("b", tenant="bob")
        engine.step()
        while "b" not in engine.admitted:
            engine.step()
        assert engine.admitted["b"] - engine.added["b"].arrival <= 8  # the next to end makes place

    def test_shares_follow_weights(self):
        engine = Simulated(max_running=6, max_rows=32, max_wait_s=1e6)
        self.flood(engine, "a", 300, weight=3.0)
        self.flood(engine, "b", 300, weight=1.0)
        for _ in range(300):
            engine.step()
        done = [sum(one.tenant == tenant for one in engine.ended.values()) for tenant in "ab"]
        assert done[0] / done[1] == pytest.approx(3.0, rel=0.15)

    def test_nobody_saves_up_while_away(self):
        engine = Simulated(max_running=4)
        self.flood(engine, "a", 100)
        for _ in range(100):
            engine.step()
        self.flood(engine, "b", 100)
        engine.step()
        assert engine.scheduler.counter("b") >= engine.scheduler.counter("a") / 2
        start = len(engine.ended)
        for _ in range(100):
            engine.step()
        later = list(engine.ended.values())[start:]
        assert sum(one.tenant == "a" for one in later) >= len(later) * 0.4

    def test_nobody_starves_however_little_it_weighs(self):
        engine = Simulated(max_running=4, max_wait_s=30)
        self.flood(engine, "heavy", 600, weight=1000.0)
        engine.add("light", tenant="light", weight=0.001)
        for _ in range(45):
            engine.step()
        assert engine.admitted["light"] <= 30 + 10

    def test_many_tenants_that_all_waited_too_long_take_turns(self):
        engine = Simulated(max_running=2, max_wait_s=5)
        self.flood(engine, "flood", 400)
        for tenant in range(20):
            engine.add(f"t{tenant}", tenant=f"t{tenant}", max_tokens=8)
        for _ in range(150):
            engine.step()
        assert all(f"t{tenant}" in engine.ended for tenant in range(20))

    def test_a_large_prompt_gets_its_pages_under_a_stream_of_small_ones(self):
        engine = Simulated(pages=16, page_size=4, max_wait_s=10)
        self.flood(engine, "small", 20)
        engine.step()
        engine.add("large", tenant="large", prompt=[7] * 50, max_tokens=4)
        for number in range(60):
            engine.add(f"more{number}", tenant="small", prompt=[number % 32, 1, 2], max_tokens=8)
            engine.step()
        assert "large" in engine.ended

    def test_newcomers_of_many_tenants_do_not_hold_up_each_other_for_pages(self):
        engine = Simulated(pages=16, page_size=4, max_wait_s=1e6)
        engine.add("runs", prompt=[1] * 20, max_tokens=20)
        engine.step()
        engine.add("large", tenant="large", prompt=[7] * 50, max_tokens=4)
        engine.add("small", tenant="small", prompt=[8] * 4, max_tokens=4)
        assert set(rows(engine.step())) == {"runs", "small"}


class TestAdapters:
    def test_an_adapter_that_is_not_there_holds_up_nobody_and_is_asked_for(self):
        there = {"x"}
        engine = Simulated(resident=there.__contains__)
        engine.add("a", adapter="y")
        engine.add("b", adapter="x")
        engine.add("c")
        made = engine.step()
        assert set(rows(made)) == {"b", "c"}
        assert made.missing == ("y",)
        there.add("y")
        made = engine.step()
        assert "a" in rows(made)
        assert made.missing == ()
        engine.drain()

    def test_each_adapter_is_asked_about_once_a_plan(self):
        asked = []
        engine = Simulated(resident=lambda adapter: not asked.append(adapter), max_rows=200)
        for number in range(8):
            engine.add(f"a{number}", adapter="x")
        engine.step()
        assert asked == ["x"]

    def test_no_more_adapters_run_than_there_are_slots(self):
        engine = Simulated(max_adapters=2, max_rows=100)
        for number in range(4):
            engine.add(f"a{number}", adapter=f"x{number}")
        engine.add("base")
        for _ in range(8):
            made = engine.step()
            assert len({chunk.sequence.adapter for chunk in made.chunks} - {""}) <= 2
        engine.drain()
        assert len(engine.ended) == 5

    def test_a_busy_adapter_gives_its_slot_to_one_that_waited_too_long(self):
        engine = Simulated(max_adapters=1, max_running=4, max_wait_s=10)
        engine.add("cold", tenant="bob", adapter="cold")
        engine.cancel("cold")
        for number in range(300):
            engine.add(f"h{number}", adapter="hot", prompt=[number % 32, 1, 2])
            if number == 5:
                engine.add("late", tenant="bob", adapter="cold")
            engine.step()
        assert "late" in engine.ended
        assert engine.admitted["late"] <= 5 + 10 + 10
        assert len(engine.ended) > 100

    def test_also_within_one_tenant(self):
        engine = Simulated(max_adapters=1, max_running=4, max_wait_s=10)
        for number in range(60):
            engine.add(f"h{number}", adapter="hot", prompt=[number % 32, 1, 2])
            if number == 5:
                engine.add("late", adapter="cold")
            engine.step()
        assert "late" in engine.ended

    def test_a_slot_is_kept_for_who_waited_too_long_while_its_adapter_is_loaded(self):
        there = {"a", "b"}
        engine = Simulated(max_adapters=1, max_running=4, max_wait_s=3, resident=there.__contains__)
        engine.add("late", tenant="bob", adapter="cold")
        asked = 0
        for number in range(40):
            engine.add(f"n{number}", adapter="ab"[number % 2], prompt=[number % 32, 1, 2], max_tokens=2)
            asked = asked + 1 if "cold" in engine.step().missing else 0
            if asked == 3:  # it takes three steps to load, and is given up if nobody asks
                there.add("cold")
        assert "late" in engine.ended

    def test_many_cold_adapters_of_one_tenant_do_not_go_before_everybody_elses(self):
        engine = Simulated(resident=lambda adapter: False, max_rows=100)
        for number in range(6):
            engine.add(f"a{number}", tenant="ann", adapter=f"ann{number}")
        for number in range(2):
            engine.add(f"b{number}", tenant="bob", adapter=f"bob{number}")
        assert engine.step().missing == ("ann0", "bob0", "ann1", "bob1", "ann2", "ann3", "ann4", "ann5")

    def test_what_will_be_missing_is_asked_for_while_nobody_can_be_admitted(self):
        engine = Simulated(max_running=1, resident=lambda adapter: not adapter)
        engine.add("runs", max_tokens=20)
        engine.step()
        engine.add("next", tenant="bob", adapter="cold")
        assert engine.step().missing == ("cold",)

    def test_an_adapter_that_is_to_leave_admits_nobody_and_goes_on_with_those_it_has(self):
        engine = Simulated()
        engine.add("runs", adapter="x", max_tokens=20)
        engine.step()
        engine.scheduler.draining = {"x": "y"}
        engine.add("new", adapter="x")
        assert set(rows(engine.step())) == {"runs"}
        engine.scheduler.draining = {}
        assert set(rows(engine.step())) == {"runs", "new"}
        engine.drain()


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(6, 24), st.integers(1, 5), st.integers(1, 6))
def test_whatever_comes_every_sequence_ends_once_with_the_right_tokens(seed, pages, page_size, running):
    rng = random.Random(seed)
    loaded = {f"x{number}" for number in range(3)}
    engine = Simulated(
        pages=pages, page_size=page_size, max_running=running, max_rows=running + rng.randrange(1, 12),
        max_chunk=rng.randrange(1, 9), max_adapters=rng.randrange(1, 4), tenant_running=rng.randrange(1, 5),
        max_wait_s=rng.choice([0, 5, 50]), watermark=rng.choice([0, 0.2]), look=rng.randrange(1, 4),
        resident=lambda adapter: adapter in loaded,
    )  # fmt: skip
    room = pages * page_size
    for step in range(60):
        for _ in range(rng.randrange(3)):
            length = rng.randrange(1, max(2, room // 2))
            most = rng.randrange(1, max(2, min(room - length, 12)) + 1) if room - length > 1 else 1
            if length + most > room:
                continue
            tenant = rng.choice(["ann", "bob", "cid"])
            engine.add(
                f"{step}-{rng.random()}", tenant=tenant, prompt=[rng.randrange(2) for _ in range(length)], max_tokens=most,
                n=rng.choice([1, 1, 1, 3]), adapter=rng.choice(["", "x0", "x1", "x2"]), salt=rng.choice([b"", tenant.encode()]),
                weight=rng.choice([0.5, 1.0, 4.0]), eos_ids=(rng.randrange(32),),
            )  # fmt: skip
        running_adapters = {one.adapter for one in engine.added.values() if one.state is SequenceState.RUNNING}
        loaded = {f"x{number}" for number in range(3) if rng.random() < 0.7} | running_adapters
        made = engine.plan()
        tokens = engine.run(made)
        if rng.random() < 0.3 and engine.added:
            engine.cancel(rng.choice(list(engine.added)))
        if rng.random() < 0.05:
            engine.scheduler.abandon(made)
            engine.scheduler.check_integrity()
        else:
            engine.finish(made, tokens)
    loaded = {"x0", "x1", "x2"}
    engine.drain()
    assert set(engine.ended) == set(engine.added)
    assert engine.pool.available == pages
    assert all(one.state is SequenceState.DONE and one.reason is not None for one in engine.added.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_under_any_flood_the_wait_is_bounded(seed):
    rng = random.Random(seed)
    engine = Simulated(pages=12, page_size=4, max_running=4, max_rows=12, max_wait_s=10, max_adapters=2)
    quiet = 0
    for step in range(200):
        for _ in range(2):
            engine.add(
                f"f{step}-{rng.random()}", tenant="flood", prompt=[rng.randrange(32) for _ in range(rng.randrange(1, 9))],
                max_tokens=rng.randrange(1, 9), adapter=rng.choice(["", "x", "y"]), weight=4.0,
            )  # fmt: skip
        if step % 20 == 10:
            engine.add(
                f"q{quiet}", tenant="quiet", prompt=[5] * rng.randrange(1, 30), max_tokens=4, adapter=rng.choice(["", "z"])
            )
            quiet += 1
        engine.step()
    waits = [engine.admitted.get(f"q{i}", engine.now) - engine.added[f"q{i}"].arrival for i in range(quiet)]
    assert max(waits) <= 10 + 60


@pytest.mark.parametrize("queued", [0, 7680])
def test_planning_is_little_work_with_512_running_however_many_wait(queued):
    engine = Simulated(
        pages=40_000, page_size=16, max_running=512, max_rows=2048, max_queued=20_000, tenant_queued=20_000, tenant_running=512,
        max_chunk=512, max_adapters=64,
    )  # fmt: skip
    for number in range(512 + queued):
        engine.add(f"{number}", tenant=f"t{number % 512}", prompt=[number % 32] * 4, max_tokens=500, adapter=f"x{number % 64}")
    scheduler, spent = engine.scheduler, []

    def step(now: float) -> None:
        made = scheduler.plan(now)
        scheduler.done(made, [1] * len(made.sampled))

    for now in range(20):
        spent.append(lines_run(partial(step, float(now))))
    assert scheduler.running == 512
    assert sorted(spent)[10] < 100 * 512
