"""Database: transactions, compare-and-set, pagination, SQL injection."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.database import Database
from symbiosis.jobs.errors import KeyReused, StorageFull, UnknownFile, UnknownJob, WrongState
from symbiosis.jobs.event_recorder import EventRecorder, JobRun
from symbiosis.jobs.layout import JobsLayout, result_file_id
from symbiosis.jobs.states import JobState, StateChange

NASTY = ["'; DROP TABLE jobs; --", '" OR 1=1 --', "%", "_", "\x00", "é" * 60, "../../etc/passwd"]


@pytest.fixture
def db(tmp_path):
    found = Database(tmp_path / "jobs.sqlite", clock=lambda: 1_000_000)
    yield found
    found.close()


def add(db: Database, id: str = "ftjob-1", tenant: str = "ann", state: JobState = JobState.QUEUED, **options):
    plan = {"steps": 10}
    return db.add_job(id, tenant, tenant, f"ft-{id}", state, {"seed": 1}, plan, **options)


def test_the_database_uses_wal_and_full_synchronous_mode(db, tmp_path):
    assert db._query("PRAGMA journal_mode") == [("wal",)]
    assert db._query("PRAGMA synchronous") == [(2,)]


def test_a_database_of_another_version_is_rejected(tmp_path):
    with sqlite3.connect(tmp_path / "jobs.sqlite") as other:
        other.execute("PRAGMA user_version=99")
    with pytest.raises(SymbiosisError, match="another version"):
        Database(tmp_path / "jobs.sqlite")


def test_files_belong_to_their_tenant(db):
    made = [db.add_file(f"file-{number}", "ann", f"{number}.jsonl", 10) for number in range(5)]
    db.add_file("file-b", "bob", "b.jsonl", 7)
    assert db.file_usage("ann") == (5, 50)
    assert db.list_files("ann", after=None, limit=2) == [made[4], made[3]]
    assert db.list_files("ann", after="file-3", limit=10) == made[2::-1]
    assert db.list_files("ann", after="file-3", limit=10, oldest_first=True) == [made[4]]
    for action in (db.get_file, db.remove_file):
        with pytest.raises(UnknownFile):
            action("file-b", "ann")
    with pytest.raises(UnknownFile):
        db.list_files("ann", after="file-b", limit=1)
    db.remove_file("file-4", "ann")
    assert db.file_usage("ann") == (4, 40)


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_names_are_bound_values_and_never_sql(db, nasty):
    add(db)
    db.add_file("file-1", nasty, nasty, 1)
    assert db.list_files(nasty, after=None, limit=5)[0].filename == nasty
    for ask in (db.get_job, lambda id: db.get_file(id, "ann"), lambda id: db.list_jobs("ann", after=id, limit=5)):
        with pytest.raises((UnknownJob, UnknownFile)):
            ask(nasty)
    db.add_event("ftjob-1", "message", nasty)
    assert db.list_events(db.get_job("ftjob-1"), after=None, limit=1)[0].message == nasty
    assert db.find_job_by_key(nasty, nasty, "") is None
    assert db.list_jobs(None, after=None, limit=5)[0].id == "ftjob-1"


def test_a_job_changes_state_by_compare_and_set(db):
    job = add(db)
    begun = db.change_state(job.id, StateChange.BEGIN)
    assert (begun.state, begun.epoch, begun.began_at) == (JobState.RUNNING, 1, 1_000_000)
    with pytest.raises(WrongState):
        db.change_state(job.id, StateChange.BEGIN)
    db.change_state(job.id, StateChange.INTERRUPT)
    assert db.change_state(job.id, StateChange.BEGIN).epoch == 2
    with pytest.raises(WrongState):
        db.change_state(job.id, StateChange.SUCCEED, epoch=1)  # a late message of the first run
    assert db.get_job(job.id).state is JobState.RUNNING
    done = db.change_state(job.id, StateChange.SUCCEED, epoch=2, hash="x")
    assert (done.state, done.finished_at, done.hash) == (JobState.SUCCEEDED, 1_000_000, "x")
    with pytest.raises(WrongState, match="succeeded"):
        db.change_state(job.id, StateChange.CANCEL)


def test_a_transaction_is_all_or_nothing(db):
    add(db)

    def fails() -> None:
        with db.transaction():
            db.update_job("ftjob-1", step=5)
            db.add_event("ftjob-1", "message", "never")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    job = db.get_job("ftjob-1")
    assert job.step == 0
    assert [event.kind for event in db.list_events(job, after=None, limit=9)] == ["created"]


def test_an_idempotency_key_creates_one_job(db):
    first = add(db, key="k", digest="d")
    assert add(db, "ftjob-2", key="k", digest="d") == first
    with pytest.raises(KeyReused):
        add(db, "ftjob-3", key="k", digest="other")
    assert add(db, "ftjob-4", tenant="bob", key="k", digest="other").id == "ftjob-4"  # keys are per tenant
    assert [job.id for job in db.list_jobs(None, after=None, limit=9)] == ["ftjob-4", "ftjob-1"]


def test_job_names_are_unique_per_tenant(db):
    add(db)
    with pytest.raises(sqlite3.IntegrityError):
        db.add_job("ftjob-x", "ann", None, "ft-ftjob-1", JobState.QUEUED, {}, None)
    assert add(db, "ftjob-1b", tenant="bob").name == "ft-ftjob-1b"


def test_thousands_of_events_are_paginated(db):
    job, other = add(db), add(db, "ftjob-2")
    with db.transaction():
        for step in range(5000):
            db.add_event(job.id, "metrics", f"step {step}", step=step, data={"tokens": 2})
            db.add_event(other.id, "metrics", "other's", step=step)
    seen, after = [], None
    while page := db.list_events(job, after=after, limit=100):
        seen += page
        after = page[-1].number
    assert [event.message for event in seen[:-1]] == [f"step {step}" for step in reversed(range(5000))]
    db.discard_after_step(job, 99)
    assert db.get_job(job.id).tokens == 200  # of steps that do not run again
    assert db.list_events(job, after=None, limit=1)[0].step == 99
    assert len(db.list_events(other, after=None, limit=9000)) == 5001


def test_checkpoints_replace_those_of_an_earlier_run(db):
    job = add(db)
    db.add_checkpoint(job, 5, "try-1/step-5", "h", None, {})
    db.add_checkpoint(job, 10, "try-1/step-10", "h", "name", {})
    db.add_checkpoint(job, 10, "try-2/step-10", None, None, {})
    newest, _ = db.list_checkpoints(job, after=None, limit=9)
    assert (newest.folder, newest.hash, newest.serves) == ("try-2/step-10", "h", "name")
    assert db.release_folders(job, before=10) == ["try-1/step-5"]
    assert db.last_checkpoint(job).step == 10
    db.discard_after_step(job, 5)
    assert db.last_checkpoint(job) is None  # its folder was released


def test_a_full_disk_raises_and_changes_nothing(db):
    add(db)
    db._db.execute("PRAGMA max_page_count=1")  # makes SQLite report a full disk
    size = db._query("PRAGMA page_count")[0][0]
    db._db.execute(f"PRAGMA max_page_count={size}")

    def fills() -> None:
        with db.transaction():
            for _ in range(1000):
                db.add_event("ftjob-1", "message", "x" * 1000)

    with pytest.raises(StorageFull):
        fills()
    db._db.execute("PRAGMA max_page_count=100000")
    assert len(db.list_events(db.get_job("ftjob-1"), after=None, limit=99)) == 1
    db.update_job("ftjob-1", step=1)


CHILD = """
import sys
from pathlib import Path
from symbiosis.jobs.database import Database
from symbiosis.jobs.states import JobState
db = Database(Path(sys.argv[1]))
for number in range(100000):
    with db.transaction():
        db.add_job(f"ftjob-{number}", "ann", None, f"n{number}", JobState.QUEUED, {}, None)
        db.add_event(f"ftjob-{number}", "message", "second")
    print(number, flush=True)
"""


def test_committed_jobs_survive_kill_9(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "jobs.sqlite"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 40:
            break
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    last = max([40, *map(int, rest)])
    db = Database(tmp_path / "jobs.sqlite")
    found = db.list_jobs(None, after=None, limit=1 << 30)
    assert len(found) in (last + 1, last + 2)  # the one not printed yet
    assert all(len(db.list_events(job, after=None, limit=9)) == 2 for job in found)
    assert db._query("PRAGMA integrity_check") == [("ok",)]
    db.close()


def test_the_oldest_ended_jobs_are_pruned(db):
    for number in range(10):
        add(db, f"ftjob-{number}", key=f"key {number}")
        db.update_job(f"ftjob-{number}", step=10)
        if number != 1:
            db.change_state(f"ftjob-{number}", StateChange.CANCEL)
            db.add_file(result_file_id(f"ftjob-{number}"), "ann", "step_metrics.csv", 100)
    assert db.file_usage("ann") == (0, 0)  # result files count towards no quota
    add(db, "ftjob-bobs", "bob")
    db.change_state("ftjob-bobs", StateChange.CANCEL)

    def left() -> list[str]:
        return [job.id[-1] for job in db.list_jobs("ann", after=None, limit=99)]

    assert db.prune_ended("ann", 8, 1000) == ["file-ftjob-0"]
    assert left() == list("987654321")
    assert "file-ftjob-0" not in db.file_ids()
    db.prune_ended("ann", 8, 50)  # steps
    assert left() == list("987651")
    db.prune_ended("ann", 2, 1000, exclude={"ftjob-5"})
    assert left() == list("9851")  # open and excluded jobs stay
    assert len(db.list_jobs("bob", after=None, limit=9)) == 1
    assert db._query("SELECT COUNT(DISTINCT job) FROM events") == [(5,)]
    assert db._query("SELECT COUNT(*) FROM keys") == [(4,)]
    assert db.file_ids() == {f"file-ftjob-{number}" for number in (5, 8, 9)}
    assert add(db, "ftjob-again", key="key 0").id == "ftjob-again"  # its key was pruned


def test_an_old_checkpoint_is_removed_after_the_new_one_is_recorded(db, tmp_path):
    job = add(db)
    db.change_state(job.id, StateChange.BEGIN)
    run = JobRun(job.id, "ann", 1, str(tmp_path / "final"))
    recorder = EventRecorder(db, JobsLayout(tmp_path / "jobs"), store=None, count_steps=None)  # type: ignore[arg-type] - not used here
    folders = [tmp_path / f"step-{step}" for step in (1, 2)]
    events = []
    for step, folder in enumerate(folders, 1):
        folder.mkdir()
        body = {"step": step, "folder": str(folder), "hash": None, "serves": None}
        events.append({"id": "1", "training": {"checkpoint": body}})
    recorder.record(run, events[:1])
    with pytest.raises(KeyError):  # a batch is recorded whole or not at all
        recorder.record(run, [events[1], {"id": "1", "training": {"step": {}}}])
    assert db.last_checkpoint(db.get_job(job.id)).folder == str(folders[0])
    assert all(folder.is_dir() for folder in folders)
    recorder.record(run, events[1:])
    assert [folder.is_dir() for folder in folders] == [False, True]
