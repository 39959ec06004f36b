"""Processes that die, freeze, restart or stay away: others proceed, and runs end with the same result."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import symbiosis
from symbiosis.errors import BadAddress, ExecutorLost, ModelChanged, SymbiosisError
from symbiosis.split.executor import loop, service
from tests.conftest import Serve
from tests.faults.processes import free_address, process, seeded_model, train


def shm_address() -> str:
    return f"shm://faults-{os.getpid()}-{os.urandom(4).hex()}"


@pytest.mark.parametrize("new_address", [pytest.param(free_address, marks=pytest.mark.slow), shm_address])
def test_a_training_run_survives_a_killed_executor_and_ends_in_the_same_adapter(new_address):
    undisturbed = train(seeded_model(), steps=8)
    address = new_address()
    with process("executor", address, "0") as first:
        model = symbiosis.connect(address, grace_s=60)
        successors = []

        def kill_in_mid_step(step: int) -> None:
            if step in (2, 5):
                last = successors[-1] if successors else first
                last.kill()
                thread = threading.Thread(target=revive)
                thread.start()

        def revive() -> None:
            context = process("executor", address, "0")
            successors.append(context.__enter__())
            contexts.append(context)

        contexts = []
        try:
            adapter = train(model, steps=8, between=kill_in_mid_step)
        finally:
            model.symbiosis.close()
            for context in contexts:
                context.__exit__(None, None, None)
    assert len(successors) == 2
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_replica_goes_on_in_mid_training_and_the_adapter_is_the_same():
    undisturbed = train(seeded_model(), steps=8)
    addresses = [free_address(), free_address()]
    with process("executor", addresses[0], "0") as first, process("executor", addresses[1], "0") as second:
        model = symbiosis.connect(addresses, grace_s=60)
        killer = threading.Timer(0.02, first.kill)

        def kill_in_mid_step(step: int) -> None:
            if step == 2:
                killer.start()

        adapter = train(model, steps=8, between=kill_in_mid_step)
        assert model.symbiosis.stats()["tokens"] > 0  # of the second
        second.kill()
        model.symbiosis.close()
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("addresses", [[], ["tcp://127.0.0.1:1", "shm://a"], ["nowhere"]])
def test_wrong_replicas_are_rejected(addresses):
    with pytest.raises(BadAddress, match="expected"):
        symbiosis.connect(addresses)


def test_replicas_of_other_models_are_not_used():
    addresses = [free_address(), free_address()]
    with process("executor", addresses[0], "0") as first, process("executor", addresses[1], "1"):
        model = symbiosis.connect(addresses, grace_s=10)
        first.kill()
        with pytest.raises(ModelChanged):
            model(torch.ones(1, 4, dtype=torch.long))
        model.symbiosis.close()


def test_an_executor_restarted_with_another_model_is_not_used():
    address = free_address()
    with process("executor", address, "0") as first:
        model = symbiosis.connect(address, grace_s=60)
        first.kill()
        with process("executor", address, "1"), pytest.raises(ModelChanged, match="connect again"):
            model(torch.ones(1, 3, dtype=torch.int64))
    model.symbiosis.close()


def test_an_absent_executor_is_reported_after_the_grace_period():
    address = free_address()
    with process("executor", address, "0") as executor:
        model = symbiosis.connect(address, grace_s=2)
        executor.kill()
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="grace period"):
                model(torch.ones(1, 3, dtype=torch.int64))
    model.symbiosis.close()


def test_a_link_waits_for_an_executor_that_freezes_for_a_while():
    address = free_address()
    ids = torch.randint(0, 128, (1, 7))
    with process("executor", address, "0") as executor:
        model = symbiosis.connect(address, grace_s=60)
        executor.signal(signal.SIGSTOP)
        threading.Timer(2.0, executor.signal, [signal.SIGCONT]).start()
        logits = model(ids).logits
        torch.testing.assert_close(logits, seeded_model()(ids).logits, rtol=0, atol=1e-5)
        model.symbiosis.close()


def test_a_frozen_executor_is_lost_after_the_grace_period_too():
    address = free_address()
    with process("executor", address, "0") as executor:
        model = symbiosis.connect(address, grace_s=3)
        executor.signal(signal.SIGSTOP)
        with pytest.raises(ExecutorLost):
            model(torch.ones(1, 3, dtype=torch.int64))
        executor.signal(signal.SIGCONT)
        assert model(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()
        model.symbiosis.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_tenants_killed_in_mid_call_do_not_affect_others(serve: Serve, kind: str, tiny, ids, monkeypatch):
    monkeypatch.setattr(loop, "_TIDY_EVERY_S", 0.05)
    monkeypatch.setattr(service, "_LOOK_AFTER_S", 0.1)
    served = serve(kind)
    model, expected = served.connect("ann"), tiny(ids).logits
    with process("tenant", served.address) as one, process("tenant", served.address) as two:
        for victim in (one, two):
            model(ids)
            while not served.executor.stats()["tenants"]["victim"]["calls"]:
                pass
            victim.kill()
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
    while served.executor.stats()["sessions"] > 1:
        model(ids)  # the executor finds dead peers after a while of silence
    figures = served.executor.stats()["tenants"]
    assert figures["victim"]["sessions"] == 0
    assert figures["ann"]["errors"] == 0


def test_a_new_thread_waits_as_long_as_any_other_for_an_absent_executor():
    address = free_address()
    with process("executor", address, "0") as first:
        model = symbiosis.connect(address, grace_s=60)
        first.kill()
        results: list[object] = []

        def call() -> None:
            try:
                results.append(model(torch.ones(1, 3, dtype=torch.int64)).logits)
            except SymbiosisError as error:
                results.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        with process("executor", address, "0"):
            for thread in threads:
                thread.join(60)
        assert [type(result) for result in results] == [torch.Tensor] * 3
    model.symbiosis.close()
