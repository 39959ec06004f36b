"""Split tenants and HTTP requests share one copy of the weights at the same time."""

from __future__ import annotations

import threading

import pytest
import torch

import symbiosis
from tests.server.conftest import CHAT
from tests.tiny_chat import tiny_tokenizer


@pytest.mark.parametrize("mode", ["executor", "direct"])
def test_a_split_tenant_is_exact_while_adapters_are_served(server, world, mode):
    ids = torch.tensor([tiny_tokenizer()("hello")["input_ids"]])
    stop = threading.Event()
    expected = world.answers("pirate", CHAT, 16)
    wrong: list[str] = []

    def ask() -> None:
        client = server.client()
        while not stop.is_set():
            made = client.chat.completions.create(model="pirate", messages=CHAT, max_tokens=16, temperature=0)
            if made.choices[0].message.content != expected:
                wrong.append(made.choices[0].message.content)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        model = symbiosis.connect(server.executor, mode=mode)
        with torch.no_grad():
            plain = world.models[None](input_ids=ids).logits
            for _ in range(30):
                assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-4)
        model.symbiosis.close()
    finally:
        stop.set()
        asking.join()
    assert not wrong


def test_the_engine_uses_the_tensors_of_the_executor(server):
    engine = server.hosting._engine.service.engine_loop._core._runner.model
    held = {weight.data_ptr() for layer in server.executor.split.layers for weight in layer.weights.values()}
    held |= {tensor.data_ptr() for tensor in server.executor.split.client_tensors.values()}
    assert {parameter.data_ptr() for parameter in engine.parameters()} <= held
