"""The supervisor with a fake engine: starting, pausing, cancelling and recording jobs."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from symbiosis.jobs import data_preparation, tokenized_dataset
from symbiosis.jobs import supervisor as module
from symbiosis.jobs.errors import NameReserved, WrongState
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.states import JobState
from tests.jobs.environment import ASKED, PLAN, fill_disk, run_async, until


@run_async
async def test_a_job_runs_from_the_queue_to_the_store(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    body = engine.requests["0"]
    assert (body["op"], body["tenant"], body["after"], body["resume"]) == ("train", "ann", 0, None)
    assert body["serve_as"] == "ann:ft-ftjob-one"
    engine.send("0", "begun", steps=10)
    for step in range(1, 11):
        engine.step("0", step)
        if step % 2 == 0:
            engine.checkpoint("0", step)
    await until(lambda: world.db.get_job(job).step == 10)
    await until(lambda: [path.name for path in Path(body["checkpoints"]).iterdir()] == ["step-10"])  # older ones are removed
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    found = world.db.get_job(job)
    assert (found.hash, found.tokens, found.steps) == ("h10", 70, 10)
    assert world.store.added["ann", "ft-ftjob-one"] == body["final"]
    assert sum(steps for _, steps, _ in world.counted) == 10
    rows = world.layout.file_path("file-ftjob-one").read_text().splitlines()
    assert rows[0] == "step,train_loss,valid_loss,learning_rate,gradient_norm,tokens"
    assert [row.split(",")[0] for row in rows[1:]] == [str(step) for step in range(1, 11)]
    assert world.db.get_file("file-ftjob-one", "ann").bytes == world.layout.file_path("file-ftjob-one").stat().st_size
    assert world.db.file_usage("ann") == (0, 0)
    await until(lambda: not world.layout.job_folder(job).exists())


@run_async
async def test_jobs_start_within_limits_and_fairly(world):
    for id in ("a1", "a2"):
        world.add(id)
    world.add("b1", "bob")
    world.add("c1", "cat")
    supervisor, engine = await world.start()
    await until(lambda: len(engine.requests) == 2)
    assert [body["tenant"] for body in engine.requests.values()] == ["ann", "bob"]
    assert supervisor.queue_positions() == {"ftjob-c1": 1, "ftjob-a2": 2}
    engine.finish("0")
    await until(lambda: len(engine.requests) == 3)
    assert engine.requests["2"]["tenant"] == "cat"
    engine.send("1", "failed", code="diverged", message="no number", field=None, step=3, checkpoint=None)
    await until(lambda: len(engine.requests) == 4)
    assert "a2" in engine.requests["3"]["data"]
    assert world.db.get_job("ftjob-b1").error == {"code": "diverged", "message": "no number", "param": None}


@run_async
async def test_pause_and_resume_before_the_engine_has_stopped(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    engine.step("0", 1)
    assert (await supervisor.pause(job)).state is JobState.PAUSED
    assert engine.stopped == ["0"]
    assert (await supervisor.resume(job)).state is JobState.QUEUED
    await asyncio.sleep(0.05)
    assert len(engine.requests) == 1  # one run at a time
    folder = Path(engine.requests["0"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.send("0", "stopped", step=1, folder=str(folder))
    await until(lambda: len(engine.requests) == 2)
    assert engine.requests["1"]["after"] == 1
    engine.finish("1")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)


@run_async
async def test_a_job_that_finishes_while_paused_succeeds(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.pause(job)
    assert not engine.dropped
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    with pytest.raises(WrongState):
        await supervisor.resume(job)


@run_async
async def test_a_result_after_cancellation_is_removed(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.cancel(job)
    assert engine.dropped == ["0"], "a cancelled run stops without a checkpoint"
    engine.finish("0")
    await until(lambda: engine.calls)
    assert engine.calls == [("unload", {"name": "ann:ft-ftjob-one"})]
    await until(lambda: not Path(engine.requests["0"]["final"]).exists() and not world.layout.job_folder(job).exists())
    assert world.state(job) is JobState.CANCELLED
    assert not world.store.added


@run_async
async def test_cancelling_a_paused_job_unloads_what_it_served(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.pause(job)
    engine.send("0", "stopped", step=0, folder=None)
    await until(lambda: not supervisor.busy_jobs())
    assert not engine.calls, "it may be resumed"
    reserved, ask = [], engine.ask

    async def slow(op, **body):
        await asyncio.sleep(0.01)
        with pytest.raises(NameReserved):
            supervisor.check_name("ann", "ft-ftjob-one")
        reserved.append(op)
        return await ask(op, **body)

    engine.ask = slow
    await supervisor.cancel(job)
    assert engine.calls == [("unload", {"name": "ann:ft-ftjob-one"})]
    assert reserved == ["unload"], "a new adapter of this name would be unloaded with the job's"
    assert not world.layout.job_folder(job).exists()
    supervisor.check_name("ann", "ft-ftjob-one")


@run_async
async def test_a_job_cancelled_while_its_pause_is_recorded_is_cleaned_up(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.pause(job)
    loop, take = asyncio.get_running_loop(), supervisor._recorder.record

    def cancelled(*args):
        found = take(*args)
        asyncio.run_coroutine_threadsafe(supervisor.cancel(job), loop).result(10)
        return found

    supervisor._recorder.record = cancelled
    engine.send("0", "stopped", step=0, folder=None)
    await until(lambda: engine.calls and not world.layout.job_folder(job).exists())
    assert world.state(job) is JobState.CANCELLED


@run_async
async def test_a_job_rejected_for_capacity_is_retried(world):
    module._BACKOFF_S = 0.01
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    engine.inbox.put_nowait({"id": "0", "refused": {"code": "too_many_requests", "message": "later", "field": ""}})
    await until(lambda: len(engine.requests) == 2)
    engine.inbox.put_nowait({"id": "1", "refused": {"code": "bad_adapter", "message": "never", "field": "r"}})
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.db.get_job(job).error == {"code": "bad_adapter", "message": "never", "param": "r"}


@run_async
async def test_events_wait_for_a_full_disk_and_none_is_lost(world):
    module._RETRY_S = 0.01
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    failures = fill_disk(world.db)
    engine.step("0", 1)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    events = world.db.list_events(world.db.get_job(job), after=None, limit=9)
    assert len([event for event in events if event.kind == "metrics"]) == 1
    assert len(failures) == 3


@run_async
async def test_an_invalid_event_fails_its_job_and_no_other(world):
    job, other = world.add("one"), world.add("two", "bob")
    _, engine = await world.start()
    await until(lambda: len(engine.requests) == 2)
    engine.send("0", "step", nonsense=1)
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.db.get_job(job).error["code"] == "internal_error"
    engine.finish("1")
    await until(lambda: world.state(other) is JobState.SUCCEEDED)


@run_async
async def test_large_files_are_tokenized_while_the_job_is_validating(world):
    good, bad = (world.add(id, state=JobState.VALIDATING) for id in ("good", "bad"))
    (world.layout.job_folder(good) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 20)
    (world.layout.job_folder(bad) / "training_file.jsonl").write_text('{"text": "x"}\n{"text": ""}\n')
    _, engine = await world.start()  # as left by an earlier process
    await until(lambda: world.state(bad) is JobState.FAILED and engine.requests)
    assert "line 2" in world.db.get_job(bad).error["message"]
    assert world.db.get_job(good).plan["recipe"]["per_device_train_batch_size"] == 1
    assert Path(engine.requests["0"]["data"]).is_file()
    await until(lambda: not world.layout.job_folder(bad).exists())


@run_async
async def test_a_file_that_takes_too_long_to_tokenize_is_rejected(world, monkeypatch):
    monkeypatch.setattr(data_preparation, "_BACKGROUND_TIMEOUT_S", 0.0)
    job = world.add("slow", state=JobState.VALIDATING)
    (world.layout.job_folder(job) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 20)
    await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    assert world.db.get_job(job).error["message"].startswith("tokenizing it takes longer than 0 minutes: split it")


@run_async
async def test_the_data_of_a_cancelled_job_blocks_no_other_job(world, monkeypatch):
    cancelled, waits, other = (world.add(id, state=JobState.VALIDATING) for id in ("cancelled", "waits", "other"))
    for job, text in ((cancelled, "long"), (waits, "long"), (other, "x y z")):
        (world.layout.job_folder(job) / "training_file.jsonl").write_text(f'{{"text": "{text}"}}\n' * 20)
    started, proceed, read, tokenize = threading.Event(), threading.Event(), list[str](), tokenized_dataset._tokenize

    def slow(sample, *args):
        read.append(sample.text)
        started.set()
        proceed.wait(10)
        return tokenize(sample, *args)

    monkeypatch.setattr(tokenized_dataset, "_tokenize", slow)
    supervisor, engine = await world.start()
    await asyncio.to_thread(started.wait, 10)
    for job in (cancelled, waits):
        await supervisor.cancel(job)
    proceed.set()
    await until(lambda: engine.requests)
    assert read == ["long"] + ["x y z"] * 20
    await until(lambda: not any(world.layout.job_folder(job).exists() for job in (cancelled, waits)))
    assert {world.state(cancelled), world.state(waits)} == {JobState.CANCELLED}


@run_async
async def test_a_job_that_cannot_start_fails_and_others_run(world):
    module._RETRY_S = 0.01
    job = world.add("one")
    world.layout.job_folder(job).rmdir()
    world.layout.job_folder(job).write_text("in the way")  # the folder of its checkpoints cannot be made
    other = world.add("two", "bob")
    _, engine = await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    await until(lambda: engine.requests)
    engine.finish(engine.running(other))
    await until(lambda: world.state(other) is JobState.SUCCEEDED)


@run_async
async def test_starting_jobs_is_retried_after_any_failure(world):
    module._RETRY_S = 0.01
    world.add("one")
    waiting, failures = world.db.list_queued, []

    def fails():
        if len(failures) < 3:
            failures.append(1)
            raise sqlite3.OperationalError("strange")
        return waiting()

    world.db.list_queued = fails
    _, engine = await world.start()
    await until(lambda: engine.requests)


@run_async
async def test_a_job_paused_and_resumed_after_its_last_step_succeeds(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.pause(job)
    await supervisor.resume(job)
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    assert ("ann", "ft-ftjob-one") in world.store.added


@run_async
async def test_a_job_paused_and_resumed_is_retried_when_the_engine_is_full(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    await supervisor.pause(job)
    await supervisor.resume(job)
    engine.send("0", "failed", code="closed", message="at capacity", field=None, step=0, checkpoint=None)
    await until(lambda: len(engine.requests) == 2)
    assert world.state(job) is JobState.RUNNING


@run_async
async def test_a_full_disk_does_not_leave_a_job_validating(world):
    module._RETRY_S = 0.01
    job = world.add("bad", state=JobState.VALIDATING)
    (world.layout.job_folder(job) / "training_file.jsonl").write_text('{"text": ""}\n')
    failures = fill_disk(world.db)
    await world.start()
    await until(lambda: world.state(job) is JobState.FAILED)
    assert len(failures) == 3


@run_async
async def test_a_tenant_without_a_running_job_preempts_one_of_a_tenant_with_several(world):
    world.limits = JobLimits(running=4, tenant_running=4)
    for id in ("a1", "a2", "a3", "a4"):
        world.add(id)
    supervisor, engine = await world.start()
    await until(lambda: len(engine.requests) == 4)
    world.add("b1", "bob")
    supervisor.wake()
    await until(lambda: engine.stopped)
    supervisor.wake()
    await asyncio.sleep(0.05)
    assert engine.stopped == ["3"]  # the youngest, once
    engine.step("3", 1)
    folder = Path(engine.requests["3"]["checkpoints"]) / "step-1"
    folder.mkdir()
    engine.send("3", "stopped", step=1, folder=str(folder))
    await until(lambda: len(engine.requests) == 5)
    assert engine.requests["4"]["tenant"] == "bob"
    assert supervisor.queue_positions() == {"ftjob-a4": 1}
    engine.finish("4")
    await until(lambda: len(engine.requests) == 6)
    assert (engine.requests["5"]["after"], engine.requests["5"]["resume"]) == (1, str(folder))


@run_async
async def test_only_the_checkpoint_being_served_has_a_name(world):
    job = world.add("one")
    _, engine = await world.start()
    await until(lambda: engine.requests)
    for step in (2, 4):
        engine.step("0", step)
        folder = Path(engine.requests["0"]["checkpoints"]) / f"step-{step}"
        folder.mkdir()
        engine.send("0", "checkpoint", step=step, folder=str(folder), hash="h", serves="ann:ft-ftjob-one")
    listed = lambda: [c.serves for c in world.db.list_checkpoints(world.db.get_job(job), after=None, limit=9)]  # noqa: E731
    await until(lambda: listed() == ["ft-ftjob-one", None])
    engine.finish("0")
    await until(lambda: world.state(job) is JobState.SUCCEEDED)
    assert listed() == [None, None]  # the final adapter is served under that name


@run_async
async def test_the_tokens_of_a_tenants_open_jobs_are_bounded(world):
    world.limits = JobLimits(running=1, tenant_running=1, tenant_tokens=300)
    jobs = [world.add(id, state=JobState.VALIDATING) for id in ("one", "two")]
    for job in jobs:
        world.db.update_job(job, plan=None)
        (world.layout.job_folder(job) / "training_file.jsonl").write_text('{"text": "x y z"}\n' * 40)
    await world.start()
    await until(lambda: {world.state(job) for job in jobs} == {JobState.RUNNING, JobState.FAILED})
    (failed,) = [world.db.get_job(job) for job in jobs if world.state(job) is JobState.FAILED]
    assert failed.error["code"] == "quota_exceeded"
    await until(lambda: not world.layout.job_folder(failed.id).exists())


@run_async
async def test_the_name_of_a_jobs_adapter_is_reserved_until_its_run_has_ended(world):
    job = world.add("one")
    supervisor, engine = await world.start()
    await until(lambda: engine.requests)
    for name in ("ft-ftjob-one", "ft-ftjob-one-step-4"):
        with pytest.raises(NameReserved, match=job):
            supervisor.check_name("ann", name)
    world.db.add_job("ftjob-newer", "ann", "ann", "ft-ftjob-one-step-4", JobState.CANCELLED, ASKED, PLAN)
    with pytest.raises(NameReserved, match=job):
        supervisor.check_name("ann", "ft-ftjob-one-step-4")
    for owner, name in (("bob", "ft-ftjob-one"), (None, "ft-ftjob-one"), ("ann", "ft-ftjob"), ("ann", "ft-ftjob-one-step-")):
        supervisor.check_name(owner, name)
    await supervisor.cancel(job)
    with pytest.raises(NameReserved):
        supervisor.check_name("ann", "ft-ftjob-one")  # the clean-up of the job would unload it
    engine.send("0", "failed", code="closed", message="ended", field=None, step=0, checkpoint=None)
    await until(lambda: not supervisor.busy_jobs())
    assert engine.calls == [("unload", {"name": "ann:ft-ftjob-one"})]
    supervisor.check_name("ann", "ft-ftjob-one")
