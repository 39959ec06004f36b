"""Jobs over IPC train as Trainer does, are served from memory, and end once."""

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
from safetensors.torch import load_file

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.reader import read_adapter
from symbiosis.finetuning.dataset import Dataset
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.model import PackedModel
from tests.app.service_harness import PLAIN, run_service, train_message, write_dataset
from tests.finetuning.concurrent_runs import assert_close
from tests.finetuning.trainer_reference import STEPS, TASKS, Task, base, reference_run
from tests.lora import lora

PROMPT = [5, 9, 13, 17]


DIVERGING = Task("diverging", lora(), {"learning_rate": 1e30, "weight_decay": 1e3, "lr_scheduler_type": "constant"})


def greedy(folder: str, count: int = 8) -> list[int]:
    """Greedy tokens of plain PEFT with the adapter in a folder."""
    model, ids = PeftModel.from_pretrained(copy.deepcopy(base()), folder).eval(), list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_eight_jobs_of_all_methods_and_a_diverging_one_during_serving(tmp_path):
    with run_service(share=0.6) as here:
        peer = here.peer
        for name, task in TASKS.items():
            peer.send(**train_message(task, tmp_path, name))
        peer.send(**train_message(DIVERGING, tmp_path, "diverging", checkpoint_every=1))
        requests = 0
        while not all(peer.ends(name) for name in (*TASKS, "diverging")):
            requests += 1
            expected = peer.generate(f"q{requests}", PROMPT, count=16)
            assert expected == peer.tokens("q1")
        (failed,) = peer.events("diverging", "failed")
        assert failed["code"] == "diverged"
        assert failed["checkpoint"] is None or read_adapter(Path(failed["checkpoint"]), ModelFacts.from_model(base()))
        facts = ModelFacts.from_model(base())
        for name, task in TASKS.items():
            assert peer.ends(name) == ["trained"]
            (end,) = peer.events(name, "trained")
            steps = peer.events(name, "step")
            assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
            assert [step["learning_rate"] for step in steps] == reference_run(name).rates
            assert [step["loss"] for step in steps] == pytest.approx(reference_run(name).losses, rel=1e-4)
            assert read_adapter(Path(end["folder"]), facts).hash == end["hash"] == here.core.adapters[f"{task.name}:mine"]
            assert peer.generate(f"after {name}", PROMPT, "mine", task.name) == greedy(end["folder"])
            assert [each["step"] for each in peer.events(name, "checkpoint")] == [20, 40]
        assert here.core.adapter_stats().reads == 0, "served from memory"
        figures = here.service.stats()
        assert figures["jobs"]["trained"] == 8
        assert figures["jobs"]["failed"] == 1
        assert figures["jobs"]["running"] == 0
        assert 0 < figures["passes"]["serving_passes"] <= figures["passes"]["passes"]


@pytest.mark.parametrize(
    "adapter",
    [PLAIN.adapter, lora(use_dora=True, lora_dropout=0.2), *(TASKS[name].adapter for name in ("IA3", "prefix", "prompt"))],
    ids=["LoRA", "DoRA", "IA3", "prefix", "prompt"],
)
def test_a_stopped_job_resumes_to_the_identical_adapter(adapter, tmp_path, monkeypatch):
    task = Task("resumed", adapter, PLAIN.recipe)
    launch, passes, resume_passes = PackedModel.launch, [], threading.Event()

    def held(self, slices):
        passes.append(slices)
        assert len(passes) <= 4 or resume_passes.wait(60)  # a step is a pass
        return launch(self, slices)

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
            resume_passes.clear()
            here.peer.send(**train_message(task, tmp_path, "cut", serve_as=None, checkpoint_every=5, **resume))
            here.peer.wait_for(lambda: len(here.peer.events("cut", "step")) >= 2 or here.peer.ends("cut"))
            if tries < 4:
                here.peer.send(op="stop_training", id="cut")
                here.peer.stats()  # the server has processed it
            resume_passes.set()
            here.peer.wait("cut")
            if here.peer.ends("cut") == ["trained"]:
                break
            (stopped,) = here.peer.events("cut", "stopped")
            assert stopped["step"] > done
            done = stopped["step"]
            resume = {"resume": stopped["folder"], "after": done}
    assert tries > 1
    found, expected = (load_file(tmp_path / id / "final" / "adapter_model.safetensors") for id in ("cut", "whole"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("at", [1, 4, 6, 12, 30])
def test_a_job_stopped_in_mid_step_ends_with_that_step_and_resumes_to_the_identical_adapter(at, tmp_path, monkeypatch):
    """Steps of three passes: calls behind the step that was stopped in the middle are not computed."""
    task = Task("resumed", PLAIN.adapter, {**PLAIN.recipe, "per_device_train_batch_size": 1})
    message_of = partial(train_message, task, tmp_path, serve_as=None, checkpoint_every=5)
    launch, passes, reached, resume_passes = PackedModel.launch, [], threading.Event(), threading.Event()

    def held(self, slices):
        passes.append(slices)
        if len(passes) == at:
            reached.set()
            assert resume_passes.wait(60)
        return launch(self, slices)

    with run_service(pass_rows=16) as here:
        here.peer.send(**message_of(id="whole"))
        here.peer.wait("whole")
        monkeypatch.setattr(PackedModel, "launch", held)
        here.peer.send(**message_of(id="cut"))
        here.peer.wait_for(reached.is_set)
        here.peer.send(op="stop_training", id="cut")
        here.peer.stats()  # the server has processed it
        resume_passes.set()
        here.peer.wait("cut")
        (stopped,) = here.peer.events("cut", "stopped")
        assert stopped["step"] == len(here.peer.events("cut", "step")) == math.ceil(at / 3)
        assert len(passes) == 3 * stopped["step"]
        here.peer.send(**message_of(id="rest", resume=stopped["folder"], after=stopped["step"]))
        here.peer.wait("rest")
        assert here.peer.ends("rest") == ["trained"]
    found, expected = (load_file(tmp_path / id / "final" / "adapter_model.safetensors") for id in ("rest", "whole"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_validation_is_the_loss_of_the_current_adapter(tmp_path):
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


def test_validation_does_not_change_training(tmp_path):
    with run_service() as here:
        for id in ("with", "without"):
            file = str(write_dataset(tmp_path / "held_out.safetensors", TASKS["rank 8"].data())) if id == "with" else None
            here.peer.send(**train_message(PLAIN, tmp_path, id, validation=file, evaluate_every=1 if file else None))
            here.peer.wait(id)
        (one,), (other,) = (here.peer.events(id, "trained") for id in ("with", "without"))
        assert one["hash"] == other["hash"]


def test_checkpoints_are_served_and_running_requests_keep_their_version(tmp_path):
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
        if version in folders:  # else it was replaced in between
            candidates = [greedy(folder, 30) for folder in folders.values()]
            assert peer.tokens("long")[:30] in candidates


def test_an_existing_folder_is_replaced(tmp_path):
    with run_service() as here:
        for id in ("first", "second"):
            here.peer.send(**{**train_message(PLAIN, tmp_path, "job", checkpoint_every=4), "id": id})
            here.peer.wait(id)
        (one,), (other,) = (here.peer.events(id, "trained") for id in ("first", "second"))
        assert one["hash"] == other["hash"]
        assert other["generation"] > one["generation"]
        left = sorted(path.name for path in (tmp_path / "job" / "checkpoints").iterdir())
        assert left == ["step-12", "step-4", "step-8"]


FULL = """
import json, resource, sys
from pathlib import Path
from tests.lora import lora
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


def test_a_full_disk_fails_only_the_job_that_writes(tmp_path):
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
    assert not [path for path in (tmp_path / "large").rglob("*") if path.name.startswith(".")], "temporary files were left"


def test_passes_are_small_while_the_engine_serves(tmp_path):
    """No pass is within the time budget, so each pass during serving has the minimum: one example."""
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
            assert time.monotonic() < until, "training or serving starved"
            number += 1
            peer.generate(f"q{number}", PROMPT, count=32)
        after = here.trainer.stats
        assert after.serving_rows / after.serving_passes == 64
        here.peer.send(op="stop_training", id="job")
        here.peer.wait("job")


def test_a_job_trains_the_adapter_that_trainer_trains(tmp_path):
    with run_service() as here:
        task = TASKS["rank 2"]
        here.peer.send(**train_message(task, tmp_path, "job"))
        here.peer.wait("job")
        (end,) = here.peer.events("job", "trained")
    stored = load_file(Path(end["folder"]) / "adapter_model.safetensors")
    found = {name.replace(".weight", ".default.weight"): tensor for name, tensor in stored.items()}
    reference = reference_run("rank 2")
    assert_close(found, reference.end, reference.start, 1e-5)


def test_a_lost_device_closes_all_jobs(tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_a_step_of_the_whole_file_is_loaded_batch_by_batch(tmp_path, monkeypatch):
    """A job with many batches in a step must not hold them all in memory."""
    alive, most = weakref.WeakSet(), []
    get_item = Dataset.__getitem__

    class Watched(Example):
        __slots__ = ("__weakref__",)

    def watched(self, at):
        example = get_item(self, at)
        watched_example = Watched(example.ids, example.labels)
        alive.add(watched_example)
        most.append(len(alive))
        return watched_example

    monkeypatch.setattr(Dataset, "__getitem__", watched)
    rows = [Example((7,) * 20, (7,) * 20)] * 4000
    changes = {"max_steps": 1, "gradient_accumulation_steps": 1024, "per_device_train_batch_size": 4}
    with run_service(max_rows=64, max_waiting=8) as here:
        body = train_message(PLAIN, tmp_path, "big", recipe=changes)
        write_dataset(Path(body["data"]), rows)
        here.peer.send(**body)
        here.peer.wait("big", seconds=120)
        assert here.peer.ends("big") == ["trained"]
    assert max(most) < 400
