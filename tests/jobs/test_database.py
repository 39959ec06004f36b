"""What lasts: transactions, compare-and-set, pages, and nothing that a name could break."""

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
from symbiosis.jobs.states import JobState, StateChange

NASTY = ["'; DROP TABLE jobs; --", '" OR 1=1 --', "%", "_", "\x00", "é" * 60, "../../etc/passwd"]


@pytest.fixture
def records(tmp_path):
    found = Database(tmp_path / "jobs.sqlite", clock=lambda: 1_000_000)
    yield found
    found.close()


def add(records: Database, id: str = "ftjob-1", tenant: str = "ann", state: JobState = JobState.QUEUED, **options):
    plan = {"steps": 10}
    return records.add_job(id, tenant, tenant, f"ft-{id}", state, {"seed": 1}, plan, **options)


def test_the_database_is_as_durable_as_sqlite_can_be(records, tmp_path):
    assert records._all("PRAGMA journal_mode") == [("wal",)]
    assert records._all("PRAGMA synchronous") == [(2,)]


def test_another_versions_database_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "jobs.sqlite") as other:
        other.execute("PRAGMA user_version=99")
    with pytest.raises(SymbiosisError, match="another version"):
        Database(tmp_path / "jobs.sqlite")


def test_files_are_their_tenants(records):
    made = [records.add_file(f"file-{number}", "ann", f"{number}.jsonl", 10) for number in range(5)]
    records.add_file("file-b", "bob", "b.jsonl", 7)
    assert records.files_taken("ann") == (5, 50)
    assert records.files("ann", after=None, limit=2) == [made[4], made[3]]
    assert records.files("ann", after="file-3", limit=10) == made[2::-1]
    assert records.files("ann", after="file-3", limit=10, oldest_first=True) == [made[4]]
    for action in (records.file, records.remove_file):
        with pytest.raises(UnknownFile):
            action("file-b", "ann")
    with pytest.raises(UnknownFile):
        records.files("ann", after="file-b", limit=1)
    records.remove_file("file-4", "ann")
    assert records.files_taken("ann") == (4, 40)


@pytest.mark.parametrize("nasty", NASTY, ids=ascii)
def test_names_are_values_and_never_words_of_sql(records, nasty):
    add(records)
    records.add_file("file-1", nasty, nasty, 1)
    assert records.files(nasty, after=None, limit=5)[0].filename == nasty
    for ask in (records.job, lambda id: records.file(id, "ann"), lambda id: records.jobs("ann", after=id, limit=5)):
        with pytest.raises((UnknownJob, UnknownFile)):
            ask(nasty)
    records.add_event("ftjob-1", "message", nasty)
    assert records.events(records.job("ftjob-1"), after=None, limit=1)[0].message == nasty
    assert records.job_of_key(nasty, nasty, "") is None
    assert records.jobs(None, after=None, limit=5)[0].id == "ftjob-1"


def test_a_job_changes_by_compare_and_set(records):
    job = add(records)
    begun = records.change(job.id, StateChange.BEGIN)
    assert (begun.state, begun.epoch, begun.began_at) == (JobState.RUNNING, 1, 1_000_000)
    with pytest.raises(WrongState):
        records.change(job.id, StateChange.BEGIN)
    records.change(job.id, StateChange.INTERRUPT)
    assert records.change(job.id, StateChange.BEGIN).epoch == 2
    with pytest.raises(WrongState):
        records.change(job.id, StateChange.SUCCEED, epoch=1)  # what the first start still says
    assert records.job(job.id).state is JobState.RUNNING
    done = records.change(job.id, StateChange.SUCCEED, epoch=2, hash="x")
    assert (done.state, done.finished_at, done.hash) == (JobState.SUCCEEDED, 1_000_000, "x")
    with pytest.raises(WrongState, match="succeeded"):
        records.change(job.id, StateChange.CANCEL)


def test_a_transaction_is_all_or_nothing(records):
    add(records)

    def fails() -> None:
        with records.transaction():
            records.set("ftjob-1", step=5)
            records.add_event("ftjob-1", "message", "never")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    job = records.job("ftjob-1")
    assert job.step == 0
    assert [event.kind for event in records.events(job, after=None, limit=9)] == ["created"]


def test_a_key_makes_one_job(records):
    first = add(records, key="k", digest="d")
    assert add(records, "ftjob-2", key="k", digest="d") == first
    with pytest.raises(KeyReused):
        add(records, "ftjob-3", key="k", digest="other")
    assert add(records, "ftjob-4", tenant="bob", key="k", digest="other").id == "ftjob-4"  # his own
    assert [job.id for job in records.jobs(None, after=None, limit=9)] == ["ftjob-4", "ftjob-1"]


def test_two_jobs_never_have_one_name(records):
    add(records)
    with pytest.raises(sqlite3.IntegrityError):
        records.add_job("ftjob-x", "ann", None, "ft-ftjob-1", JobState.QUEUED, {}, None)
    assert add(records, "ftjob-1b", tenant="bob").name == "ft-ftjob-1b"


def test_thousands_of_events_come_in_pages(records):
    job, other = add(records), add(records, "ftjob-2")
    with records.transaction():
        for step in range(5000):
            records.add_event(job.id, "metrics", f"step {step}", step=step, data={"tokens": 2})
            records.add_event(other.id, "metrics", "other's", step=step)
    seen, after = [], None
    while page := records.events(job, after=after, limit=100):
        seen += page
        after = page[-1].number
    assert [event.message for event in seen[:-1]] == [f"step {step}" for step in reversed(range(5000))]
    records.forget_after(job, 99)
    assert records.job(job.id).tokens == 200  # of steps that are not done again
    assert records.events(job, after=None, limit=1)[0].step == 99
    assert len(records.events(other, after=None, limit=9000)) == 5001


def test_checkpoints_replace_those_of_an_earlier_start(records):
    job = add(records)
    records.add_checkpoint(job, 5, "try-1/step-5", "h", None, {})
    records.add_checkpoint(job, 10, "try-1/step-10", "h", "name", {})
    records.add_checkpoint(job, 10, "try-2/step-10", None, None, {})
    newest, _ = records.checkpoints(job, after=None, limit=9)
    assert (newest.folder, newest.hash, newest.serves) == ("try-2/step-10", "h", "name")
    assert records.drop_folders(job, before=10) == ["try-1/step-5"]
    assert records.last_checkpoint(job).step == 10
    records.forget_after(job, 5)
    assert records.last_checkpoint(job) is None  # its folder is gone


def test_a_full_disk_changes_nothing_and_is_said(records):
    add(records)
    records._db.execute("PRAGMA max_page_count=1")  # SQLite's own way to be full
    size = records._all("PRAGMA page_count")[0][0]
    records._db.execute(f"PRAGMA max_page_count={size}")

    def fills() -> None:
        with records.transaction():
            for _ in range(1000):
                records.add_event("ftjob-1", "message", "x" * 1000)

    with pytest.raises(StorageFull):
        fills()
    records._db.execute("PRAGMA max_page_count=100000")
    assert len(records.events(records.job("ftjob-1"), after=None, limit=99)) == 1
    records.set("ftjob-1", step=1)


CHILD = """
import sys
from pathlib import Path
from symbiosis.jobs.event_recorder import Notes, Try
from symbiosis.jobs.database import Records
from symbiosis.jobs.states import State
records = Records(Path(sys.argv[1]))
for number in range(100000):
    with records.transaction():
        records.add_job(f"ftjob-{number}", "ann", None, f"n{number}", State.QUEUED, {}, None)
        records.add_event(f"ftjob-{number}", "message", "second")
    print(number, flush=True)
"""


def test_what_was_answered_is_there_after_kill_9(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path / "jobs.sqlite"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 40:
            break
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    last = max([40, *map(int, rest)])
    records = Database(tmp_path / "jobs.sqlite")
    found = records.jobs(None, after=None, limit=1 << 30)
    assert len(found) in (last + 1, last + 2)  # the one it was about to tell
    assert all(len(records.events(job, after=None, limit=9)) == 2 for job in found)
    assert records._all("PRAGMA integrity_check") == [("ok",)]
    records.close()


def test_of_the_jobs_that_have_ended_the_oldest_are_forgotten(records):
    for number in range(10):
        add(records, f"ftjob-{number}", key=f"key {number}")
        records.set(f"ftjob-{number}", step=10)
        if number != 1:
            records.change(f"ftjob-{number}", StateChange.CANCEL)
    add(records, "ftjob-bobs", "bob")
    records.change("ftjob-bobs", StateChange.CANCEL)

    def left() -> list[str]:
        return [job.id[-1] for job in records.jobs("ann", after=None, limit=99)]

    records.forget_old("ann", 8, 1000)
    assert left() == list("987654321")
    records.forget_old("ann", 8, 50)  # steps
    assert left() == list("987651")
    records.forget_old("ann", 2, 1000, but={"ftjob-5"})
    assert left() == list("9851")  # what has not ended stays, and what is still at the engine
    assert len(records.jobs("bob", after=None, limit=9)) == 1
    assert records._all("SELECT COUNT(DISTINCT job) FROM events") == [(5,)]
    assert records._all("SELECT COUNT(*) FROM keys") == [(4,)]
    assert add(records, "ftjob-again", key="key 0").id == "ftjob-again"  # the key stands for nothing any more


def test_an_old_checkpoint_is_removed_only_once_the_new_one_is_recorded(records, tmp_path):
    job = add(records)
    records.change(job.id, StateChange.BEGIN)
    trial = JobRun(job.id, "ann", 1, tmp_path / "final")
    notes = EventRecorder(records, shelf=None)  # type: ignore[arg-type] - nothing is put on it here
    folders = [tmp_path / f"step-{step}" for step in (1, 2)]
    said = []
    for step, folder in enumerate(folders, 1):
        folder.mkdir()
        body = {"step": step, "folder": str(folder), "hash": None, "serves": None}
        said.append({"id": "1", "training": {"checkpoint": body}})
    notes.take(trial, said[:1])
    with pytest.raises(KeyError):  # what came together is recorded together, or not at all
        notes.take(trial, [said[1], {"id": "1", "training": {"step": {}}}])
    assert records.last_checkpoint(records.job(job.id)).folder == str(folders[0])
    assert all(folder.is_dir() for folder in folders)
    notes.take(trial, said[1:])
    assert [folder.is_dir() for folder in folders] == [False, True]
