"""A whole server: what is trained behind it is served over HTTP at once."""

from __future__ import annotations

import httpx2
import pytest

import symbiosis
from symbiosis.app.engine_host import _make_trainer
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.errors import CannotTrain
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.trainer import Trainer
from tests.app.service_harness import IpcPeer, train_message
from tests.finetuning.packed.test_model import BY_NAME, REFUSED
from tests.finetuning.trainer_reference import Task
from tests.lora import lora
from tests.tiny_chat import make_tiny_chat, tiny_tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with symbiosis.Executor(make_tiny_chat(tmp_path_factory.mktemp("tiny")), hosting=True) as executor:
        with executor.host("127.0.0.1:0", training=TrainerConfig(max_rows=256)) as hosting:
            yield executor, hosting


def test_a_trained_adapter_is_served_over_http_at_once(server, tmp_path):
    _, hosting = server
    task = Task("ann", lora(r=8), {"max_steps": 8, "learning_rate": 0.05})
    peer = IpcPeer(hosting._engine.service.address.messages)
    peer.send(**train_message(task, tmp_path, "job", serve_as="mine"))
    peer.wait("job")
    assert peer.events("job", "trained")
    body = {"model": "mine", "prompt": "hello", "max_tokens": 12, "temperature": 0}
    response = httpx2.post(f"{hosting.url}/v1/completions", json=body, timeout=60, verify=False).json()
    prompt = tiny_tokenizer()("hello")["input_ids"]
    found = peer.generate("q", prompt, "mine", count=12)
    assert tiny_tokenizer().decode(found, skip_special_tokens=True).startswith(response["choices"][0]["text"])
    peer.close()


def test_the_trainer_shares_the_executors_weights(server):
    executor, hosting = server
    own = {p.untyped_storage().data_ptr() for p in executor._model.parameters()}
    packed = hosting._engine._trainer._passes._packed._model
    assert {p.untyped_storage().data_ptr() for p in packed.parameters()} == own


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_rejected_with_a_reason(name):
    found = _make_trainer(BY_NAME[name].model(), TrainerConfig(), CpuTimeShare())
    assert isinstance(found, CannotTrain)
    assert not isinstance(found, Trainer)
