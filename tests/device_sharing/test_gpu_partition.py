"""A GPU is partitioned: training has a share while the engine serves, and the whole GPU while the engine is idle."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from symbiosis.device_sharing.cpu_time_share import CpuTimeShare, PassBudget
from symbiosis.device_sharing.gpu_partition import GpuPartition, create_device_share
from symbiosis.errors import SymbiosisError
from tests.split.executor.service_bench import Clock


def make_partition(clock: Clock) -> GpuPartition:
    return GpuPartition(torch.device("cpu"), clock=clock)


def begin(partition: GpuPartition) -> PassBudget | None:
    return partition.begin_pass(60.0, lambda: False)


def test_training_has_a_share_while_the_engine_serves_and_short_passes_for_a_minute_after():
    clock = Clock()
    partition = make_partition(clock)
    assert begin(partition) == PassBudget("full")
    partition.end_pass()
    with partition:
        assert begin(partition) == PassBudget("partition 0.5", 60.0, is_serving=True)
        partition.end_pass()
    clock.now += 0.05
    assert begin(partition).is_serving
    partition.end_pass()
    clock.now += 0.2
    assert begin(partition) == PassBudget("recent", 0.1)
    partition.end_pass()
    clock.now += 60.0
    assert begin(partition) == PassBudget("full")
    assert partition.begin_pass(60.0, lambda: True) is None


def test_the_first_step_waits_for_a_pass_on_the_whole_gpu(monkeypatch):
    clock = Clock()
    partition = make_partition(clock)
    notified, waits = [], []
    monkeypatch.setattr(partition._changed, "notify_all", lambda: notified.append(1))

    def wait_for(is_over, timeout):
        waits.append(timeout)
        assert not is_over()
        before = len(notified)
        partition.end_pass()
        assert len(notified) > before
        assert is_over()
        assert begin(partition).is_serving, "a step waits: the next pass has a share"
        assert is_over(), "the step does not wait for that one"
        partition.end_pass()
        return True

    monkeypatch.setattr(partition._changed, "wait_for", wait_for)
    assert not begin(partition).is_serving
    with partition:
        pass
    assert waits == [0.15]


def test_a_step_does_not_wait_for_a_pass_on_a_partition(monkeypatch):
    clock = Clock()
    partition = make_partition(clock)
    with partition:
        assert begin(partition).is_serving
    clock.now += 5.0  # a long pass
    monkeypatch.setattr(partition._changed, "wait_for", None)
    with partition:
        pass


def test_only_the_first_step_waits_for_a_pass_that_exceeds_its_budget(monkeypatch):
    clock = Clock()
    partition = make_partition(clock)
    waits = []
    monkeypatch.setattr(partition._changed, "wait_for", lambda is_over, timeout: waits.append(timeout))
    assert begin(partition) == PassBudget("full")
    for _ in range(3):
        with partition:
            clock.now += 0.01
        clock.now += 0.01
    assert waits == [0.15]
    partition.end_pass()


def test_a_pass_whose_stream_fails_does_not_count_as_running(monkeypatch):
    partition = make_partition(Clock())

    def switch_to(use):
        raise RuntimeError("no such stream")

    with monkeypatch.context() as patch:
        patch.setattr(partition, "_switch_to", switch_to)
        with pytest.raises(RuntimeError, match="no such stream"):
            begin(partition)
    monkeypatch.setattr(partition._changed, "wait_for", None)
    with partition:
        assert not partition._pass_running


class EngineThread(threading.Thread):
    """Runs steps without a gap, `slowdown` times as long while a pass runs. Time is the clock's."""

    def __init__(self, partition: GpuPartition, clock: Clock, slowdown: float, step_s: float = 0.004) -> None:
        super().__init__(daemon=True)
        self.partition, self.clock, self.slowdown, self.step_s = partition, clock, slowdown, step_s
        self.over, self.steps = False, 0

    def run(self) -> None:
        while not self.over:
            with self.partition:
                self.clock.now += self.step_s * (self.slowdown if self.partition._pass_running else 1.0)
            self.steps += 1

    def __enter__(self) -> EngineThread:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.join(30)

    def wait(self, steps: int) -> None:
        end = self.steps + steps
        while self.steps < end:
            assert self.is_alive()
            time.sleep(1e-4)


@pytest.mark.parametrize(("slowdown", "share"), [(1.0, 0.75), (1.4, 0.375), (2.0, 0.25)])
@pytest.mark.parametrize("step_s", [0.004, 0.05])
def test_training_pauses_for_comparisons_and_the_share_is_adapted(slowdown, share, step_s):
    clock = Clock()
    partition = GpuPartition(torch.device("cpu"), slowdown=1.3, clock=clock)
    with EngineThread(partition, clock, slowdown, step_s) as engine:
        for _ in range(300):
            begin(partition)
            engine.wait(3)
            partition.end_pass()
            if partition.share != 0.5:
                break
    assert partition.share == share
    found = partition.stats()
    assert found["colocated_s"] / found["alone_s"] == pytest.approx(slowdown, rel=0.01)


def test_training_does_not_pause_before_enough_steps_are_recorded(monkeypatch):
    """Passes are so short that few steps fall into each."""
    clock = Clock()
    partition = GpuPartition(torch.device("cpu"), clock=clock)
    pauses = []
    monkeypatch.setattr(partition._changed, "wait_for", lambda *named, **more: pauses.append(1))
    for _ in range(100):
        with partition:
            begin(partition)
            clock.now += 0.001
        partition.end_pass()
        if len(partition._step_durations[True]) < 64:
            assert not pauses
    assert pauses


def test_steps_during_prepared_passes_do_not_count_unless_most_passes_are_prepared():
    clock = Clock()
    partition = make_partition(clock)
    for number in range(10):
        with partition:
            clock.now += 0.001
        begin(partition)
        with partition:
            clock.now += 0.003 if number % 2 else 0.001
        partition.end_pass(is_new=number % 2 == 1)
    assert set(map(round_ms, partition._step_durations[True])) == {1}
    for _ in range(20):
        begin(partition)
        with partition:
            clock.now += 0.003
        partition.end_pass(is_new=True)
    assert list(map(round_ms, partition._step_durations[True])).count(3) == 13, "not the first seven, nor the one before them"


def round_ms(seconds: float) -> int:
    return round(1e3 * seconds)


def test_a_fixed_share_stays():
    partition = GpuPartition(torch.device("cpu"), 0.25)
    assert partition.stats() == {"training_share": 0.25}
    assert create_device_share(torch.device("cuda"), 0.25).share == 0.25


def test_invalid_settings_are_rejected():
    with pytest.raises(SymbiosisError, match="one of them"):
        create_device_share(torch.device("cuda"), 0.5, 1.2)
    with pytest.raises(SymbiosisError, match="for a GPU"):
        create_device_share(torch.device("cpu"), None, 1.2)
    with pytest.raises(SymbiosisError, match=r"1\.2 to 10"):
        create_device_share(torch.device("cuda"), None, 1.0)
    for device in ("cuda", "cpu"):
        with pytest.raises(SymbiosisError, match="at most 1"):
            create_device_share(torch.device(device), 1.5)


def test_a_cpu_is_shared_by_time():
    assert type(create_device_share(torch.device("cpu"), 0.3)) is CpuTimeShare
    assert CpuTimeShare().stats() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_matrix_products_on_a_partition_equal_those_on_the_whole_gpu():
    device = torch.device("cuda", 0)
    partition = GpuPartition(device, 0.5)
    x = torch.randn(512, 512, device=device)
    plain = x @ x
    begin(partition)
    whole = x @ x
    partition.end_pass()
    with partition:
        served = x @ x
        begin(partition)
        trained = x @ x
        partition.end_pass()
    torch.cuda.synchronize()
    for found in (whole, served, trained):
        assert torch.allclose(found, plain, rtol=1e-3, atol=1e-3)
    context = partition._select_context("partition")
    assert 0 < context.multiprocessors < torch.cuda.get_device_properties(device).multi_processor_count
    torch.cuda.set_stream(torch.cuda.default_stream(device))
