"""Jobs whose data sets and checkpoints are in a cluster's store."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from symbiosis.errors import StoreUnavailable
from symbiosis.jobs import supervisor as module
from symbiosis.jobs.shared_layout import SharedJobsLayout
from symbiosis.jobs.states import JobState
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
from tests.jobs.environment import World, until
from tests.store.conftest import CLUSTER, open_cache, write_files


@pytest.fixture
def layout(tmp_path: Path) -> SharedJobsLayout:
    (tmp_path / "store").mkdir()
    ArtifactStore(open_object_store(str(tmp_path / "store"))).claim(CLUSTER)
    return SharedJobsLayout(tmp_path / "jobs", open_cache(str(tmp_path / "store"), tmp_path / "node"))


def write_data(layout: SharedJobsLayout, job: str, *files: str) -> None:
    layout.job_folder(job).mkdir()
    for file in ("training.jsonl", "training.safetensors", *files):
        (layout.job_folder(job) / file).write_text(file)


def test_data_sets_are_put_once(layout):
    write_data(layout, "ftjob-1")
    expected = "store:jobs/ftjob-1/data/training.safetensors", None
    assert layout.place_data("ftjob-1") == expected
    assert list(layout.folders.store.manifest("jobs/ftjob-1/data").files) == ["training.safetensors"]
    (layout.job_folder("ftjob-1") / "training.safetensors").unlink()
    assert layout.place_data("ftjob-1") == expected
    write_data(layout, "ftjob-2", "validation.safetensors")
    assert layout.place_data("ftjob-2")[1] == "store:jobs/ftjob-2/data/validation.safetensors"


def test_a_run_keeps_the_checkpoint_that_it_resumes(layout):
    write_data(layout, "ftjob-1")
    layout.place_data("ftjob-1")
    first = layout.make_run("ftjob-1", 1, None)
    steps = [
        layout.folders.locate(layout.folders.publish(write_files(layout.folders.draft(first) / f"step-{n}"))) for n in (2, 4)
    ]
    assert [layout.has_checkpoint(each) for each in steps] == [True, True]
    assert layout.make_run("ftjob-1", 2, steps[1]) == "store:jobs/ftjob-1/try-2"
    assert [layout.has_checkpoint(each) for each in steps] == [False, True]
    assert layout.folders.store.has("jobs/ftjob-1/data")
    assert not layout.has_checkpoint("/etc")  # of a time without a store
    layout.remove_checkpoint(steps[1])
    layout.remove_job("ftjob-1")
    assert layout.folders.store.list_ids("jobs") == set()


def test_what_cannot_be_removed_is_removed_later(layout, tmp_path, caplog):
    for job in ("ftjob-1", "ftjob-2"):
        write_data(layout, job)
        layout.place_data(job)
    shutil.move(tmp_path / "store", tmp_path / "away")
    layout.remove_job("ftjob-1")
    with pytest.raises(StoreUnavailable):
        layout.folders.store.check(CLUSTER)
    shutil.move(tmp_path / "away", tmp_path / "store")
    layout.remove_garbage(lambda: {"ftjob-2"})
    assert layout.folders.store.list_ids("jobs") == {"ftjob-2"}


def test_a_job_is_queued_again_while_its_engine_cannot_use_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BACKOFF_S", 0.01)
    world = World(tmp_path)

    async def run() -> None:
        job = world.add("one")
        _, engine = await world.start()
        for attempt in range(3):
            await until(lambda attempt=attempt: str(attempt) in engine.requests)
            error = {"code": "store_unavailable", "message": "the store cannot be reached", "field": ""}
            engine.inbox.put_nowait({"id": str(attempt), "refused": error})
        await until(lambda: "3" in engine.requests)
        engine.finish("3")
        await until(lambda: world.state(job) is JobState.SUCCEEDED)
        events = [event.message for event in world.db.list_events(world.db.get_job(job), after=None, limit=99)]
        assert "The job waits: the store cannot be reached" in events

    asyncio.run(run())
    world.db.close()
