"""A tenant on another host: the same results over a slow, narrow and lossy network, and with replicas that die."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.faults.processes import seeded_model, train
from tests.lora import with_random_lora
from tests.network.conftest import Remote
from tests.network.emulated_link import Conditions

PROMPT = torch.arange(10)[None, :]
CONDITIONS = {
    "near": Conditions(round_trip_ms=0.2),
    "narrow": Conditions(round_trip_ms=2, gbit_per_s=0.1),
    "lossy": Conditions(round_trip_ms=2, gbit_per_s=1, loss=0.02),
}


def generate(model) -> torch.Tensor:
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, min_new_tokens=8, do_sample=False)


def assert_same_adapter(found: dict, expected: dict) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
def test_training_and_generation_are_those_of_a_local_model(remote: Remote, split_calls, conditions: Conditions):
    split_calls()
    remote.network.set(conditions)
    model = remote.connect(remote.serve())
    assert torch.equal(generate(model), generate(seeded_model()))
    assert_same_adapter(train(model, steps=3), train(seeded_model(), steps=3))
    traffic = model.symbiosis.traffic()
    assert traffic["messages"] > 2 * traffic["round_trips"]  # several calls were in flight at once
    if conditions.loss:
        assert remote.network.counts().lost > 0


def test_bf16_on_the_wire_trains_to_nearly_the_same_adapter_with_half_the_bytes(remote: Remote):
    address = remote.serve()
    exact, rounded = (remote.connect(address, wire=wire) for wire in ("exact", "bf16"))
    adapters, sizes = [], []
    for model in (exact, rounded):
        before = model.symbiosis.traffic()
        adapters.append(train(model, steps=3))
        after = model.symbiosis.traffic()
        sizes.append(sum(after[name] - before[name] for name in ("sent_bytes", "received_bytes")))
    assert sizes[1] < 0.7 * sizes[0]  # headers are not rounded
    for name, tensor in adapters[0].items():
        assert adapters[1][name].dtype is tensor.dtype
        assert (adapters[1][name] - tensor).norm() < 0.2 * tensor.norm()


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_killed_executor_changes_nothing_where_a_replica_goes_on(remote: Remote, split_calls, in_parts: bool):
    if in_parts:
        split_calls()
    undisturbed = train(seeded_model(), steps=6)
    remote.network.set(Conditions(round_trip_ms=4))
    model = remote.connect([remote.serve(), remote.serve()], grace_s=60)
    killer = threading.Timer(0.05, remote.executors[0].kill)

    def kill_in_mid_step(step: int) -> None:
        if step == 2:
            killer.start()

    assert_same_adapter(train(model, steps=6, between=kill_in_mid_step), undisturbed)
    killer.join()
    assert model.symbiosis.stats()["tokens"] > 0  # of the second: the first is dead


def test_a_network_that_is_cut_for_a_while_changes_nothing(remote: Remote):
    undisturbed = train(seeded_model(), steps=4)
    model = remote.connect(remote.serve(), grace_s=60)

    def restore() -> None:
        remote.network.set(Conditions(round_trip_ms=2))

    restorer = threading.Timer(1.0, restore)

    def cut_off(step: int) -> None:
        if step == 1:
            remote.network.set(Conditions(round_trip_ms=2, loss=1.0))
            restorer.start()

    assert_same_adapter(train(model, steps=4, between=cut_off), undisturbed)
    restorer.join()


def test_adapters_of_remote_tenants_apply_in_generation(remote: Remote):
    model, plain = (with_random_lora(each, seed=3) for each in (remote.connect(remote.serve()), seeded_model()))
    assert torch.equal(generate(model), generate(plain))
