"""Tenants in their own processes on the executor's GPU: direct mode, the channel, and killed processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.errors import DirectRefused, ExecutorLost
from tests.conftest import tiny_config
from tests.lora import with_random_lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

IDS = torch.arange(24).view(2, 12) % 128


def plain(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).to("cuda", dtype)


def serve(pipe: Any, options: dict[str, Any]) -> None:
    with symbiosis.Executor(plain(), device="cuda", **options) as executor:
        pipe.send(executor.listen("shm://"))
        while (command := pipe.recv()) != "stop":
            pipe.send(executor.stats() if command == "stats" else None)


class Server:
    def __init__(self, **options: Any) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, options))
        self.process.start()
        self.address = self.pipe.recv()

    def stats(self) -> dict[str, Any]:
        self.pipe.send("stats")
        return self.pipe.recv()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send("stop")
        self.process.join(30)


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(**options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def adapted(model: Any) -> Any:
    return with_random_lora(model, ("q_proj", "v_proj", "o_proj")).to("cuda")


def repeat_call(call: Callable[[], Any]) -> None:
    """A later call raises the error of a call on the GPU."""
    for _ in range(100):
        call()
        torch.cuda.synchronize()


def one_step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(input_ids=IDS.cuda(), labels=IDS.cuda())
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["direct", "executor", "auto"])
def test_the_results_are_those_of_the_plain_model(server, mode):
    logits, grads = one_step(adapted(plain()))
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode=mode)
    found = adapted(model)
    for _ in range(2):
        ours, our_grads = one_step(found)
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)
        for name, grad in grads.items():
            torch.testing.assert_close(our_grads[name], grad, atol=1e-4, rtol=1e-3)
        found.zero_grad()
    assert (served.stats()["calls"] > 0) == (mode == "executor")
    model.symbiosis.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tenant_on_another_gpu_gets_the_plain_models_results(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda:1")
    expected = plain()(IDS.cuda()).logits
    for _ in range(6):
        torch.testing.assert_close(model(IDS.to("cuda:1")).logits.to("cuda:0"), expected, atol=1e-4, rtol=1e-4)
    assert served.stats()["calls"] > 0
    model.symbiosis.close()


@pytest.mark.parametrize("mode", ["direct", "executor"])
def test_greedy_text_is_that_of_the_plain_model(server, mode):
    model = symbiosis.connect(server().address, device="cuda", mode=mode)
    expected = plain().generate(IDS[:, :4].cuda(), max_new_tokens=64, do_sample=False)
    assert torch.equal(model.generate(IDS[:, :4].cuda(), max_new_tokens=64, do_sample=False), expected)
    model.symbiosis.close()


def test_decoding_is_captured_as_graphs_for_each_new_tenant(server):
    served = server()
    expected = plain().generate(IDS[:, :4].cuda(), max_new_tokens=24, do_sample=False)
    graphs = [0]
    for _ in range(3):
        model = symbiosis.connect(served.address, device="cuda", mode="executor")
        assert torch.equal(model.generate(IDS[:, :4].cuda(), max_new_tokens=24, do_sample=False), expected)
        model.symbiosis.close()
        graphs.append(served.stats()["graphs"])
        assert graphs[-1] > graphs[-2], graphs


def test_bigger_calls_grow_the_channel(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    reference = plain()
    with torch.no_grad():
        for rows in (1, 3000, 20000, 5):
            ids = torch.arange(rows, device="cuda")[None, :].remainder(128)[:, :2000].repeat(max(1, rows // 2000), 1)
            torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    model.symbiosis.close()


def test_forward_and_backward_share_a_channel(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    before = served.stats()["sessions"]
    one_step(adapted(model))
    assert served.stats()["sessions"] == before + 1
    model.symbiosis.close()


def test_half_a_layer_is_one_call_in_each_direction_and_can_be_hooked(server):
    _, expected = one_step(adapted(plain()))
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    found, seen, layers = adapted(model), list[float](), model.config.num_hidden_layers

    def read_result(_: Any, __: Any, result: Any) -> None:
        seen.append(result[0].norm().item())

    for expects in (None, 4, 6):  # calls per layer
        if expects == 6:
            for layer in model.model.layers:
                layer.self_attn.register_forward_hook(read_result)
        before = served.stats()["calls"]
        _, grads = one_step(found)
        calls = served.stats()["calls"] - before
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, atol=1e-4, rtol=1e-3)
        found.zero_grad()
        # q, k and v, and the rest; before the first q, k and v nothing is trained
        assert expects is None or calls == expects * layers - 1
    assert len(seen) == layers
    model.symbiosis.close()


def test_threads_share_the_channel_of_their_stream(server):
    served = server()
    model, reference = symbiosis.connect(served.address, device="cuda", mode="executor"), plain()
    before = served.stats()["sessions"]
    inputs = [(torch.arange(8 * (number + 1), device="cuda")[None, :] + number) % 128 for number in range(6)]
    torch.cuda.synchronize()

    def run_model(number: int) -> list[torch.Tensor]:
        # two threads to each of three streams
        stream = torch.cuda.default_stream() if number < 2 else streams[number % 2]
        with torch.no_grad(), torch.cuda.stream(stream):
            found = [model(inputs[number]).logits for _ in range(20)]
        stream.synchronize()
        return found

    streams = [torch.cuda.Stream() for _ in range(2)]
    with ThreadPoolExecutor(len(inputs)) as threads:
        results = list(threads.map(run_model, range(len(inputs))))
    for ids, found in zip(inputs, results, strict=True):
        expected = reference(ids).logits
        for each in found:
            torch.testing.assert_close(each, expected, atol=1e-4, rtol=1e-4)
    assert served.stats()["sessions"] == before + 3
    model.symbiosis.close()


def test_the_client_part_is_mapped_and_copied_when_trained(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    other = symbiosis.connect(served.address, device="cuda", mode="direct")
    head, before = model.lm_head.weight, other.lm_head.weight.clone()
    assert head.is_mapped
    assert not head.requires_grad
    head.requires_grad = True
    assert not head.is_mapped
    with torch.no_grad():
        head.add_(1.0)
    assert torch.equal(other.lm_head.weight, before)
    weight = other.model.layers[0].mlp.up_proj.weight
    assert torch.equal(torch.as_tensor(weight + 0), plain().model.layers[0].mlp.up_proj.weight)
    model.symbiosis.close()
    other.symbiosis.close()


def test_direct_mode_can_be_disabled_by_the_provider(server):
    served = server(direct=False)
    with pytest.raises(DirectRefused):
        symbiosis.connect(served.address, device="cuda", mode="direct")
    model = symbiosis.connect(served.address, device="cuda")
    assert not hasattr(model.lm_head.weight, "is_mapped") or not model.lm_head.weight.is_mapped
    torch.testing.assert_close(model(IDS.cuda()).logits, plain()(IDS.cuda()).logits, atol=1e-4, rtol=1e-4)
    assert served.stats()["calls"] > 0
    model.symbiosis.close()


def test_a_dead_executor_is_an_error_and_no_hang(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    with torch.no_grad():
        model(IDS.cuda())
        torch.cuda.synchronize()
        os.kill(served.process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises((ExecutorLost, RuntimeError)):
            repeat_call(lambda: model(IDS.cuda()))
    assert time.monotonic() - started < 20


def call_for_ever(address: str) -> None:
    model = symbiosis.connect(address, device="cuda", mode="executor")
    with torch.no_grad():
        while True:
            model(IDS.cuda())


def test_a_tenant_killed_in_mid_call_does_not_affect_others(server):
    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    expected = model(IDS.cuda()).logits.detach()
    for _ in range(3):
        victim = mp.get_context("spawn").Process(target=call_for_ever, args=(served.address,))
        victim.start()
        calls = served.stats()["calls"]
        while served.stats()["calls"] < calls + 50:
            time.sleep(0.1)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        for _ in range(20):
            torch.testing.assert_close(model(IDS.cuda()).logits.detach(), expected, atol=1e-4, rtol=1e-4)
    model.symbiosis.close()


def test_an_invalid_call_is_rejected_and_the_channel_still_works(server):
    from symbiosis.errors import SymbiosisError
    from symbiosis.types import Direction

    served = server()
    model = symbiosis.connect(served.address, device="cuda", mode="executor")
    session = model.symbiosis
    layer = session.manifest.layers[0]
    rows = torch.randn(3, layer.in_width, device="cuda")
    good = session.call((layer,), Direction.FORWARD, (rows,), training=False)[0]
    narrow = rows[:, :-1].contiguous()
    with pytest.raises(SymbiosisError, match="width"):
        repeat_call(lambda: session.call((layer,), Direction.FORWARD, (narrow,), training=False))
    assert torch.equal(session.call((layer,), Direction.FORWARD, (rows,), training=False)[0], good)
    model.symbiosis.close()
