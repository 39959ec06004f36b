"""Recovery: either process is killed at any point, and no job is lost, doubled or left running."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from symbiosis.jobs import layout
from symbiosis.jobs import supervisor as module
from symbiosis.jobs.states import JobState
from tests.jobs.environment import run_async, until


@run_async
async def test_after_a_kill_a_job_resumes_from_its_last_recorded_checkpoint(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    for step in (1, 2, 3, 4, 5):
        engine.step("0", step)
        if step % 2 == 0:
            engine.checkpoint("0", step)
    await until(lambda: world.db.get_job(job).step == 5)
    first = engine.requests["0"]
    await world.kill()
    assert world.state(job) is JobState.RUNNING  # as it was left
    _, engine = await world.start()
    await until(lambda: engine.requests)
    body = engine.requests["0"]
    assert (body["after"], Path(body["resume"]).name) == (4, "step-4")
    assert body["checkpoints"] != first["checkpoints"]  # two runs never write to the same place
    assert body["final"] != first["final"]
    found = world.db.get_job(job)
    assert (found.step, found.tokens, found.epoch) == (4, 28, 2)
    for step in range(5, 11):
        engine.step("0", step)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.db.list_events(found, after=None, limit=99)
    assert sorted(event.step for event in events if event.kind == "metrics") == list(range(1, 11))
    assert world.db.get_job(job).tokens == 70


@run_async
async def test_killed_at_every_point_no_job_is_lost_doubled_or_left_running(world):
    """Each process sends one event more than the one before; the last finishes the job."""
    job = world.add("one")
    for count in range(14):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.requests)
        begin = engine.requests["0"]["after"]
        for step in range(begin + 1, min(begin + 1 + count, 11)):
            engine.step("0", step)
            if step % 2 == 0 and step > begin:
                engine.checkpoint("0", step)
        if begin + count >= 11:
            engine.finish("0")
            break
        await asyncio.sleep(0.002 * (count % 3))  # during recording
        await world.kill()
        assert len(world.db.list_jobs(None, after=None, limit=9)) == 1
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.db.list_events(world.db.get_job(job), after=None, limit=999)
    assert sorted(event.step for event in events if event.kind == "metrics") == list(range(1, 11))
    assert list(world.store.added) == [("ann", "ft-ftjob-one")]


@run_async
async def test_stopping_the_server_lets_jobs_save_and_queues_them_again(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    engine.step("0", 1)
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: set(engine.stopped) == {"0"})
    folder = Path(engine.requests["0"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.send("0", "stopped", step=1, folder=str(folder))
    await stopping
    assert world.state(job) is JobState.QUEUED
    _, engine = await world.start()
    await until(lambda: engine.requests)
    assert (engine.requests["0"]["after"], engine.requests["0"]["resume"]) == (1, str(folder))


@run_async
async def test_after_a_restart_no_checkpoint_is_marked_as_served(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    folder = Path(engine.requests["0"]["checkpoints"]) / "step-2"
    folder.mkdir()
    engine.send("0", "checkpoint", step=2, folder=str(folder), hash="h", serves="ann:ft-ftjob-one")
    listed = lambda: [c.serves for c in world.db.list_checkpoints(world.db.get_job(job), after=None, limit=9)]  # noqa: E731
    await until(lambda: listed() == ["ft-ftjob-one"])
    await world.kill()
    await world.start()
    assert listed() == [None]


@run_async
async def test_the_last_good_checkpoint_of_a_diverged_job_is_stored_and_served(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    engine.step("0", 1)
    engine.step("0", 2)
    engine.checkpoint("0", 2)
    folder = Path(engine.requests["0"]["checkpoints"]) / "step-2"
    engine.send("0", "failed", code="diverged", message="NaN", field=None, step=3, checkpoint=str(folder))
    await until(lambda: ("ann", "ft-ftjob-one-step-2") in world.store.added)
    kept = Path(world.store.added["ann", "ft-ftjob-one-step-2"])
    assert sorted(file.name for file in kept.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert engine.calls[0] == ("load", {"name": "ann:ft-ftjob-one-step-2", "folder": str(kept), "replace": True})
    await until(lambda: world.db.list_checkpoints(world.db.get_job(job), after=None, limit=1)[0].serves)
    assert world.state(job) is JobState.FAILED


@run_async
async def test_unknown_files_are_removed_at_the_start(world):
    kept = world.add("kept")
    (world.layout.files / "file-unknown").write_text("x")
    world.db.add_file("file-half-deleted", "ann", "data.jsonl", 1)
    world.layout.job_folder("ftjob-unknown").mkdir()
    world.layout.job_folder("ftjob-unknown").joinpath("x").write_text("x")
    await world.start()
    assert not list(world.layout.files.iterdir())
    assert not world.db.file_ids()
    assert [path.name for path in world.layout.job_folder("").iterdir()] == [kept]


@run_async
async def test_the_start_of_a_job_waits_for_a_full_disk(world, monkeypatch):
    module._RETRY_S = 0.01
    job, full = world.add("one"), []
    sync_to_disk = layout.sync_to_disk

    def refuse(path: Path) -> None:
        if len(full) < 3:
            full.append(world.state(job))
            raise OSError(errno.ENOSPC, "full")
        sync_to_disk(path)

    monkeypatch.setattr(layout, "sync_to_disk", refuse)
    _, engine = await world.start()
    await until(lambda: engine.requests)
    assert len(full) == 3
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)


@run_async
async def test_a_kill_during_a_failure_still_stores_the_last_good_checkpoint(world):
    job = world.add("one")
    for attempt in range(2):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.requests)
        if attempt == 0:
            engine.step("0", 2)
            engine.checkpoint("0", 2)
            folder = Path(engine.requests["0"]["checkpoints"]) / "step-2"
            asked = asyncio.Event()

            async def hang(op, asked=asked, **body):
                asked.set()
                await asyncio.Event().wait()

            engine.ask = hang
        assert engine.requests["0"]["resume"] == (str(folder) if attempt else None)
        engine.send("0", "failed", code="diverged", message="NaN", field=None, step=3, checkpoint=str(folder))
        if attempt == 0:
            await asked.wait()
            assert world.state(job) is JobState.RUNNING  # the failure is not visible yet
            await world.kill()
    await until(lambda: world.state(job) is JobState.FAILED)
    found = world.db.get_job(job)
    assert found.error["message"] == "NaN; the last good checkpoint, of step 2, is served as the adapter ft-ftjob-one-step-2"
    (kept,) = world.db.list_checkpoints(found, after=None, limit=9)
    assert kept.serves == "ft-ftjob-one-step-2"
    assert list(world.store.added) == [("ann", "ft-ftjob-one-step-2")]


@run_async
async def test_an_adapter_stored_but_not_recorded_is_removed(world):
    """After a kill between the two, the job resumes; if it is cancelled then, nothing of it is served."""
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    final = Path(engine.requests["0"]["final"])
    final.mkdir()
    world.store.add("ann", "ft-ftjob-one", final)
    await world.kill()
    supervisor, _ = await world.start()
    await supervisor.cancel(job)
    assert not world.store.added


@run_async
async def test_folders_of_earlier_runs_are_removed(world):
    job = world.add("one")
    for attempt in range(4):
        _, engine = await world.start()
        await until(lambda engine=engine: engine.requests)
        if attempt == 0:
            engine.step("0", 2)
            engine.checkpoint("0", 2)
            await until(lambda: world.db.last_checkpoint(world.db.get_job(job)))
        else:
            assert engine.requests["0"]["after"] == 2
        unrecorded = Path(engine.requests["0"]["checkpoints"]) / f"step-{4 + attempt}"
        unrecorded.mkdir()
        await world.kill()
    await world.start()
    await until(lambda: world.engine.requests)
    assert len(list(world.layout.job_folder(job).glob("try-*/step-*"))) == 2  # of the first run, with the checkpoint


@run_async
async def test_repeated_attempts_add_one_event(world):
    module._BACKOFF_S = 0.001
    job = world.add("one")
    _, engine = await world.start()
    for attempt in range(5):
        await until(lambda attempt=attempt: len(engine.requests) == attempt + 1)
        refused = {"code": "too_many_requests", "message": "later", "field": ""}
        engine.inbox.put_nowait({"id": str(attempt), "refused": refused})
    await until(lambda: len(engine.requests) == 6)
    assert len(world.db.list_events(world.db.get_job(job), after=None, limit=99)) == 2  # created, started
