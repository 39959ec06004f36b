"""The messages of the training service: what is rejected, checked, stopped and aborted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.reader import read_adapter
from symbiosis.app.training_service import NoTrainingService
from symbiosis.errors import CannotTrain
from symbiosis.finetuning import checkpoint
from tests.app.service_harness import PLAIN, IpcPeer, run_service, train_message
from tests.finetuning.trainer_reference import Task, base
from tests.lora import lora


def test_jobs_of_a_disconnected_peer_are_aborted_and_released(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        gone = IpcPeer(here.engine.address.messages)
        gone.send(**train_message(endless, tmp_path, "a"))
        gone.send(**train_message(endless, tmp_path, "b"))
        here.peer.send(**train_message(PLAIN, tmp_path, "mine"))
        gone.wait_for(lambda: gone.events("a", "step") and gone.events("b", "step"))
        gone.close()
        here.peer.wait("mine")
        assert here.peer.ends("mine") == ["trained"]
        here.peer.wait_for(lambda: not here.service.jobs.ids())
        assert not here.trainer._registry.sessions()
        assert not (tmp_path / "a" / "final").exists()


def test_a_job_with_the_same_folder_replaces_the_older_one(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        here.peer.send(**train_message(endless, tmp_path, "job"))
        here.peer.wait_for(lambda: here.peer.events("job", "step"))
        other = IpcPeer(here.engine.address.messages)
        other.send(**{**train_message(PLAIN, tmp_path, "job"), "id": "again"})
        other.wait("again")
        here.peer.wait("job")
        assert other.ends("again") == ["trained"]
        assert here.peer.events("job", "failed")[0]["code"] == "closed"
        other.close()


def test_closing_the_service_stops_jobs_with_a_checkpoint(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        here.peer.send(**train_message(endless, tmp_path, "job", checkpoint_every=1000))
        here.peer.wait_for(lambda: len(here.peer.events("job", "step")) > 2)
        here.service.close()
        here.peer.wait("job")
        (stopped,) = here.peer.events("job", "stopped")
        assert Path(stopped["folder"]).name == f"step-{stopped['step']}"
        assert read_adapter(Path(stopped["folder"]), ModelFacts.from_model(base()))


def data_of(**tensors) -> dict[str, torch.Tensor]:
    sound = {"ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, 3, 4]), "ends": torch.tensor([2, 4])}
    return {name: tensor for name, tensor in {**sound, **tensors}.items() if tensor is not None}


@pytest.mark.parametrize(
    "tensors",
    [
        data_of(ids=torch.tensor([1, 2, 3])),
        data_of(ends=torch.tensor([2, 2, 4])),
        data_of(ends=torch.tensor([3, 2, 4])),
        data_of(ends=torch.tensor([-1, 4])),
        data_of(ends=torch.tensor([2, 5])),
        data_of(ends=torch.tensor([2])),
        data_of(ends=torch.zeros(0, dtype=torch.int64)),
        data_of(ids=torch.tensor([[1, 2], [3, 4]])),
        data_of(ids=torch.tensor([1.0, 2, 3, 4])),
        data_of(labels=None),
        data_of(more=torch.tensor([1])),
        data_of(ids=torch.tensor([1, 2, 3, 128])),
        data_of(ids=torch.tensor([1, -2, 3, 4])),
        data_of(labels=torch.tensor([1, 2, 3, -99])),
        data_of(labels=torch.tensor([1, 2, 3, 1 << 40])),
        data_of(ids=torch.ones(5000).long(), labels=torch.ones(5000).long(), ends=torch.tensor([5000])),
    ],
    ids=str,
)
def test_invalid_data_is_rejected_before_the_job_begins(tensors, tmp_path, there):
    save_file(tensors, tmp_path / "invalid.safetensors")
    id = f"invalid {tmp_path.name}"
    there.peer.send(**{**train_message(PLAIN, tmp_path, "job", data=str(tmp_path / "invalid.safetensors")), "id": id[-60:]})
    there.peer.wait(id[-60:])
    (event,) = there.peer.of(id[-60:])
    assert event["refused"]["code"] in ("bad_data", "out_of_range")
    assert not there.trainer._registry.sessions()


@pytest.fixture(scope="module")
def there():
    with run_service() as here:
        yield here


INVALID_MESSAGES = [
    {"adapter": "lora"},
    {"adapter": {"peft_type": "LORA", "target_modules": ["nothing"]}},
    {"adapter": {"peft_type": "EVIL"}},
    {"adapter": {}},
    {"recipe": {"learning_rate": "much"}},
    {"recipe": {"output_dir": "/"}},
    {"recipe": []},
    {"seed": -1},
    {"seed": True},
    {"weight": "1"},
    {"weight": 0},
    {"tenant": ""},
    {"tenant": 5},
    {"data": "relative"},
    {"data": "/nowhere/at/all"},
    {"data": "/dev/zero"},
    {"data": None},
    {"final": "/tmp/../etc"},
    {"checkpoint_every": 0},
    {"checkpoint_every": 1.5},
    {"evaluate_every": 0},
    {"validation": 3},
    {"validation": "/nowhere"},
    {"resume": "/nowhere", "after": 3},
    {"resume": None, "after": 3},
    {"resume": "/nowhere", "after": 0},
    {"after": -1},
    {"serve_as": ""},
    {"serve_checkpoints": 1},
    {"surplus": 1},
]


@pytest.mark.parametrize("wrong", INVALID_MESSAGES, ids=str)
def test_an_invalid_message_is_rejected_and_leaves_nothing(wrong, tmp_path, there):
    id = f"invalid-{INVALID_MESSAGES.index(wrong)}"
    sent = train_message(PLAIN, tmp_path, "job")
    sent = {**sent, **wrong, "id": id}
    if isinstance(wrong.get("recipe"), dict):
        sent["recipe"] = {**PLAIN.settings(), **wrong["recipe"]}
    there.peer.send(**sent)
    there.peer.wait(id)
    (event,) = there.peer.of(id)
    assert event["refused"]["code"] != "error", event
    assert not there.trainer._registry.sessions()
    assert there.engine.is_alive()


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


CHECKED = {
    "fine": (LORA, None),
    "nothing": ({**LORA, "target_modules": ["nothing"]}, "unsupported_adapter"),
    "large": ({**LORA, "r": 1 << 20}, "bad_adapter"),
    "text": ("lora", "bad_message"),
}


@pytest.mark.parametrize("kind", CHECKED)
def test_an_adapter_is_checked_without_a_job(kind, there):
    adapter, refused = CHECKED[kind]
    there.peer.send(op="check_adapter", id=f"check-{kind}", adapter=adapter)
    there.peer.wait_for(lambda: there.peer.of(f"check-{kind}"))
    (event,) = there.peer.of(f"check-{kind}")
    assert event.get("refused", {}).get("code") == refused
    assert ("settled" in event) == (refused is None)
    assert not there.trainer._registry.sessions()


def test_a_request_after_close_is_rejected_and_the_server_survives():
    with run_service() as here:
        here.service.close()
        here.peer.send(op="check_adapter", id="late", adapter=LORA)
        here.peer.wait_for(lambda: here.peer.of("late"))
        assert here.peer.of("late")[0]["refused"]["code"] == "closed"
        assert here.engine.is_alive()


def test_a_missing_field_and_a_second_job_of_the_same_id(tmp_path, there):
    sent = train_message(Task("endless", lora(), {"max_steps": 100000}), tmp_path, "twice")
    there.peer.send(**{key: value for key, value in sent.items() if key != "final"})
    there.peer.wait("twice")
    there.peer.received.clear()
    there.peer.send(**sent)
    there.peer.wait_for(lambda: there.peer.events("twice", "step"))
    there.peer.send(**sent)
    there.peer.wait_for(lambda: any("refused" in event for event in there.peer.of("twice")))
    there.peer.send(op="stop_training", id="twice")
    there.peer.send(op="stop_training", id="unknown")
    there.peer.wait_for(lambda: there.peer.ends("twice"))
    assert there.peer.ends("twice") == ["stopped"]


def test_an_aborted_job_ends_without_its_pending_steps(tmp_path, there):
    there.peer.send(**train_message(Task("endless", lora(), {"max_steps": 100000}), tmp_path, "aborted"))
    there.peer.wait_for(lambda: there.peer.events("aborted", "step"))
    there.peer.send(op="stop_training", id="aborted", at_once=True)
    there.peer.wait_for(lambda: there.peer.ends("aborted"))
    assert there.peer.ends("aborted") == ["failed"]
    (failed,) = there.peer.events("aborted", "failed")
    assert failed["code"] == "closed"


def test_an_aborted_job_writes_nothing_after_its_end(tmp_path, there, monkeypatch):
    save, begun = checkpoint.save, threading.Event()

    def slow(*args, **options):
        begun.set()
        time.sleep(0.5)
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", slow)
    there.peer.send(**train_message(Task("endless", lora(), {"max_steps": 100000}), tmp_path, "late"))
    assert begun.wait(60)
    there.peer.send(op="stop_training", id="late", at_once=True)
    there.peer.wait_for(lambda: there.peer.ends("late"))
    written = sorted(tmp_path.rglob("*"))
    time.sleep(1)
    assert sorted(tmp_path.rglob("*")) == written, "a file was written after the end"


def test_a_checkpoint_of_another_step_is_rejected(tmp_path, there):
    there.peer.send(**train_message(PLAIN, tmp_path, "made", checkpoint_every=4))
    there.peer.wait("made")
    folder = there.peer.events("made", "checkpoint")[0]["folder"]
    there.peer.send(**train_message(PLAIN, tmp_path, "wrong", resume=folder, after=5))
    there.peer.wait("wrong")
    assert there.peer.of("wrong")[0]["refused"]["code"] == "bad_adapter"


def test_a_model_that_cannot_be_trained_rejects_jobs_with_the_reason(tmp_path):
    with run_service() as here:
        here.engine.rpc._handlers[1:] = []
        NoTrainingService(here.engine.rpc, CannotTrain("this model cannot be packed"))
        here.peer.send(**train_message(PLAIN, tmp_path, "job"))
        here.peer.wait("job")
        (event,) = here.peer.of("job")
        assert event["refused"] == {"code": "cannot_train", "message": "this model cannot be packed", "field": ""}
