"""A supervisor with an engine whose every word is the test's: what it says, when, and where either of them is killed."""

from __future__ import annotations

import asyncio
import errno
import inspect
import sqlite3
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from symbiosis.errors import TooManyRequests, UnknownAdapter
from symbiosis.jobs import admission, data_preparation, tokenized_dataset
from symbiosis.jobs import supervisor as module
from symbiosis.jobs.admission import Admission, JobRequest
from symbiosis.jobs.data_preparation import DataPreparer
from symbiosis.jobs.database import Database
from symbiosis.jobs.errors import BadTrainingFile, KeyReused, NameReserved, StorageFull, WrongState
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.plan import Hyperparameters, length, make
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from symbiosis.jobs.supervisor import Supervisor
from tests.tiny_chat import tiny_tokenizer

LIMITS = JobLimits(running=2, tenant_running=1)
WISHES = Hyperparameters(n_steps=10, checkpoint_every=2)
DATA = {"allowed": length(WISHES, 256), "examples": 8, "tokens": 9, "validates": False}
PLAN = make(WISHES, **DATA, seed=3, max_steps=100).to_json()
ASKED = {"training_file": "f", "validation_file": None, "suffix": None, "metadata": None, "seed": 3, "wishes": {}}


@dataclass
class Engine:
    """Remembers what it was told; says what the test says."""

    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    inbox: asyncio.Queue[Any] | None = None

    async def open(self, body, inbox=None):
        id = str(len(self.told))
        self.told[id], self.inbox = body, inbox
        return id, inbox

    def forget(self, id: str) -> None:
        pass

    async def stop_training(self, id: str, *, at_once: bool = False) -> None:
        self.stopped.append(id)
        if at_once:
            self.dropped.append(id)

    async def ask(self, op: str, **body: Any) -> dict[str, Any]:
        self.asked.append((op, body))
        if op == "unload":
            raise UnknownAdapter("none")
        return {"hash": "h"}

    def say(self, id: str, kind: str, **body: Any) -> None:
        self.inbox.put_nowait({"id": id, "training": {kind: body}})

    def step(self, id: str, step: int) -> None:
        figures = {"loss": 1.0 / step, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens": 7, "tokens_per_s": 70.0}
        self.say(id, "step", step=step, total=10, **figures)

    def checkpoint(self, id: str, step: int) -> None:
        folder = Path(self.told[id]["checkpoints"]) / f"step-{step}"
        folder.mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors", "training_state.safetensors"):
            (folder / file).write_text("x")
        self.say(id, "checkpoint", step=step, folder=str(folder), hash=f"h{step}", serves=None)

    def finish(self, id: str) -> None:
        folder = Path(self.told[id]["final"])
        folder.mkdir()
        self.say(id, "trained", step=10, loss=0.1, folder=str(folder), hash="h10", generation=1)

    def running(self, job: str) -> str:
        """The id of its last start."""
        return max((id for id, body in self.told.items() if job in body["data"]), key=int)


@dataclass
class Shelf:
    root: Path
    kept: dict[tuple[str | None, str], Path] = field(default_factory=dict)

    def place(self, tag: str) -> Path:
        return self.root / f"upload-{tag}"

    def keep(self, owner, name, folder) -> None:
        assert folder.is_dir()
        self.kept[owner, name] = folder

    def has(self, owner, name) -> bool:
        return (owner, name) in self.kept

    def remove(self, owner, name) -> bool:
        return self.kept.pop((owner, name), None) is not None

    def check_bytes(self, owner) -> None:
        pass


class World:
    """One folder, and as many processes over it as the test likes."""

    def __init__(self, root: Path, limits: JobLimits = LIMITS) -> None:
        (root / "shelf").mkdir()
        self.limits, self.shelf = limits, Shelf(root / "shelf")
        self.folder = JobsLayout(root / "jobs")
        self.records = Database(self.folder.database)
        self.counted: list[tuple[str, int, int]] = []

    async def start(self) -> tuple[Supervisor, Engine]:
        self.engine = Engine()
        preparer = DataPreparer(tiny_tokenizer(), 256, self.folder, self.limits)
        self.supervisor = Supervisor(
            self.records,
            self.folder,
            self.engine,
            self.shelf,
            preparer,
            self.limits,
            count=lambda *counted: self.counted.append(counted),
        )
        await self.supervisor.start()
        return self.supervisor, self.engine

    async def kill(self) -> None:
        """As SIGKILL does: nothing is said, nothing is put away."""
        self.supervisor._task.cancel()
        await asyncio.gather(self.supervisor._task, return_exceptions=True)

    def add(self, id: str, tenant: str = "ann", state: JobState = JobState.QUEUED) -> str:
        id = f"ftjob-{id}"
        self.folder.work(id).mkdir()
        self.records.add_job(id, tenant, tenant, f"ft-{id}", state, ASKED, PLAN)
        return id

    def state(self, id: str) -> JobState:
        return self.records.job(id).state


async def until(true, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.002)


def full_for_a_while(records: Database) -> list[Any]:
    """Three times the disk takes no event; what it did not take."""
    add, failures = records.add_event, []

    def full(*args: Any, **options: Any) -> None:
        if len(failures) < 3:
            failures.append(args)
            raise StorageFull("full")
        add(*args, **options)

    records.add_event = full
    return failures


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.records.close()


def played(play):
    """A test that is a coroutine."""

    if "monkeypatch" in inspect.signature(play).parameters:

        def test(world, monkeypatch):
            asyncio.run(play(world, monkeypatch))

    else:

        def test(world):
            asyncio.run(play(world))

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@played
async def test_a_job_from_queue_to_shelf(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    body = engine.told["0"]
    assert (body["op"], body["tenant"], body["after"], body["resume"]) == ("train", "ann", 0, None)
    assert body["serve_as"] == "ann:ft-ftjob-one"
    engine.say("0", "begun", steps=10)
    for step in range(1, 11):
        engine.step("0", step)
        if step % 2 == 0:
            engine.checkpoint("0", step)
    await until(lambda: world.records.job(job).step == 10)
    await until(lambda: [path.name for path in Path(body["checkpoints"]).iterdir()] == ["step-10"])  # older ones are gone
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    found = world.records.job(job)
    assert (found.hash, found.tokens, found.steps) == ("h10", 70, 10)
    assert world.shelf.kept["ann", "ft-ftjob-one"] == Path(body["final"])
    assert sum(steps for _, steps, _ in world.counted) == 10
    await until(lambda: not world.folder.work(job).exists())


@played
async def test_jobs_start_by_limits_and_fairness_and_the_next_when_one_ends(world):
    for id in ("a1", "a2"):
        world.add(id)
    world.add("b1", "bob")
    world.add("c1", "cat")
    supervisor, engine = await world.start()
    await until(lambda: len(engine.told) == 2)
    assert [body["tenant"] for body in engine.told.values()] == ["ann", "bob"]
    assert supervisor.positions() == {"ftjob-c1": 1, "ftjob-a2": 2}
    engine.finish("0")
    await until(lambda: len(engine.told) == 3)
    assert engine.told["2"]["tenant"] == "cat"
    engine.say("1", "failed", code="diverged", message="no number", field=None, step=3, checkpoint=None)
    await until(lambda: len(engine.told) == 4)
    assert "a2" in engine.told["3"]["data"]
    assert world.records.job("ftjob-b1").error == {"code": "diverged", "message": "no number", "param": None}


@played
async def test_after_a_kill_a_job_goes_on_from_its_last_recorded_checkpoint(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    for step in (1, 2, 3, 4, 5):
        engine.step("0", step)
        if step % 2 == 0:
            engine.checkpoint("0", step)
    await until(lambda: world.records.job(job).step == 5)
    first = engine.told["0"]
    await world.kill()
    assert world.state(job) is JobState.RUNNING  # as it was left
    _, engine = await world.start()
    await until(lambda: engine.told)
    body = engine.told["0"]
    assert (body["after"], Path(body["resume"]).name) == (4, "step-4")
    assert body["checkpoints"] != first["checkpoints"]  # two starts never write to the same place
    assert body["final"] != first["final"]
    found = world.records.job(job)
    assert (found.step, found.tokens, found.epoch) == (4, 28, 2)
    for step in range(5, 11):
        engine.step("0", step)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.records.events(found, after=None, limit=99)
    assert sorted(event.step for event in events if event.kind == "metrics") == list(range(1, 11))
    assert world.records.job(job).tokens == 70


@played
async def test_killed_at_every_point_no_job_is_lost_doubled_or_left_running(world):
    """Each life says one thing more than the one before; the last comes to the end."""
    job = world.add("one")
    for words in range(14):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.told)
        begin = engine.told["0"]["after"]
        for step in range(begin + 1, min(begin + 1 + words, 11)):
            engine.step("0", step)
            if step % 2 == 0 and step > begin:
                engine.checkpoint("0", step)
        if begin + words >= 11:
            engine.finish("0")
            break
        await asyncio.sleep(0.002 * (words % 3))  # in the midst of recording
        await world.kill()
        assert len(world.records.jobs(None, after=None, limit=9)) == 1
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.records.events(world.records.job(job), after=None, limit=999)
    assert sorted(event.step for event in events if event.kind == "metrics") == list(range(1, 11))
    assert list(world.shelf.kept) == [("ann", "ft-ftjob-one")]


@played
async def test_stopping_the_server_lets_jobs_save_and_queues_them_again(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    engine.step("0", 1)
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: set(engine.stopped) == {"0"})
    folder = Path(engine.told["0"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.say("0", "stopped", step=1, folder=str(folder))
    await stopping
    assert world.state(job) is JobState.QUEUED
    _, engine = await world.start()
    await until(lambda: engine.told)
    assert (engine.told["0"]["after"], engine.told["0"]["resume"]) == (1, str(folder))


@played
async def test_pause_and_resume_before_the_engine_has_stopped(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    engine.step("0", 1)
    assert (await supervisor.pause(job)).state is JobState.PAUSED
    assert engine.stopped == ["0"]
    assert (await supervisor.resume(job)).state is JobState.QUEUED
    await asyncio.sleep(0.05)
    assert len(engine.told) == 1  # not twice at once
    folder = Path(engine.told["0"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.say("0", "stopped", step=1, folder=str(folder))
    await until(lambda: len(engine.told) == 2)
    assert engine.told["1"]["after"] == 1
    engine.finish("1")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)


@played
async def test_a_job_that_ends_while_it_is_paused_has_ended(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.pause(job)
    assert not engine.dropped
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    with pytest.raises(WrongState):
        await supervisor.resume(job)


@played
async def test_what_ends_after_it_was_cancelled_is_put_away(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.cancel(job)
    assert engine.dropped == ["0"], "nobody wants what it would still do"
    engine.finish("0")
    await until(lambda: engine.asked)
    assert engine.asked == [("unload", {"name": "ann:ft-ftjob-one"})]
    await until(lambda: not Path(engine.told["0"]["final"]).exists() and not world.folder.work(job).exists())
    assert world.state(job) is JobState.CANCELLED
    assert not world.shelf.kept


@played
async def test_what_a_paused_job_served_is_put_away_when_it_is_cancelled(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.pause(job)
    engine.say("0", "stopped", step=0, folder=None)
    await until(lambda: not supervisor.busy())
    assert not engine.asked, "it may be resumed"
    reserved, ask = [], engine.ask

    async def slowly(op, **body):
        await asyncio.sleep(0.01)
        with pytest.raises(NameReserved):
            supervisor.check_name("ann", "ft-ftjob-one")
        reserved.append(op)
        return await ask(op, **body)

    engine.ask = slowly
    await supervisor.cancel(job)
    assert engine.asked == [("unload", {"name": "ann:ft-ftjob-one"})]
    assert reserved == ["unload"], "or it would be put away with what the job served"
    assert not world.folder.work(job).exists()
    supervisor.check_name("ann", "ft-ftjob-one")


@played
async def test_a_job_that_is_cancelled_while_its_pause_is_recorded_is_put_away(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.pause(job)
    loop, take = asyncio.get_running_loop(), supervisor._notes.take

    def cancelled(*args):
        found = take(*args)
        asyncio.run_coroutine_threadsafe(supervisor.cancel(job), loop).result(10)
        return found

    supervisor._notes.take = cancelled
    engine.say("0", "stopped", step=0, folder=None)
    await until(lambda: engine.asked and not world.folder.work(job).exists())
    assert world.state(job) is JobState.CANCELLED


@played
async def test_after_a_restart_no_checkpoint_names_what_the_engine_before_served(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    folder = Path(engine.told["0"]["checkpoints"]) / "step-2"
    folder.mkdir()
    engine.say("0", "checkpoint", step=2, folder=str(folder), hash="h", serves="ann:ft-ftjob-one")
    listed = lambda: [c.serves for c in world.records.checkpoints(world.records.job(job), after=None, limit=9)]  # noqa: E731
    await until(lambda: listed() == ["ft-ftjob-one"])
    await world.kill()
    await world.start()
    assert listed() == [None]


@played
async def test_the_last_good_checkpoint_of_a_job_that_diverged_is_kept_and_served(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    engine.step("0", 1)
    engine.step("0", 2)
    engine.checkpoint("0", 2)
    folder = Path(engine.told["0"]["checkpoints"]) / "step-2"
    engine.say("0", "failed", code="diverged", message="NaN", field=None, step=3, checkpoint=str(folder))
    await until(lambda: ("ann", "ft-ftjob-one-step-2") in world.shelf.kept)
    kept = world.shelf.kept["ann", "ft-ftjob-one-step-2"]
    assert sorted(file.name for file in kept.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert engine.asked[0] == ("load", {"name": "ann:ft-ftjob-one-step-2", "folder": str(kept), "replace": True})
    await until(lambda: world.records.checkpoints(world.records.job(job), after=None, limit=1)[0].serves)
    assert world.state(job) is JobState.FAILED


@played
async def test_a_job_the_engine_has_no_room_for_tries_again(world):
    module._REST_S = 0.01
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    engine.inbox.put_nowait({"id": "0", "refused": {"code": "too_many_requests", "message": "later", "field": ""}})
    await until(lambda: len(engine.told) == 2)
    engine.inbox.put_nowait({"id": "1", "refused": {"code": "bad_adapter", "message": "never", "field": "r"}})
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.records.job(job).error == {"code": "bad_adapter", "message": "never", "param": "r"}


@played
async def test_a_full_disk_makes_what_is_said_wait_and_nothing_is_lost(world):
    module._RETRY_S = 0.01
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    failures = full_for_a_while(world.records)
    engine.step("0", 1)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.records.events(world.records.job(job), after=None, limit=9)
    assert len([event for event in events if event.kind == "metrics"]) == 1
    assert len(failures) == 3


@played
async def test_what_cannot_be_understood_fails_its_job_and_no_other(world):
    job, other = world.add("one"), world.add("two", "bob")
    _, engine = await world.start()
    await until(lambda: len(engine.told) == 2)
    engine.say("0", "step", nonsense=1)
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.records.job(job).error["code"] == "internal_error"
    engine.finish("1")
    await until(lambda: world.state(other) is JobState.SUCCEEDED)


@played
async def test_large_files_are_read_while_the_job_is_validating(world):
    good, bad = (world.add(id, state=JobState.VALIDATING) for id in ("good", "bad"))
    (world.folder.work(good) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 20)
    (world.folder.work(bad) / "training_file.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    _, engine = await world.start()  # also what an earlier process had begun
    await until(lambda: world.state(bad) is JobState.FAILED and engine.told)
    assert "line 2" in world.records.job(bad).error["message"]
    assert world.records.job(good).plan["recipe"]["per_device_train_batch_size"] == 1
    assert Path(engine.told["0"]["data"]).is_file()
    await until(lambda: not world.folder.work(bad).exists())


@played
async def test_a_file_that_takes_too_long_to_read_is_refused(world, monkeypatch):
    monkeypatch.setattr(data_preparation, "_LARGE_S", 0.0)
    job = world.add("slow", state=JobState.VALIDATING)
    (world.folder.work(job) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 20)
    await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.records.job(job).error["message"].startswith("reading it takes longer than 0 minutes: split it")


@played
async def test_nobody_waits_for_the_data_of_a_job_that_was_cancelled(world, monkeypatch):
    cancelled, waits, other = (world.add(id, state=JobState.VALIDATING) for id in ("cancelled", "waits", "other"))
    for job, text in ((cancelled, "long"), (waits, "long"), (other, "x y z")):
        (world.folder.work(job) / "training_file.jsonl").write_text(f'{{"text": "{text}"}}\n' * 20)
    reads, going_on, read, encoded = threading.Event(), threading.Event(), list[str](), tokenized_dataset._encoded

    def slowly(sample, *args):
        read.append(sample.text)
        reads.set()
        going_on.wait(10)
        return encoded(sample, *args)

    monkeypatch.setattr(tokenized_dataset, "_encoded", slowly)
    supervisor, engine = await world.start()
    await asyncio.to_thread(reads.wait, 10)
    for job in (cancelled, waits):
        await supervisor.cancel(job)
    going_on.set()
    await until(lambda: engine.told)
    assert read == ["long"] + ["x y z"] * 20
    await until(lambda: not any(world.folder.work(job).exists() for job in (cancelled, waits)))
    assert {world.state(cancelled), world.state(waits)} == {JobState.CANCELLED}


@played
async def test_what_is_left_over_is_removed_at_the_start(world):
    kept = world.add("kept")
    (world.folder.files / "file-nobodys").write_text("x")
    world.records.add_file("file-half-deleted", "ann", "data.jsonl", 1)
    world.folder.work("ftjob-nobodys").mkdir()
    world.folder.work("ftjob-nobodys").joinpath("x").write_text("x")
    await world.start()
    assert not list(world.folder.files.iterdir())
    assert not world.records.file_ids()
    assert [path.name for path in world.folder.work("").iterdir()] == [kept]


@played
async def test_a_job_that_cannot_be_started_is_not_left_running_and_others_go_on(world):
    module._RETRY_S = 0.01
    job = world.add("one")
    world.folder.work(job).rmdir()
    world.folder.work(job).write_text("in the way")  # the disk gives no folder for its checkpoints
    other = world.add("two", "bob")
    _, engine = await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    await until(lambda: engine.told)
    engine.finish(engine.running(other))
    await until(lambda: world.state(other) is JobState.SUCCEEDED)


@played
async def test_a_full_disk_at_the_start_of_a_job_is_waited_for(world, monkeypatch):
    module._RETRY_S = 0.01
    job, full = world.add("one"), []
    to_disk = module.to_disk

    def refuse(path: Path) -> None:
        if len(full) < 3:
            full.append(world.state(job))
            raise OSError(errno.ENOSPC, "full")
        to_disk(path)

    monkeypatch.setattr(module, "to_disk", refuse)
    _, engine = await world.start()
    await until(lambda: engine.told)
    assert len(full) == 3
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)


@played
async def test_whatever_fails_jobs_are_started_again_later(world):
    module._RETRY_S = 0.01
    world.add("one")
    waiting, failures = world.records.waiting, []

    def fails():
        if len(failures) < 3:
            failures.append(1)
            raise sqlite3.OperationalError("strange")
        return waiting()

    world.records.waiting = fails
    _, engine = await world.start()
    await until(lambda: engine.told)


@played
async def test_a_job_that_was_paused_and_resumed_but_had_its_last_step_behind_it_has_succeeded(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.pause(job)
    await supervisor.resume(job)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    assert ("ann", "ft-ftjob-one") in world.shelf.kept


@played
async def test_a_job_that_was_paused_and_resumed_is_not_failed_by_a_full_engine(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    await supervisor.pause(job)
    await supervisor.resume(job)
    engine.say("0", "failed", code="closed", message="no room", field=None, step=0, checkpoint=None)
    await until(lambda: len(engine.told) == 2)
    assert world.state(job) is JobState.RUNNING


@played
async def test_a_full_disk_does_not_leave_a_job_validating(world):
    module._RETRY_S = 0.01
    job = world.add("bad", state=JobState.VALIDATING)
    (world.folder.work(job) / "training_file.jsonl").write_text('{"text": ""}\n')
    failures = full_for_a_while(world.records)
    await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    assert len(failures) == 3


@played
async def test_killed_while_a_job_fails_it_fails_again_and_its_last_good_checkpoint_is_kept(world):
    job = world.add("one")
    for life in range(2):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.told)
        if life == 0:
            engine.step("0", 2)
            engine.checkpoint("0", 2)
            folder = Path(engine.told["0"]["checkpoints"]) / "step-2"
            asked = asyncio.Event()

            async def hang(op, asked=asked, **body):
                asked.set()
                await asyncio.Event().wait()

            engine.ask = hang
        assert engine.told["0"]["resume"] == (str(folder) if life else None)
        engine.say("0", "failed", code="diverged", message="NaN", field=None, step=3, checkpoint=str(folder))
        if life == 0:
            await asked.wait()
            assert world.state(job) is JobState.RUNNING  # nobody has heard of it
            await world.kill()
    await until(lambda: world.state(job) is JobState.FAILED)
    found = world.records.job(job)
    assert found.error["message"] == "NaN; its last good checkpoint, of step 2, was put up as the adapter ft-ftjob-one-step-2"
    (kept,) = world.records.checkpoints(found, after=None, limit=9)
    assert kept.serves == "ft-ftjob-one-step-2"
    assert list(world.shelf.kept) == [("ann", "ft-ftjob-one-step-2")]


@played
async def test_what_was_put_on_the_shelf_but_not_recorded_is_not_there_twice(world):
    """Killed between the two: the job goes on, and if it is cancelled then, nothing of it is served."""
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    final = Path(engine.told["0"]["final"])
    final.mkdir()
    world.shelf.keep("ann", "ft-ftjob-one", final)
    await world.kill()
    supervisor, _ = await world.start()
    await supervisor.cancel(job)
    assert not world.shelf.kept


@played
async def test_what_earlier_starts_left_behind_does_not_pile_up(world):
    job = world.add("one")
    for life in range(4):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.told)
        if life == 0:
            engine.step("0", 2)
            engine.checkpoint("0", 2)
            await until(lambda: world.records.last_checkpoint(world.records.job(job)))
        else:
            assert engine.told["0"]["after"] == 2
        unrecorded = Path(engine.told["0"]["checkpoints"]) / f"step-{4 + life}"
        unrecorded.mkdir()
        await world.kill()
    await world.start()
    await until(lambda: world.engine.told)
    assert len(list(world.folder.work(job).glob("try-*/step-*"))) == 2  # of the first start, with the checkpoint


@played
async def test_a_job_without_room_says_no_more_of_it_the_oftener_it_tries(world):
    module._REST_S = 0.001
    job = world.add("one")
    _, engine = await world.start()
    for attempt in range(5):
        await until(lambda attempt=attempt: len(engine.told) == attempt + 1)
        refused = {"code": "too_many_requests", "message": "later", "field": ""}
        engine.inbox.put_nowait({"id": str(attempt), "refused": refused})
    await until(lambda: len(engine.told) == 6)
    assert len(world.records.events(world.records.job(job), after=None, limit=99)) == 2  # created, started


@played
async def test_who_has_nothing_running_does_not_wait_for_the_second_job_of_another(world):
    world.limits = JobLimits(running=4, tenant_running=4)
    for id in ("a1", "a2", "a3", "a4"):
        world.add(id)
    supervisor, engine = await world.start()
    await until(lambda: len(engine.told) == 4)
    world.add("b1", "bob")
    supervisor.wake()
    await until(lambda: engine.stopped)
    supervisor.wake()
    await asyncio.sleep(0.05)
    assert engine.stopped == ["3"]  # her youngest, once
    engine.step("3", 1)
    folder = Path(engine.told["3"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.say("3", "stopped", step=1, folder=str(folder))
    await until(lambda: len(engine.told) == 5)
    assert engine.told["4"]["tenant"] == "bob"
    assert supervisor.positions() == {"ftjob-a4": 1}
    engine.finish("4")
    await until(lambda: len(engine.told) == 6)
    assert (engine.told["5"]["after"], engine.told["5"]["resume"]) == (1, str(folder))


@played
async def test_a_checkpoint_names_what_is_served_now(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.told)
    for step in (2, 4):
        engine.step("0", step)
        folder = Path(engine.told["0"]["checkpoints"]) / f"step-{step}"
        folder.mkdir()
        engine.say("0", "checkpoint", step=step, folder=str(folder), hash="h", serves="ann:ft-ftjob-one")
    listed = lambda: [c.serves for c in world.records.checkpoints(world.records.job(job), after=None, limit=9)]  # noqa: E731
    await until(lambda: listed() == ["ft-ftjob-one", None])
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    assert listed() == [None, None]  # by that name the end is served


@played
async def test_the_data_of_a_tenants_open_jobs_is_bounded(world):
    world.limits = JobLimits(running=1, tenant_running=1, tenant_tokens=300)
    jobs = [world.add(id, state=JobState.VALIDATING) for id in ("one", "two")]
    for job in jobs:
        world.records.set(job, plan=None)
        (world.folder.work(job) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 40)
    await world.start()
    await until(lambda: {world.state(job) for job in jobs} == {JobState.RUNNING, JobState.FAILED})
    (failed,) = [world.records.job(job) for job in jobs if world.state(job) is JobState.FAILED]
    assert failed.error["code"] == "quota_exceeded"
    await until(lambda: not world.folder.work(failed.id).exists())


def admission_to(world: World) -> Admission:
    preparer, shelf = world.supervisor._preparer, world.shelf
    return Admission(world.records, world.folder, preparer, world.supervisor, shelf, world.limits, lambda owner, begun: None)


def wanted(world: World, key: str | None = None, digest: str = "", text: str = '{"text": "x y z"}\n') -> JobRequest:
    source = world.folder.files / "file-1"
    source.write_text(text * 20)
    said = {"training_file": "file-1", "validation_file": None, "suffix": None, "metadata": None}
    sources = {"training_file": source}
    return JobRequest(
        tenant="ann", owner="ann", sources=sources, said=said, seed=1, wishes=Hyperparameters(), key=key, digest=digest
    )


@played
async def test_a_request_that_comes_again_while_it_is_checked_gets_the_answer_of_the_first(world):
    """Also when no more of its tenant's may be checked at a time."""
    await world.start()
    door, released, prepare = admission_to(world), asyncio.Event(), world.supervisor._preparer.prepare

    async def held(*args, **options):
        await released.wait()
        return await prepare(*args, **options)

    world.supervisor._preparer.prepare = held
    asked = [wanted(world, key) for key in "abcd"]
    under_way = [asyncio.create_task(door.admit(each)) for each in asked for _ in range(3)]
    await until(lambda: door.promised("ann") == 4)  # each will bring an adapter
    with pytest.raises(TooManyRequests):
        await door.admit(wanted(world, "e"))
    with pytest.raises(KeyReused):
        await door.admit(wanted(world, "a", "another"))
    released.set()
    made = [job.id for job in await asyncio.gather(*under_way)]
    assert (door.promised("ann"), door.promised("bob")) == (4, 0)
    assert [made.count(id) for id in dict.fromkeys(made)] == [3] * 4
    assert (await door.admit(asked[0])).id == (await door.known("ann", "a", "")).id == made[0]
    assert await door.known("ann", "e", "") is None, "what was refused may be asked for again"
    bad = wanted(world, "f", text="nonsense\n")
    answers = await asyncio.gather(*(door.admit(bad) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in answers] == [str(answers[0])] * 3
    assert isinstance(answers[0], BadTrainingFile)


@played
async def test_the_name_of_a_jobs_adapter_is_reserved_until_the_engine_has_ended_it(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.told)
    for name in ("ft-ftjob-one", "ft-ftjob-one-step-4"):
        with pytest.raises(NameReserved, match=job):
            supervisor.check_name("ann", name)
    world.records.add_job("ftjob-newer", "ann", "ann", "ft-ftjob-one-step-4", JobState.CANCELLED, ASKED, PLAN)
    with pytest.raises(NameReserved, match=job):
        supervisor.check_name("ann", "ft-ftjob-one-step-4")
    for owner, name in (("bob", "ft-ftjob-one"), (None, "ft-ftjob-one"), ("ann", "ft-ftjob"), ("ann", "ft-ftjob-one-step-")):
        supervisor.check_name(owner, name)
    await supervisor.cancel(job)
    with pytest.raises(NameReserved):
        supervisor.check_name("ann", "ft-ftjob-one")  # it would be put away with what the job served
    engine.say("0", "failed", code="closed", message="ended", field=None, step=0, checkpoint=None)
    await until(lambda: not supervisor.busy())
    assert engine.asked == [("unload", {"name": "ann:ft-ftjob-one"})]
    supervisor.check_name("ann", "ft-ftjob-one")


@played
async def test_a_job_gets_a_name_that_nothing_has(world, monkeypatch):
    await world.start()
    world.shelf.kept["ann", "ft-aaaaaaaa"] = Path()
    world.records.add_job("ftjob-b", "ann", "ann", "ft-bbbbbbbb", JobState.CANCELLED, ASKED, PLAN)
    tokens = iter(["a" * 24, "b" * 24, "c" * 24])
    monkeypatch.setattr(admission.secrets, "token_hex", lambda _: next(tokens, "d"))
    assert (await admission_to(world).admit(wanted(world))).name == "ft-cccccccc"


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
def test_data_that_takes_long_is_read_once_the_job_is_accepted(world, monkeypatch, patience_s):
    """Nobody else's request waits for it."""
    monkeypatch.setattr(data_preparation, "_AT_ONCE_S", patience_s)

    async def play() -> None:
        _, engine = await world.start()
        job = await admission_to(world).admit(wanted(world))
        assert job.state is (JobState.QUEUED if patience_s else JobState.VALIDATING)
        await until(lambda: engine.told)
        assert [file.suffix for file in world.folder.work(job.id).iterdir() if file.is_file()] == [".safetensors"]

    asyncio.run(play())
