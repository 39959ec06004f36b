"""Batches are scheduled with an injected clock and computed by a simulation: see simulated_engine.py."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from symbiosis.errors import ContextTooLong, OutOfRange, TooManyRequests
from symbiosis.serving.scheduling.scheduler import SchedulerConfig
from symbiosis.serving.scheduling.sequence import FinishReason, Sampling, SequenceState
from tests.serving.scheduling.simulated_engine import SimulatedEngine, expected, rows
from tests.work import lines_run


class TestBatches:
    def test_a_prompt_is_prefilled_in_chunks_and_then_decodes(self):
        engine = SimulatedEngine(max_chunk=8)
        one = engine.add("a", prompt=range(20), max_tokens=3)
        assert [rows(engine.step()).get("a") for _ in range(5)] == [8, 8, 4, 1, 1]
        assert one.state is SequenceState.FINISHED
        assert one.reason is FinishReason.LENGTH
        assert one.outputs == expected(one, 3)
        assert engine.step().chunks == ()

    def test_decode_and_prefill_share_a_batch_and_decode_comes_first(self):
        engine = SimulatedEngine(max_rows=9, max_chunk=8)
        engine.add("a", max_tokens=10)
        engine.step()
        engine.add("b", prompt=range(30))
        assert rows(engine.step()) == {"a": 1, "b": 8}
        engine.add("c", prompt=range(30, 32))
        assert rows(engine.step()) == {"a": 1, "b": 8}  # no budget was left for c
        assert [chunk.sequence.id for chunk in engine.step().chunks] == ["a", "b"]

    def test_a_long_prompt_leaves_budget_to_short_ones(self):
        engine = SimulatedEngine(max_rows=16, max_chunk=8)
        engine.add("long", prompt=[*range(32)] * 5)
        engine.add("short", prompt=range(5, 10))
        assert rows(engine.step()) == {"long": 8, "short": 5}

    def test_rows_of_one_adapter_are_together_and_the_base_model_comes_first(self):
        engine = SimulatedEngine(max_rows=64)
        for id, adapter in [("a", "x"), ("b", "y"), ("c", ""), ("d", "x"), ("e", "y"), ("f", "")]:
            engine.add(id, adapter=adapter, tenant=id)
        assert [chunk.sequence.adapter for chunk in engine.step().chunks] == ["", "", "x", "x", "y", "y"]

    def test_a_stop_token_ends_a_completion_and_is_its_last_token(self):
        engine = SimulatedEngine()
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

    def test_a_completion_ends_where_the_context_ends(self):
        engine = SimulatedEngine(max_length=12)
        one = engine.add("a", prompt=range(10), max_tokens=None)
        engine.drain()
        assert (one.reason, len(one.tokens)) == (FinishReason.LENGTH, 12)

    def test_a_row_without_a_token_fails_alone(self):
        engine = SimulatedEngine()
        engine.add("a")
        engine.add("b")
        batch = engine.schedule()
        good = engine.run(batch)
        engine.finish(batch, [-1 if one.id == "a" else token for one, token in zip(batch.sampled, good, strict=True)])
        assert engine.added["a"].reason is FinishReason.FAILED
        engine.drain()
        assert engine.added["b"].reason is FinishReason.LENGTH

    def test_no_sequence_is_lost_when_a_step_fails(self):
        engine = SimulatedEngine()
        engine.add("a", prompt=range(8), max_tokens=6)
        engine.step()
        engine.add("b", prompt=range(8), max_tokens=6)
        engine.scheduler.preempt(engine.schedule())
        engine.scheduler.check_integrity()
        engine.drain()
        assert [engine.added[id].outputs == expected(engine.added[id], 6) for id in "ab"] == [True, True]


class TestAdmission:
    def test_wrong_requests_are_rejected_before_they_are_queued(self):
        engine = SimulatedEngine(num_blocks=4, block_size=4)
        with pytest.raises(OutOfRange, match="prompt"):
            engine.add("a", prompt=[1, 99])
        with pytest.raises(ContextTooLong):
            engine.add("b", prompt=range(10), max_tokens=7)
        engine.add("c", prompt=range(10), max_tokens=6)
        with pytest.raises(OutOfRange, match="known already"):
            engine.add("c")
        engine.drain()
        assert list(engine.ended) == ["c"]

    def test_the_queue_of_a_tenant_is_limited_without_effect_on_others(self):
        engine = SimulatedEngine(tenant_queued=3, max_queued=5)
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

    def test_the_running_sequences_of_a_tenant_are_limited(self):
        engine = SimulatedEngine(tenant_running=2, max_rows=100)
        for number in range(6):
            engine.add(f"a{number}")
        engine.add("b", tenant="bob")
        assert set(rows(engine.step())) == {"a0", "a1", "b"}
        engine.drain()

    def test_admission_is_by_blocks_for_the_prompt_and_one_token(self):
        engine = SimulatedEngine(num_blocks=4, block_size=4, watermark=0)
        engine.add("a", prompt=range(8), max_tokens=2)
        engine.add("b", prompt=range(10, 14), max_tokens=2)
        assert set(rows(engine.step())) == {"a"}
        engine.drain()
        assert len(engine.ended) == 2

    def test_the_watermark_leaves_blocks_to_decoding_sequences(self):
        engine = SimulatedEngine(num_blocks=10, block_size=4, watermark=0.5)
        engine.add("a", prompt=range(8))
        engine.add("b", prompt=range(10, 18))
        assert set(rows(engine.step())) == {"a"}

    def test_config_is_checked(self):
        good = {"vocab_size": 10, "max_length": 10}
        for bad in ({"max_rows": 4, "max_running": 4}, {"watermark": 0.9}, {"max_chunk": 0}, {"max_wait_s": -1}):
            with pytest.raises(OutOfRange):
                SchedulerConfig(**good, **bad)


class TestCancel:
    def test_cancel_frees_blocks_at_once(self):
        engine = SimulatedEngine()
        engine.add("a", prompt=range(8), max_tokens=9)
        engine.step()
        assert engine.blocks.num_free_blocks < 64
        engine.cancel("a")
        assert engine.blocks.num_free_blocks == 64
        assert not engine.scheduler.cancel("a")
        assert not engine.scheduler.cancel("unknown")

    def test_cancel_in_mid_step_drops_the_token(self):
        engine = SimulatedEngine()
        engine.add("a")
        engine.add("b")
        batch = engine.schedule()
        engine.cancel("a")
        assert engine.blocks.num_free_blocks == 64 - 2
        engine.finish(batch, engine_tokens := [0] * len(batch.sampled))
        assert len(engine_tokens) == 2
        assert engine.added["a"].outputs == []
        assert engine.added["b"].outputs == [0]

    def test_a_sequence_cancelled_while_waiting_never_runs(self):
        engine = SimulatedEngine(max_running=1)
        engine.add("a")
        engine.add("b")
        engine.step()
        engine.cancel("b")
        engine.drain()
        assert "b" not in engine.admitted


class TestPreemption:
    def test_the_youngest_is_preempted_and_generates_the_same_tokens(self):
        engine = SimulatedEngine(num_blocks=8, block_size=4, watermark=0)
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

    def test_less_weight_is_preempted_first(self):
        engine = SimulatedEngine(num_blocks=8, block_size=4, watermark=0)
        engine.add("light", tenant="bob", prompt=[1] * 8, max_tokens=20, weight=1.0)
        engine.step()
        engine.add("heavy", tenant="ann", prompt=[2] * 8, max_tokens=20, weight=2.0)
        engine.drain()
        assert engine.added["light"].preemptions > 0
        assert engine.added["heavy"].preemptions == 0

    def test_a_preempted_sequence_is_not_preempted_again_by_newer_ones(self):
        engine = SimulatedEngine(num_blocks=8, block_size=4, watermark=0, max_running=4)
        light = engine.add("light", tenant="bob", prompt=[1] * 8, max_tokens=20, weight=1.0)
        engine.step()
        for number in range(40):
            engine.add(f"h{number}", tenant="ann", prompt=[2, number % 32] * 4, max_tokens=20, weight=100.0)
            engine.step()
        engine.drain()
        assert light.preemptions == 1

    def test_one_sequence_can_fill_all_blocks(self):
        engine = SimulatedEngine(num_blocks=4, block_size=4)
        one = engine.add("a", prompt=range(8), max_tokens=8)
        engine.drain()
        assert one.outputs == expected(one, 8)


class TestPrefixCache:
    def test_a_second_request_computes_only_what_is_new(self):
        engine = SimulatedEngine()
        first = engine.add("a", prompt=range(17))
        engine.drain()
        second = engine.add("b", prompt=[*range(16), 30, 31])
        assert rows(engine.step()) == {"b": 2}
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
        engine.drain()

    def test_an_identical_prompt_computes_one_token(self):
        engine = SimulatedEngine()
        engine.add("a", prompt=range(16))
        engine.drain()
        engine.add("b", prompt=range(16))
        batch = engine.step()
        assert rows(batch) == {"b": 1}
        assert len(batch.copies) == 1
        engine.drain()

    @pytest.mark.parametrize("change", [{"cache_salt": b"other"}, {"adapter": "other"}])
    def test_another_salt_or_adapter_computes_all(self, change):
        engine = SimulatedEngine()
        engine.add("a", prompt=range(8), cache_salt=b"s", adapter="x")
        engine.drain()
        engine.add("b", **{"prompt": range(8), "cache_salt": b"s", "adapter": "x", **change})
        assert rows(engine.step()) == {"b": 8}
        engine.drain()

    def test_forks_wait_for_the_prompt_and_then_compute_one_token_each(self):
        engine = SimulatedEngine(max_rows=64, max_chunk=8)
        forks = engine.add("a", prompt=range(14), max_tokens=3, n=3)
        assert rows(engine.step()) == {"a": 8}
        assert rows(engine.step()) == {"a": 6}
        batch = engine.step()
        assert rows(batch) == {"a": 1, "a.1": 1, "a.2": 1}
        assert len(batch.copies) == 2
        engine.drain()
        assert all(one.outputs == expected(one, 3) for one in forks)

    def test_waiting_forks_do_not_block_the_queue(self):
        engine = SimulatedEngine(max_rows=64, max_chunk=8)
        engine.add("a", prompt=range(30), n=2)
        engine.add("b")
        assert set(rows(engine.step())) == {"a", "b"}

    def test_a_block_that_is_the_target_of_a_copy_is_not_copied_from(self):
        engine = SimulatedEngine(max_running=1)
        parent, child = engine.add("a", prompt=range(6), max_tokens=4, n=2)
        before = engine.add("b", tenant="bob", prompt=[*range(6), *expected(parent, 2)], max_tokens=1)
        engine.cancel("a")
        engine.cancel("a.1")
        engine.drain()
        assert before.reason is FinishReason.LENGTH
        parent, child = engine.add("c", prompt=range(6), max_tokens=4, n=2)
        engine.step()
        engine.step()
        engine.scheduler.preempt(engine.schedule())
        assert (len(parent.tokens), parent.state) == (8, SequenceState.PREEMPTED)
        engine.scheduler.config = dataclasses.replace(engine.scheduler.config, max_running=2)
        batch = engine.step()
        assert set(rows(batch)) == {"c", "c.1"}
        assert len({source for source, _ in batch.copies} & {target for _, target in batch.copies}) == 0
        engine.drain()
        assert child.outputs == expected(child, 4)

    def test_forks_run_without_their_parent(self):
        engine = SimulatedEngine()
        engine.add("a", prompt=range(30), n=3)
        engine.step()
        engine.cancel("a.1")
        engine.cancel("a")
        engine.drain()
        assert engine.added["a.2"].reason is FinishReason.LENGTH


class TestReceivedBlocks:
    def test_the_sequence_computes_up_to_the_received_blocks_and_continues_after_them(self):
        engine = SimulatedEngine(max_chunk=8)
        one = engine.add("a", prompt=range(30), max_tokens=3)
        assert rows(engine.step()) == {"a": 8}
        assert engine.receive(one, 3) == 3  # of 7 full blocks without the last token, 2 are computed
        assert rows(engine.step()) == {"a": 8}
        assert (one.num_computed_tokens, one.received) == (28, range(0))
        assert rows(engine.step()) == {"a": 2}
        engine.drain()
        assert one.outputs == expected(one, 3)

    def test_they_count_at_once_if_they_are_next(self):
        engine = SimulatedEngine(max_chunk=8)
        one = engine.add("a", prompt=range(16), max_tokens=3)
        one.chunk_limit = 4
        engine.step()
        assert engine.receive(one, 5) == 2
        assert one.num_computed_tokens == 12
        assert engine.blocks.num_cached_blocks == 3
        other = engine.add("b", prompt=range(16), max_tokens=1)
        engine.step()
        assert other.num_cached_tokens == 12
        engine.drain()

    def test_the_last_token_is_always_computed(self):
        engine = SimulatedEngine(max_chunk=1)
        one = engine.add("a", prompt=range(16), max_tokens=3)
        engine.step()
        assert engine.receive(one, 9) == 2
        engine.drain()
        assert one.outputs == expected(one, 3)

    def test_a_preempted_sequence_has_lost_them(self):
        engine = SimulatedEngine(max_chunk=2)
        one = engine.add("a", prompt=range(30), max_tokens=3)
        engine.step()
        engine.receive(one, 2)
        engine.scheduler.preempt(engine.schedule())
        assert one.received == range(0)
        engine.scheduler.check_integrity()
        engine.drain()
        assert one.outputs == expected(one, 3)

    def test_forks_share_them(self):
        engine = SimulatedEngine(max_rows=64, max_chunk=4)
        forks = engine.add("a", prompt=range(14), max_tokens=3, n=3)
        engine.step()
        assert engine.receive(forks[0], 9) == 2
        assert rows(engine.step()) == {"a": 2}
        assert rows(engine.step()) == {"a": 1, "a.1": 1, "a.2": 1}
        engine.drain()
        assert all(one.outputs == expected(one, 3) for one in forks)

    def test_a_sequence_that_is_cancelled_frees_them(self):
        engine = SimulatedEngine()
        one = engine.add("a", prompt=range(30))
        engine.step()
        engine.receive(one, 2)
        engine.cancel("a")
        engine.scheduler.check_integrity()
        assert engine.blocks.num_free_blocks == 64


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(6, 24), st.integers(1, 5), st.integers(1, 6))
@example(6, 6, 5, 2)  # a fork copies a part of a block that its parent gets restored in the same step
def test_under_random_traffic_every_sequence_finishes_once_with_the_right_tokens(seed, num_blocks, block_size, running):
    rng = random.Random(seed)
    loaded = {f"x{number}" for number in range(3)}
    engine = SimulatedEngine(
        num_blocks=num_blocks, block_size=block_size, max_running=running, max_rows=running + rng.randrange(1, 12),
        max_chunk=rng.randrange(1, 9), max_adapters=rng.randrange(1, 4), tenant_running=rng.randrange(1, 5),
        max_wait_s=rng.choice([0, 5, 50]), watermark=rng.choice([0, 0.2]), look=rng.randrange(1, 4),
        resident=lambda adapter: adapter in loaded, host_blocks=rng.choice([0, 1, 4, 40]),
    )  # fmt: skip
    capacity = num_blocks * block_size
    for step in range(60):
        for _ in range(rng.randrange(3)):
            length = rng.randrange(1, max(2, capacity // 2))
            most = rng.randrange(1, max(2, min(capacity - length, 12)) + 1) if capacity - length > 1 else 1
            if length + most > capacity:
                continue
            tenant = rng.choice(["ann", "bob", "cid"])
            engine.add(
                f"{step}-{rng.random()}", tenant=tenant, prompt=[rng.randrange(2) for _ in range(length)], max_tokens=most,
                n=rng.choice([1, 1, 1, 3]), adapter=rng.choice(["", "x0", "x1", "x2"]),
                cache_salt=rng.choice([b"", tenant.encode()]), weight=rng.choice([0.5, 1.0, 4.0]), eos_ids=(rng.randrange(32),),
            )  # fmt: skip
        running_adapters = {one.adapter for one in engine.added.values() if one.state is SequenceState.RUNNING}
        loaded = {f"x{number}" for number in range(3) if rng.random() < 0.7} | running_adapters
        engine.blocks.host.is_worthwhile = rng.random() < 0.9
        if rng.random() < 0.02:
            engine.blocks.reset_cache()
        for one in engine.added.values():
            one.chunk_limit = rng.choice([1, 3, 100])
            if one.state is SequenceState.RUNNING and rng.random() < 0.3:
                engine.receive(one, rng.randrange(1, 4))
        engine.scheduler.check_integrity()
        batch = engine.schedule()
        engine.scheduler.check_integrity()
        tokens = engine.run(batch)
        if rng.random() < 0.3 and engine.added:
            engine.cancel(rng.choice(list(engine.added)))
        if rng.random() < 0.05:
            engine.scheduler.preempt(batch)
            engine.scheduler.check_integrity()
        else:
            engine.finish(batch, tokens)
    loaded = {"x0", "x1", "x2"}
    engine.drain()
    assert set(engine.ended) == set(engine.added)
    assert engine.blocks.num_free_blocks == num_blocks
    assert all(one.state is SequenceState.FINISHED and one.reason is not None for one in engine.added.values())


@pytest.mark.parametrize("queued", [0, 7680])
def test_scheduling_512_sequences_is_little_work_with_any_queue(queued):
    engine = SimulatedEngine(
        num_blocks=40_000, block_size=16, max_running=512, max_rows=2048, max_queued=20_000, tenant_queued=20_000,
        tenant_running=512, max_chunk=512, max_adapters=64,
    )  # fmt: skip
    for number in range(512 + queued):
        engine.add(f"{number}", tenant=f"t{number % 512}", prompt=[number % 32] * 4, max_tokens=500, adapter=f"x{number % 64}")
    scheduler, spent = engine.scheduler, []

    def step(now: float) -> None:
        batch = scheduler.schedule(now)
        scheduler.update(batch, [1] * len(batch.sampled))

    for now in range(20):
        spent.append(lines_run(partial(step, float(now))))
    assert scheduler.num_running == 512
    assert sorted(spent)[10] < 100 * 512
