"""Host blocks: what leaves the device is found again, and comes back in the right order."""

from __future__ import annotations

from symbiosis.serving.scheduling.host_blocks import HostBlocks
from symbiosis.serving.scheduling.sequence import SequenceState
from tests.serving.scheduling.simulated_engine import SimulatedEngine, expected, rows


def test_a_stored_block_is_restored_and_stays():
    host = HostBlocks(2)
    host.store(b"a", 7)
    assert host.take_transfers().stores == [(7, 0)]
    host.pin([b"a"])
    host.restore(b"a", 3)
    assert host.is_restoring(3)
    assert host.take_transfers().restores == [(0, 3)]
    assert host.has(b"a")
    assert (host.num_used, host.num_stored, host.num_restored) == (1, 1, 1)
    host.store(b"a", 3)
    assert host.take_transfers().stores == [], "its content is in host memory"


def test_the_least_recently_used_block_is_evicted_and_pinned_ones_are_not():
    host = HostBlocks(2)
    for number, hash in enumerate((b"a", b"b")):
        host.store(hash, number)
    host.take_transfers()
    host.store(b"a", 0)  # used again
    host.store(b"c", 2)
    assert not host.has(b"b")
    host.pin([b"a", b"c"])
    host.store(b"d", 3)
    assert not host.has(b"d"), "both places are read by pending transfers"
    host.check_integrity()
    host.take_transfers()
    host.store(b"d", 3)
    assert host.has(b"d")
    host.clear()
    host.check_integrity()
    assert host.num_used == 0


def test_nothing_moves_where_computing_is_cheaper():
    host = HostBlocks(2)
    host.store(b"a", 0)
    host.is_worthwhile = False
    host.store(b"b", 1)
    assert not host.has(b"a")
    assert host.num_used == 1


def preempting(host_blocks):
    engine = SimulatedEngine(num_blocks=8, block_size=4, watermark=0, host_blocks=host_blocks)
    old, young = engine.add("old", prompt=range(8), max_tokens=16), engine.add("young", prompt=range(10, 22), max_tokens=12)
    computed = {"old": 0, "young": 0}
    while "young" not in engine.ended or "old" not in engine.ended:
        for id, count in rows(engine.step()).items():
            computed[id] += count
    assert engine.preemptions > 0
    assert young.outputs == expected(young, 12)
    assert old.outputs == expected(old, 16)
    return engine, computed


def test_a_preempted_sequence_resumes_without_recomputing_its_full_blocks():
    _, computed = preempting(0)
    engine, restored = preempting(16)
    assert engine.blocks.host.num_restored > 0
    assert restored["young"] < computed["young"]
    assert restored["young"] <= 12 + 12 - 1 + engine.preemptions * 4, "at most the last block of each preemption"


def test_a_prompt_whose_blocks_were_evicted_is_found_in_host_memory():
    engine = SimulatedEngine(num_blocks=6, block_size=4, host_blocks=16)
    prompt = [*range(16)]
    engine.add("a", prompt=prompt, max_tokens=2)
    engine.drain()
    engine.add("b", prompt=range(20, 32), max_tokens=8)  # needs all blocks but one
    engine.drain()
    again = engine.add("c", prompt=prompt, max_tokens=2)
    engine.drain()
    assert again.num_cached_tokens == 12
    assert again.outputs == expected(again, 2)


def test_two_sequences_of_one_step_share_a_restored_block():
    engine = SimulatedEngine(num_blocks=10, block_size=4, max_rows=64, max_chunk=32, host_blocks=16)
    prompt = [*range(8)]
    engine.add("a", prompt=prompt, max_tokens=1)
    engine.drain()
    engine.add("b", prompt=[*range(31, -1, -1)], max_tokens=8)
    engine.drain()
    same = [engine.add(f"c{number}", prompt=prompt, max_tokens=3) for number in range(3)]
    batch = engine.step()
    assert {one.state for one in same} == {SequenceState.RUNNING}
    assert len(batch.chunks) == 3
    engine.drain()
    assert all(one.outputs == expected(one, 3) for one in same)


def test_after_a_reset_nothing_is_found_and_running_sequences_go_on():
    engine = SimulatedEngine(num_blocks=12, block_size=4, host_blocks=16)
    engine.add("a", prompt=range(16), max_tokens=6)
    engine.step()
    engine.step()
    engine.blocks.reset_cache()
    engine.scheduler.check_integrity()
    engine.drain()
    assert engine.blocks.host.num_used == 0
