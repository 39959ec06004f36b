"""Scheduling with adapters: limited slots, adapters that are not loaded, draining. See simulated_engine.py."""

from __future__ import annotations

from tests.serving.scheduling.simulated_engine import SimulatedEngine, rows


class TestAdapters:
    def test_a_missing_adapter_blocks_no_other_and_is_reported(self):
        there = {"x"}
        engine = SimulatedEngine(resident=there.__contains__)
        engine.add("a", adapter="y")
        engine.add("b", adapter="x")
        engine.add("c")
        batch = engine.step()
        assert set(rows(batch)) == {"b", "c"}
        assert batch.missing_adapters == ("y",)
        there.add("y")
        batch = engine.step()
        assert "a" in rows(batch)
        assert batch.missing_adapters == ()
        engine.drain()

    def test_each_adapter_is_looked_up_once_a_step(self):
        asked = []
        engine = SimulatedEngine(resident=lambda adapter: not asked.append(adapter), max_rows=200)
        for number in range(8):
            engine.add(f"a{number}", adapter="x")
        engine.step()
        assert asked == ["x"]

    def test_no_more_adapters_run_than_there_are_slots(self):
        engine = SimulatedEngine(max_adapters=2, max_rows=100)
        for number in range(4):
            engine.add(f"a{number}", adapter=f"x{number}")
        engine.add("base")
        for _ in range(8):
            batch = engine.step()
            assert len({chunk.sequence.adapter for chunk in batch.chunks} - {""}) <= 2
        engine.drain()
        assert len(engine.ended) == 5

    def test_a_busy_adapter_drains_for_one_that_waited_too_long(self):
        engine = SimulatedEngine(max_adapters=1, max_running=4, max_wait_s=10)
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

    def test_a_busy_adapter_drains_within_one_tenant(self):
        engine = SimulatedEngine(max_adapters=1, max_running=4, max_wait_s=10)
        for number in range(60):
            engine.add(f"h{number}", adapter="hot", prompt=[number % 32, 1, 2])
            if number == 5:
                engine.add("late", adapter="cold")
            engine.step()
        assert "late" in engine.ended

    def test_a_slot_stays_reserved_while_the_adapter_that_waited_too_long_loads(self):
        there = {"a", "b"}
        engine = SimulatedEngine(max_adapters=1, max_running=4, max_wait_s=3, resident=there.__contains__)
        engine.add("late", tenant="bob", adapter="cold")
        asked = 0
        for number in range(40):
            engine.add(f"n{number}", adapter="ab"[number % 2], prompt=[number % 32, 1, 2], max_tokens=2)
            asked = asked + 1 if "cold" in engine.step().missing_adapters else 0
            if asked == 3:  # it loads within three steps if it is reported in each
                there.add("cold")
        assert "late" in engine.ended

    def test_missing_adapters_are_reported_fairly_over_tenants(self):
        engine = SimulatedEngine(resident=lambda adapter: False, max_rows=100)
        for number in range(6):
            engine.add(f"a{number}", tenant="ann", adapter=f"ann{number}")
        for number in range(2):
            engine.add(f"b{number}", tenant="bob", adapter=f"bob{number}")
        assert engine.step().missing_adapters == ("ann0", "bob0", "ann1", "bob1", "ann2", "ann3", "ann4", "ann5")

    def test_adapters_needed_next_are_reported_while_nothing_is_admitted(self):
        engine = SimulatedEngine(max_running=1, resident=lambda adapter: not adapter)
        engine.add("runs", max_tokens=20)
        engine.step()
        engine.add("next", tenant="bob", adapter="cold")
        assert engine.step().missing_adapters == ("cold",)

    def test_a_draining_adapter_admits_no_sequence_and_continues_those_it_has(self):
        engine = SimulatedEngine()
        engine.add("runs", adapter="x", max_tokens=20)
        engine.step()
        engine.scheduler.draining = {"x": "y"}
        engine.add("new", adapter="x")
        assert set(rows(engine.step())) == {"runs"}
        engine.scheduler.draining = {}
        assert set(rows(engine.step())) == {"runs", "new"}
        engine.drain()
