"""Jobs ordered over the line: trained as Trainer trains, served from memory, one end each."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.reader import read
from symbiosis.app.training_service import NoTrainingService
from symbiosis.errors import CannotTrain
from symbiosis.finetuning import checkpoint
from symbiosis.finetuning.dataset import Dataset
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.model import PackedModel
from tests.app.service_harness import ENDS, IpcPeer, run_service, train_message, write_dataset
from tests.configs import lora
from tests.finetuning.concurrent_runs import assert_close
from tests.finetuning.trainer_reference import STEPS, TASKS, Task, base, reference_run

PROMPT = [5, 9, 13, 17]
WILD = Task("wild", lora(), {"learning_rate": 1e30, "weight_decay": 1e3, "lr_scheduler_type": "constant"})
PLAIN = Task("plain", lora(lora_dropout=0.1), {"max_steps": 12, "gradient_accumulation_steps": 3})


def greedy(folder: str, count: int = 8) -> list[int]:
    """What plain PEFT says with the adapter in a folder."""
    model, ids = PeftModel.from_pretrained(copy.deepcopy(base()), folder).eval(), list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def ends(peer: IpcPeer, id: str) -> list[str]:
    return [kind for event in peer.of(id) for kind in event.get("training", {}) if kind in ENDS]


def test_eight_jobs_of_all_methods_and_a_wild_one_beside_serving(tmp_path):
    with run_service(share=0.6) as here:
        peer = here.peer
        for name, task in TASKS.items():
            peer.send(**train_message(task, tmp_path, name))
        peer.send(**train_message(WILD, tmp_path, "wild", checkpoint_every=1))
        asked = 0
        while not all(ends(peer, name) for name in (*TASKS, "wild")):
            asked += 1
            expected = peer.generate(f"q{asked}", PROMPT, count=16)
            assert expected == peer.tokens("q1")
        (lost,) = peer.events("wild", "failed")
        assert lost["code"] == "diverged"
        assert lost["checkpoint"] is None or read(Path(lost["checkpoint"]), ModelFacts.of(base()))
        facts = ModelFacts.of(base())
        for name, task in TASKS.items():
            assert ends(peer, name) == ["trained"]
            (end,) = peer.events(name, "trained")
            steps = peer.events(name, "step")
            assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
            assert [step["learning_rate"] for step in steps] == reference_run(name).rates
            assert [step["loss"] for step in steps] == pytest.approx(reference_run(name).losses, rel=1e-4)
            assert read(Path(end["folder"]), facts).hash == end["hash"] == here.core.adapters[f"{task.name}:mine"]
            assert peer.generate(f"after {name}", PROMPT, "mine", task.name) == greedy(end["folder"])
            assert [each["step"] for each in peer.events(name, "checkpoint")] == [20, 40]
        assert here.core.figures().reads == 0, "what is served was never read"
        figures = peer.stats()["training"]
        assert figures["jobs"]["trained"] == 8
        assert figures["jobs"]["failed"] == 1
        assert figures["jobs"]["running"] == 0
        assert 0 < figures["passes"]["serving_passes"] <= figures["passes"]["passes"]


@pytest.mark.parametrize(
    "adapter",
    [PLAIN.adapter, lora(use_dora=True, lora_dropout=0.2), *(TASKS[name].adapter for name in ("IA3", "prefix", "prompt"))],
    ids=["LoRA", "DoRA", "IA3", "prefix", "prompt"],
)
def test_a_job_that_was_stopped_goes_on_to_the_very_same_adapter(adapter, tmp_path, monkeypatch):
    task = Task("goes on", adapter, PLAIN.recipe)
    launch, passes, go_on = PackedModel.launch, [], threading.Event()

    def held(self, shares):
        passes.append(shares)
        assert len(passes) <= 4 or go_on.wait(60)  # a step is a pass
        return launch(self, shares)

    with run_service() as here:
        here.peer.send(**train_message(task, tmp_path, "whole", serve_as=None))
        here.peer.wait("whole")
    monkeypatch.setattr(PackedModel, "launch", held)
    done, tries = 0, 0
    resume: dict[str, object] = {}
    while True:
        tries += 1
        with run_service() as here:
            passes.clear()
            go_on.clear()
            here.peer.send(**train_message(task, tmp_path, "cut", serve_as=None, checkpoint_every=5, **resume))
            here.peer.wait_for(lambda: len(here.peer.events("cut", "step")) >= 2 or ends(here.peer, "cut"))
            if tries < 4:
                here.peer.send(op="stop_training", id="cut")
                here.peer.stats()  # the window has heard of it
            go_on.set()
            here.peer.wait("cut")
            if ends(here.peer, "cut") == ["trained"]:
                break
            (stopped,) = here.peer.events("cut", "stopped")
            assert stopped["step"] > done
            done = stopped["step"]
            resume = {"resume": stopped["folder"], "after": done}
    assert tries > 1
    found, expected = (load_file(tmp_path / id / "final" / "adapter_model.safetensors") for id in ("cut", "whole"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("at", [1, 4, 6, 12, 30])
def test_a_job_that_is_stopped_in_mid_step_ends_with_that_step_and_goes_on_to_the_very_same_adapter(at, tmp_path, monkeypatch):
    """Steps of three passes: stopped in the midst of one of them, whatever was asked for behind that step is not computed."""
    task = Task("goes on", PLAIN.adapter, {**PLAIN.recipe, "per_device_train_batch_size": 1})
    message_of = partial(train_message, task, tmp_path, serve_as=None, checkpoint_every=5)
    launch, passes, reached, go_on = PackedModel.launch, [], threading.Event(), threading.Event()

    def held(self, shares):
        passes.append(shares)
        if len(passes) == at:
            reached.set()
            assert go_on.wait(60)
        return launch(self, shares)

    with run_service(pass_rows=16) as here:
        here.peer.send(**message_of(id="whole"))
        here.peer.wait("whole")
        monkeypatch.setattr(PackedModel, "launch", held)
        here.peer.send(**message_of(id="cut"))
        here.peer.wait_for(reached.is_set)
        here.peer.send(op="stop_training", id="cut")
        here.peer.stats()  # the window has heard of it
        go_on.set()
        here.peer.wait("cut")
        (stopped,) = here.peer.events("cut", "stopped")
        assert stopped["step"] == len(here.peer.events("cut", "step")) == math.ceil(at / 3)
        assert len(passes) == 3 * stopped["step"]
        here.peer.send(**message_of(id="rest", resume=stopped["folder"], after=stopped["step"]))
        here.peer.wait("rest")
        assert ends(here.peer, "rest") == ["trained"]
    found, expected = (load_file(tmp_path / id / "final" / "adapter_model.safetensors") for id in ("rest", "whole"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_validation_is_the_loss_of_the_adapter_as_it_is_then(tmp_path):
    held_out = TASKS["rank 8"].data()[:9]
    with run_service() as here:
        file = write_dataset(tmp_path / "held_out.safetensors", held_out)
        here.peer.send(**train_message(PLAIN, tmp_path, "job", validation=str(file), evaluate_every=5, checkpoint_every=5))
        here.peer.wait("job")
        found = here.peer.events("job", "validation")
        (end,) = here.peer.events("job", "trained")
        saved = [each["folder"] for each in here.peer.events("job", "checkpoint")] + [end["folder"]]
    assert [each["step"] for each in found] == [5, 10, 12]
    for each, folder in zip(found, saved, strict=True):
        model = PeftModel.from_pretrained(copy.deepcopy(base()), folder).eval()
        sums = labels = 0.0
        with torch.no_grad():
            for example in held_out:
                ids, wanted = torch.tensor([example.ids]), torch.tensor([example.labels])
                if example.labelled:
                    sums += float(model(input_ids=ids, labels=wanted).loss) * example.labelled
                    labels += example.labelled
        assert each["loss"] == pytest.approx(sums / labels, rel=1e-4)


def test_validation_changes_nothing_of_what_is_trained(tmp_path):
    with run_service() as here:
        for id in ("with", "without"):
            file = str(write_dataset(tmp_path / "held_out.safetensors", TASKS["rank 8"].data())) if id == "with" else None
            here.peer.send(**train_message(PLAIN, tmp_path, id, validation=file, evaluate_every=1 if file else None))
            here.peer.wait(id)
        (one,), (other,) = (here.peer.events(id, "trained") for id in ("with", "without"))
        assert one["hash"] == other["hash"]


def test_checkpoints_are_served_and_running_answers_keep_their_version(tmp_path):
    task = Task("tenant", lora(r=8), {"max_steps": 12, "learning_rate": 0.05, "lr_scheduler_type": "constant"})
    with run_service() as here:
        peer = here.peer
        peer.send(**train_message(task, tmp_path, "job", serve_checkpoints=True, checkpoint_every=4))
        peer.wait_for(lambda: peer.events("job", "checkpoint"))
        peer.submit("long", PROMPT, "mine", "tenant", 300)
        peer.wait_for(lambda: any(event.get("accepted") for event in peer.of("long")))
        version = here.core.adapters["tenant:mine"]
        peer.wait("job", "long")
        saved = peer.events("job", "checkpoint")
        assert [each["serves"] for each in saved] == ["tenant:mine"] * 3
        (end,) = peer.events("job", "trained")
        assert end["hash"] == here.core.adapters["tenant:mine"]
        folders = {each["hash"]: each["folder"] for each in saved}
        assert peer.generate("new", PROMPT, "mine", "tenant", 30) == greedy(end["folder"], 30)
        if version in folders:  # else it was replaced between the two looks
            candidates = [greedy(folder, 30) for folder in folders.values()]
            assert peer.tokens("long")[:30] in candidates


def test_when_the_other_end_is_gone_its_jobs_end_and_their_memory_is_free(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        gone = IpcPeer(here.server.path)
        gone.send(**train_message(endless, tmp_path, "a"))
        gone.send(**train_message(endless, tmp_path, "b"))
        here.peer.send(**train_message(PLAIN, tmp_path, "mine"))
        gone.wait_for(lambda: gone.events("a", "step") and gone.events("b", "step"))
        gone.close()
        here.peer.wait("mine")
        assert ends(here.peer, "mine") == ["trained"]
        here.peer.wait_for(lambda: not here.service.jobs.ids())
        assert not here.trainer._registry.sessions()
        assert not (tmp_path / "a" / "final").exists()


def test_who_comes_back_takes_over_from_its_former_self(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        here.peer.send(**train_message(endless, tmp_path, "job"))
        here.peer.wait_for(lambda: here.peer.events("job", "step"))
        other = IpcPeer(here.server.path)
        other.send(**{**train_message(PLAIN, tmp_path, "job"), "id": "again"})
        other.wait("again")
        here.peer.wait("job")
        assert ends(other, "again") == ["trained"]
        assert here.peer.events("job", "failed")[0]["code"] == "closed"
        other.close()


def test_a_folder_that_is_there_already_is_replaced(tmp_path):
    with run_service() as here:
        for id in ("first", "second"):
            here.peer.send(**{**train_message(PLAIN, tmp_path, "job", checkpoint_every=4), "id": id})
            here.peer.wait(id)
        (one,), (other,) = (here.peer.events(id, "trained") for id in ("first", "second"))
        assert one["hash"] == other["hash"]
        assert other["generation"] > one["generation"]
        left = sorted(path.name for path in (tmp_path / "job" / "checkpoints").iterdir())
        assert left == ["step-12", "step-4", "step-8"]


def test_closing_stops_jobs_where_they_are(tmp_path):
    endless = Task("endless", lora(), {"max_steps": 100000})
    with run_service() as here:
        here.peer.send(**train_message(endless, tmp_path, "job", checkpoint_every=1000))
        here.peer.wait_for(lambda: len(here.peer.events("job", "step")) > 2)
        here.service.close()
        here.peer.wait("job")
        (stopped,) = here.peer.events("job", "stopped")
        assert Path(stopped["folder"]).name == f"step-{stopped['step']}"
        assert read(Path(stopped["folder"]), ModelFacts.of(base()))


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
def test_strange_data_is_refused_before_anything_begins(tensors, tmp_path, there):
    save_file(tensors, tmp_path / "strange.safetensors")
    id = f"strange {tmp_path.name}"
    there.peer.send(**{**train_message(PLAIN, tmp_path, "job", data=str(tmp_path / "strange.safetensors")), "id": id[-60:]})
    there.peer.wait(id[-60:])
    (event,) = there.peer.of(id[-60:])
    assert event["refused"]["code"] in ("bad_data", "out_of_range")
    assert not there.trainer._registry.sessions()


@pytest.fixture(scope="module")
def there():
    with run_service() as here:
        yield here


HOSTILE = [
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


@pytest.mark.parametrize("wrong", HOSTILE, ids=str)
def test_a_hostile_order_is_refused_and_nothing_is_left(wrong, tmp_path, there):
    id = f"hostile-{HOSTILE.index(wrong)}"
    sent = train_message(PLAIN, tmp_path, "job")
    sent = {**sent, **wrong, "id": id}
    if isinstance(wrong.get("recipe"), dict):
        sent["recipe"] = {**PLAIN.settings(), **wrong["recipe"]}
    there.peer.send(**sent)
    there.peer.wait(id)
    (event,) = there.peer.of(id)
    assert event["refused"]["code"] != "error", event
    assert not there.trainer._registry.sessions()
    assert there.server.is_alive()


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


def test_who_asks_while_the_server_ends_is_refused_and_the_window_stays():
    with run_service() as here:
        here.service.close()
        here.peer.send(op="check_adapter", id="late", adapter=LORA)
        here.peer.wait_for(lambda: here.peer.of("late"))
        assert here.peer.of("late")[0]["refused"]["code"] == "closed"
        assert here.server.is_alive()


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
    there.peer.send(op="stop_training", id="nobody")
    there.peer.wait_for(lambda: ends(there.peer, "twice"))
    assert ends(there.peer, "twice") == ["stopped"]


def test_a_job_that_nobody_wants_any_more_ends_without_its_steps_under_way(tmp_path, there):
    there.peer.send(**train_message(Task("endless", lora(), {"max_steps": 100000}), tmp_path, "unwanted"))
    there.peer.wait_for(lambda: there.peer.events("unwanted", "step"))
    there.peer.send(op="stop_training", id="unwanted", at_once=True)
    there.peer.wait_for(lambda: ends(there.peer, "unwanted"))
    assert ends(there.peer, "unwanted") == ["failed"]
    (said,) = there.peer.events("unwanted", "failed")
    assert said["code"] == "closed"


def test_a_job_that_nobody_wants_any_more_has_written_all_it_writes_when_it_ends(tmp_path, there, monkeypatch):
    save, begun = checkpoint.save, threading.Event()

    def slow(*args, **options):
        begun.set()
        time.sleep(0.5)
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", slow)
    there.peer.send(**train_message(Task("endless", lora(), {"max_steps": 100000}), tmp_path, "late"))
    assert begun.wait(60)
    there.peer.send(op="stop_training", id="late", at_once=True)
    there.peer.wait_for(lambda: ends(there.peer, "late"))
    written = sorted(tmp_path.rglob("*"))
    time.sleep(1)
    assert sorted(tmp_path.rglob("*")) == written, "whoever puts it away puts all of it away"


def test_a_checkpoint_of_another_step_is_refused(tmp_path, there):
    there.peer.send(**train_message(PLAIN, tmp_path, "made", checkpoint_every=4))
    there.peer.wait("made")
    folder = there.peer.events("made", "checkpoint")[0]["folder"]
    there.peer.send(**train_message(PLAIN, tmp_path, "wrong", resume=folder, after=5))
    there.peer.wait("wrong")
    assert there.peer.of("wrong")[0]["refused"]["code"] == "bad_adapter"


def test_where_nothing_can_be_trained_the_reason_is_said(tmp_path):
    with run_service() as here:
        here.server._rooms.clear()
        NoTrainingService(here.server, CannotTrain("this model cannot be packed"))
        here.peer.send(**train_message(PLAIN, tmp_path, "job"))
        here.peer.wait("job")
        (event,) = here.peer.of("job")
        assert event["refused"] == {"code": "cannot_train", "message": "this model cannot be packed", "field": ""}


FULL = """
import json, resource, sys
from pathlib import Path
from tests.configs import lora
from tests.finetuning.trainer_reference import TASKS, Task
from tests.app.service_harness import run_service, train_message

root = Path(sys.argv[1])
large = Task("large", lora(r=64, target_modules="all-linear"), {"max_steps": 6})
small = Task("small", lora(r=2), {"max_steps": 40})
with run_service() as here:
    orders = [train_message(large, root, "large", checkpoint_every=3), train_message(small, root, "small")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for each in orders:
        here.peer.send(**each)
    here.peer.wait("large", "small")
    here.peer.generate("q", [1, 2, 3])
    print(json.dumps([here.peer.of("large"), here.peer.of("small")]))
"""


def test_a_full_disk_fails_the_job_that_met_it_and_no_other(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    ran = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    large, small = json.loads(ran.stdout.splitlines()[-1])
    failed = large[-1]["training"]["failed"]
    assert failed["code"] == "not_stored"
    assert "File too large" in failed["message"]
    assert failed["step"] == 3
    assert failed["checkpoint"] is None
    assert "trained" in small[-1]["training"]
    assert not [path for path in (tmp_path / "large").rglob("*") if path.name.startswith(".")], "something was left behind"


def test_while_answers_are_served_passes_are_short_and_chats_go_on(tmp_path):
    """No pass is as short as asked for, so those beside answers have the least there is: one example."""
    long = [Example(tuple(range(1, 65)), tuple(range(1, 65)))] * 64
    task = Task("long", lora(r=8, target_modules="all-linear"), {"max_steps": 100000, "per_device_train_batch_size": 64})
    with run_service(serving_pass_s=0.001, share=0.5) as here:
        peer = here.peer
        peer.send(**train_message(task, tmp_path, "job", data=str(write_dataset(tmp_path / "long.safetensors", long))))
        peer.wait_for(lambda: peer.events("job", "step"))
        before = here.trainer.stats
        assert before.serving_passes == 0
        assert before.rows / before.passes >= 4 * 64
        until, number = time.monotonic() + 60, 0
        while number < 8 or here.trainer.stats.serving_passes < 8:
            assert time.monotonic() < until, "training or a chat got no turn"
            number += 1
            peer.generate(f"q{number}", PROMPT, count=32)
        after = here.trainer.stats
        assert after.serving_rows / after.serving_passes == 64
        here.peer.send(op="stop_training", id="job")
        here.peer.wait("job")


def test_what_was_trained_is_as_trainer_does_it(tmp_path):
    with run_service() as here:
        task = TASKS["rank 2"]
        here.peer.send(**train_message(task, tmp_path, "job"))
        here.peer.wait("job")
        (end,) = here.peer.events("job", "trained")
    stored = load_file(Path(end["folder"]) / "adapter_model.safetensors")
    found = {name.replace(".weight", ".default.weight"): tensor for name, tensor in stored.items()}
    reference = reference_run("rank 2")
    assert_close(found, reference.end, reference.start, 1e-5)


def test_when_the_device_is_lost_no_job_is_at_fault(tmp_path, monkeypatch):
    with run_service() as here:
        jobs = ("one", "two")
        for id in jobs:
            here.peer.send(**train_message(PLAIN, tmp_path, id, recipe={"max_steps": 100_000}, checkpoint_every=1))
        here.peer.wait_for(lambda: all(here.peer.events(id, "checkpoint") for id in jobs))
        assert here.trainer.is_alive()
        monkeypatch.setattr(PackedModel, "is_sound", lambda _: False)
        monkeypatch.setattr(PackedModel, "launch", lambda *_: torch.ones(2) @ torch.ones(3))
        here.peer.wait(*jobs)
        for id in jobs:
            (end,) = here.peer.events(id, "failed")
            assert end["code"] == "closed"
            assert Path(end["checkpoint"]).is_dir()
        assert not here.trainer.is_alive()


def test_a_step_of_the_whole_file_is_made_batch_by_batch(tmp_path, monkeypatch):
    """Else one job with many batches in a step takes the memory of all."""
    alive, most = weakref.WeakSet(), []
    made = Dataset.__getitem__

    class Watched(Example):
        __slots__ = ("__weakref__",)

    def watched(self, at):
        example = made(self, at)
        kept = Watched(example.ids, example.labels)
        alive.add(kept)
        most.append(len(alive))
        return kept

    monkeypatch.setattr(Dataset, "__getitem__", watched)
    rows = [Example((7,) * 20, (7,) * 20)] * 4000
    changes = {"max_steps": 1, "gradient_accumulation_steps": 1024, "per_device_train_batch_size": 4}
    with run_service(max_rows=64, max_waiting=8) as here:
        body = train_message(PLAIN, tmp_path, "big", recipe=changes)
        write_dataset(Path(body["data"]), rows)
        here.peer.send(**body)
        here.peer.wait("big", seconds=120)
        assert ends(here.peer, "big") == ["trained"]
    assert max(most) < 400
