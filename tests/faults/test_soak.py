"""Hundreds of random faults: nothing is lost, nothing hangs, nothing is wrong."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest
import torch
import zmq

import symbiosis
from symbiosis.transport.messages import Kind, Message, encode
from tests.faults.processes import Process, free_address, seeded_model, train
from tests.transport.raw_peers import VALID_FRAMES, mutate_frame

FAULTS = 300


class FaultInjector:
    """An executor, two tenants, and the faults to inject into them."""

    def __init__(self, address: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.address = address
        self.context = zmq.Context()
        self.executor = Process("executor", address, "0").wait_until_ready()
        self.tenants = [Process("tenant", address) for _ in range(2)]

    def kill_executor(self) -> None:
        self.executor.close()
        self.executor = Process("executor", self.address, "0").wait_until_ready()

    def kill_tenant(self) -> None:
        victim = self.rng.randrange(2)
        self.tenants[victim].close()  # perhaps before it has connected
        self.tenants[victim] = Process("tenant", self.address)

    def freeze_executor(self) -> None:
        self.executor.signal(signal.SIGSTOP)
        time.sleep(self.rng.random())
        self.executor.signal(signal.SIGCONT)

    def garbage(self) -> None:
        self._send([[mutate_frame(self.rng, self.rng.choice(VALID_FRAMES))] for _ in range(50)])

    def many_parts(self) -> None:
        self._send([[b"x"] * 1000, [b""] * 3])

    def abandoned_call(self) -> None:
        rows = torch.ones(self.rng.randint(1, 4000), 64)
        hello = encode(Message(Kind.HELLO, 1, body={"name": "gone"}))
        self._send([[hello], [encode(Message(Kind.CALL, 2, (0,), tensors=(rows,)))]])

    def _send(self, messages: list[list[bytes]]) -> None:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, self.rng.choice([0, 50]))
        dealer.setsockopt(zmq.ROUTING_ID, self.rng.randbytes(16))
        dealer.connect(self.address)
        for message in messages:
            dealer.send_multipart(message)
        dealer.close()

    def close(self) -> None:
        for child in (*self.tenants, self.executor):
            child.close()
        self.context.destroy(linger=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tenant_trains_through_hundreds_of_faults_and_ends_in_the_right_adapter():
    injector = FaultInjector(free_address(), seed=1)
    over, result = threading.Event(), {}

    def train_on() -> None:
        try:
            # as many steps as the faults take; the same steps run undisturbed afterwards
            model = symbiosis.connect(injector.address, grace_s=120)
            steps = 0

            def count(step: int) -> None:
                nonlocal steps
                steps = step + 1
                if over.is_set():
                    raise StopIteration

            try:
                train(model, 10**9, between=count, snapshots=result)
            except StopIteration:
                result["steps"] = steps - 1
            model.symbiosis.close()
        except BaseException as error:
            result["error"] = error

    trainer = threading.Thread(target=train_on)
    trainer.start()
    faults = [injector.garbage] * 8 + [injector.kill_tenant] * 5 + [injector.abandoned_call] * 5
    faults += [injector.kill_executor] * 2 + [injector.many_parts] * 2 + [injector.freeze_executor] * 2
    done: dict[str, int] = {}
    try:
        for _ in range(FAULTS):
            fault = injector.rng.choice(faults)
            fault()
            done[fault.__name__] = done.get(fault.__name__, 0) + 1
            time.sleep(0.05 * injector.rng.random())
        over.set()
        trainer.join(180)
        assert not trainer.is_alive(), "hung"
    finally:
        over.set()
        injector.close()
    assert "error" not in result, result["error"]
    assert result["steps"] > 20
    print(f"{result['steps']} steps through {done}")
    expected = train(seeded_model(), result["steps"])
    for name, tensor in expected.items():
        torch.testing.assert_close(result["adapter"][name], tensor, rtol=5e-3, atol=1e-4)
