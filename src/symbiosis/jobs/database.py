"""What lasts: files, jobs, events and checkpoints in SQLite (WAL, synchronous=FULL).

What was answered is on the disk. A job's state changes by compare-and-set on state and epoch: the number of its
start, so that what an earlier start still says is told apart.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.errors import KeyReused, StorageFull, UnknownFile, UnknownJob
from symbiosis.jobs.queue import QueuedJob
from symbiosis.jobs.states import JobState, StateChange, after

VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL);
CREATE INDEX files_of ON files (tenant, number);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, owner TEXT,
    state TEXT NOT NULL, epoch INTEGER NOT NULL DEFAULT 0, name TEXT NOT NULL,
    created_at INTEGER NOT NULL, began_at INTEGER, finished_at INTEGER,
    asked TEXT NOT NULL, plan TEXT, step INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0, figures TEXT NOT NULL DEFAULT '{}', hash TEXT, error TEXT,
    UNIQUE (tenant, name));
CREATE INDEX jobs_of ON jobs (tenant, number);
CREATE INDEX jobs_in ON jobs (state, number);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL REFERENCES jobs (number), created_at INTEGER NOT NULL,
    level TEXT NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL, step INTEGER, data TEXT NOT NULL);
CREATE INDEX events_of ON events (job, number);
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL REFERENCES jobs (number), step INTEGER NOT NULL,
    folder TEXT, hash TEXT, serves TEXT, metrics TEXT NOT NULL, created_at INTEGER NOT NULL, UNIQUE (job, step));
CREATE TABLE keys (
    tenant TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (tenant, key));
CREATE INDEX keys_of ON keys (job);
"""


@dataclass(frozen=True, slots=True)
class FileRecord:
    number: int
    id: str
    tenant: str
    filename: str
    bytes: int
    created_at: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    number: int
    id: str
    tenant: str
    owner: str | None
    """Whose adapter it will be; None: everybody's."""
    state: JobState
    epoch: int
    """How often it was started."""
    name: str
    """Of the adapter."""
    created_at: int
    began_at: int | None
    finished_at: int | None
    asked: dict[str, Any]
    plan: dict[str, Any] | None
    step: int
    steps: int
    tokens: int
    figures: dict[str, Any]
    """Of its last step."""
    hash: str | None
    error: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class EventRecord:
    number: int
    created_at: int
    level: str
    kind: str
    message: str
    step: int | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    number: int
    step: int
    folder: str | None
    """None: it is gone."""
    hash: str | None
    serves: str | None
    metrics: dict[str, Any]
    created_at: int


_JOB, _FILE, _EVENT, _CHECKPOINT = (
    ", ".join(kind.__slots__) for kind in (JobRecord, FileRecord, EventRecord, CheckpointRecord)
)


def _job(row: Sequence[Any]) -> JobRecord:
    made = dict(zip(JobRecord.__slots__, row, strict=True))
    made["state"] = JobState(made["state"])
    for name in ("asked", "plan", "figures", "error"):
        made[name] = None if made[name] is None else json.loads(made[name])
    return JobRecord(**made)


def _event(row: Sequence[Any]) -> EventRecord:
    *columns, data = row
    return EventRecord(**dict(zip(EventRecord.__slots__, (*columns, json.loads(data)), strict=True)))


def _checkpoint(row: Sequence[Any]) -> CheckpointRecord:
    made = dict(zip(CheckpointRecord.__slots__, row, strict=True))
    return CheckpointRecord(**{**made, "metrics": json.loads(made["metrics"])})


class Database:
    """One for a server. Any thread may use it; each method is a transaction, or part of the one around it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises `SymbiosisError` if the database is another version's."""
        self._clock = clock
        self._lock = threading.RLock()
        self._depth = 0
        with _told():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
            elif found != VERSION:
                self._db.close()
                raise SymbiosisError(f"{path} was written by another version (its schema is {found}, ours {VERSION})")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. Raises `StorageFull`."""
        with self._lock, _told():
            if self._depth:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    def _all(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, _told():
            return self._db.execute(sql, values).fetchall()

    def _now(self) -> int:
        return int(self._clock())

    # Files

    def add_file(self, id: str, tenant: str, filename: str, size: int) -> FileRecord:
        with self.transaction():
            self._db.execute(
                "INSERT INTO files (id, tenant, filename, bytes, created_at) VALUES (?, ?, ?, ?, ?)",
                (id, tenant, filename, size, self._now()),
            )
            return self.file(id, tenant)

    def file(self, id: str, tenant: str) -> FileRecord:
        """Raises `UnknownFile`, also for another's."""
        found = self._all(f"SELECT {_FILE} FROM files WHERE id=? AND tenant=?", id, tenant)  # noqa: S608 - columns of ours
        if not found:
            raise UnknownFile(f"there is no file {id!r:.80} of yours")
        return FileRecord(*found[0])

    def files(self, tenant: str, *, after: str | None, limit: int, oldest_first: bool = False) -> list[FileRecord]:
        """Raises `UnknownFile` if there is no `after`."""
        sign, way = (">", "ASC") if oldest_first else ("<", "DESC")
        where, values = "tenant=?", [tenant]
        if after is not None:
            where, values = f"{where} AND number {sign} ?", [*values, self.file(after, tenant).number]  # type: ignore[list-item]
        sql = f"SELECT {_FILE} FROM files WHERE {where} ORDER BY number {way} LIMIT ?"  # noqa: S608 - all parts are ours
        return [FileRecord(*row) for row in self._all(sql, *values, limit)]

    def files_taken(self, tenant: str) -> tuple[int, int]:
        """How many a tenant has, and their bytes."""
        count, size = self._all("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE tenant=?", tenant)[0]
        return int(count), int(size)

    def remove_file(self, id: str, tenant: str) -> None:
        with self.transaction():
            self.file(id, tenant)
            self._db.execute("DELETE FROM files WHERE id=?", (id,))

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._all("SELECT id FROM files")}

    def forget_files(self, ids: Collection[str]) -> None:
        with self.transaction():
            self._db.executemany("DELETE FROM files WHERE id=?", [(id,) for id in ids])

    # Jobs

    def add_job(
        self,
        id: str,
        tenant: str,
        owner: str | None,
        name: str,
        state: JobState,
        asked: dict[str, Any],
        plan: dict[str, Any] | None,
        *,
        key: str | None = None,
        digest: str = "",
    ) -> JobRecord:
        """With a key that was there before: that key's job, and nothing is added. Raises `KeyReused`."""
        with self.transaction():
            if key is not None:
                if (known := self.job_of_key(tenant, key, digest)) is not None:
                    return known
                self._db.execute("INSERT INTO keys (tenant, key, digest, job) VALUES (?, ?, ?, ?)", (tenant, key, digest, id))
            self._db.execute(
                "INSERT INTO jobs (id, tenant, owner, state, name, created_at, asked, plan, steps) VALUES (?,?,?,?,?,?,?,?,?)",
                (
                    *(id, tenant, owner, state.value, name, self._now(), json.dumps(asked)),
                    *(None if plan is None else json.dumps(plan), 0 if plan is None else plan["steps"]),
                ),
            )
            self.add_event(id, "created", f"Created fine-tuning job: {id}")
            return self.job(id)

    def job_of_key(self, tenant: str, key: str, digest: str) -> JobRecord | None:
        """Raises `KeyReused`."""
        found = self._all("SELECT digest, job FROM keys WHERE tenant=? AND key=?", tenant, key)
        if not found:
            return None
        if found[0][0] != digest:
            raise KeyReused("this Idempotency-Key stood for another request: take a new one")
        return self.job(found[0][1])

    def job(self, id: str, tenant: str | None = None) -> JobRecord:
        """Raises `UnknownJob`; with a tenant, also for another's."""
        found = self._all(f"SELECT {_JOB} FROM jobs WHERE id=?", id)  # noqa: S608 - columns of ours
        if not found or (tenant is not None and found[0][2] != tenant):
            raise UnknownJob(f"there is no fine-tuning job {id!r:.80} of yours")
        return _job(found[0])

    def jobs_named(self, owner: str | None, *names: str) -> list[JobRecord]:
        """All that give an adapter of this owner one of these names, whatever has become of them."""
        where = f"owner IS ? AND name IN ({', '.join('?' * len(names))})"
        return [_job(row) for row in self._all(f"SELECT {_JOB} FROM jobs WHERE {where}", owner, *names)]  # noqa: S608

    def jobs(self, tenant: str | None, *, after: str | None, limit: int) -> list[JobRecord]:
        """Newest first; of all tenants if None. Raises `UnknownJob` if there is no `after`."""
        where, values = ("1", []) if tenant is None else ("tenant=?", [tenant])
        if after is not None:
            where, values = f"{where} AND number < ?", [*values, self.job(after, tenant).number]  # type: ignore[list-item]
        sql = f"SELECT {_JOB} FROM jobs WHERE {where} ORDER BY number DESC LIMIT ?"  # noqa: S608 - all parts are ours
        return [_job(row) for row in self._all(sql, *values, limit)]

    def jobs_in(self, *states: JobState) -> list[JobRecord]:
        """Oldest first."""
        marks = ", ".join("?" * len(states))
        sql = f"SELECT {_JOB} FROM jobs WHERE state IN ({marks}) ORDER BY number"  # noqa: S608 - marks only
        return [_job(row) for row in self._all(sql, *(state.value for state in states))]

    def waiting(self) -> list[QueuedJob]:
        """Oldest first."""
        sql = "SELECT id, tenant FROM jobs WHERE state=? ORDER BY number"
        return [QueuedJob(*row) for row in self._all(sql, JobState.QUEUED.value)]

    def count(self, tenant: str | None = None) -> dict[JobState, int]:
        """Jobs by state; of all tenants if None."""
        where, values = ("1", []) if tenant is None else ("tenant=?", [tenant])
        found = dict(self._all(f"SELECT state, COUNT(*) FROM jobs WHERE {where} GROUP BY state", *values))  # noqa: S608
        return {state: found.get(state.value, 0) for state in JobState}

    def count_open(self, tenant: str) -> int:
        """Jobs of a tenant that have not ended."""
        return sum(count for state, count in self.count(tenant).items() if not state.is_end)

    def open_tokens(self, tenant: str) -> int:
        """Of the data of a tenant's jobs that have not ended."""
        open_states = [state.value for state in JobState if not state.is_end]
        where = f"tenant=? AND state IN ({', '.join('?' * len(open_states))})"
        sql = f"SELECT COALESCE(SUM(json_extract(plan, '$.tokens')), 0) FROM jobs WHERE {where}"  # noqa: S608 - marks only
        return int(self._all(sql, tenant, *open_states)[0][0])

    def forget_old(self, tenant: str, jobs: int, steps: int, *, but: Collection[str] = ()) -> None:
        """Of a tenant's jobs that have ended, keep the newest that are so many and have done so many steps together."""
        ended = ", ".join(f"'{state.value}'" for state in JobState if state.is_end)
        sql = f"""SELECT number, id FROM (
            SELECT number, id, COUNT(*) OVER newer AS jobs, SUM(step) OVER newer AS steps FROM jobs
            WHERE tenant=? AND state IN ({ended}) WINDOW newer AS (ORDER BY number DESC)) WHERE jobs > ? OR steps > ?"""  # noqa: S608
        with self.transaction():
            old = [(number,) for number, id in self._all(sql, tenant, jobs, steps) if id not in but]
            self._db.executemany("DELETE FROM events WHERE job=?", old)
            self._db.executemany("DELETE FROM checkpoints WHERE job=?", old)
            self._db.executemany("DELETE FROM keys WHERE job=(SELECT id FROM jobs WHERE number=?)", old)
            self._db.executemany("DELETE FROM jobs WHERE number=?", old)

    def change(self, id: str, change: StateChange, *, epoch: int | None = None, **values: Any) -> JobRecord:
        """Raises `WrongState`, also if the job has been started again since `epoch`; `values` are columns."""
        with self.transaction():
            job = self.job(id)
            state = after(job.state, change)
            if epoch is not None and epoch != job.epoch:
                after(JobState.CANCELLED, change)  # that start is over: nothing more can happen to it
            if change is StateChange.BEGIN:
                values["epoch"] = job.epoch + 1
                values["began_at"] = job.began_at or self._now()
            if state.is_end:
                values["finished_at"] = self._now()
            self.set(id, state=state.value, **values)
            return self.job(id)

    def set(self, id: str, **values: Any) -> None:
        """Columns of a job; dictionaries become JSON."""
        with self.transaction():
            sql = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in values)} WHERE id=?"  # noqa: S608 - columns of ours
            told = [json.dumps(value) if isinstance(value, dict) else value for value in values.values()]
            self._db.execute(sql, (*told, id))

    # Events and checkpoints

    def add_event(
        self,
        job: str,
        kind: str,
        message: str,
        *,
        level: str = "info",
        step: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        with self.transaction():
            self._db.execute(
                "INSERT INTO events (job, created_at, level, kind, message, step, data) "
                "SELECT number, ?, ?, ?, ?, ?, ? FROM jobs WHERE id=?",
                (self._now(), level, kind, message, step, json.dumps(data or {}), job),
            )

    def forget_after(self, job: JobRecord, step: int) -> None:
        """Steps that will be done again."""
        with self.transaction():
            self._db.execute("DELETE FROM events WHERE job=? AND step > ?", (job.number, step))
            self._db.execute("DELETE FROM checkpoints WHERE job=? AND step > ?", (job.number, step))
            tokens = self._all(
                "SELECT COALESCE(SUM(json_extract(data, '$.tokens')), 0) FROM events WHERE job=? AND kind='metrics'", job.number
            )
            self.set(job.id, step=step, tokens=int(tokens[0][0]))

    def events(self, job: JobRecord, *, after: int | None, limit: int) -> list[EventRecord]:
        """Newest first."""
        sql = f"SELECT {_EVENT} FROM events WHERE job=? AND number < ? ORDER BY number DESC LIMIT ?"  # noqa: S608 - columns of ours
        return [_event(row) for row in self._all(sql, job.number, _bound(after), limit)]

    def add_checkpoint(
        self, job: JobRecord, step: int, folder: str, hash: str | None, serves: str | None, metrics: dict[str, Any]
    ) -> bool:
        """False if it was there: what was not known of it is added."""
        with self.transaction():
            known = self._all("SELECT 1 FROM checkpoints WHERE job=? AND step=?", job.number, step)
            self._db.execute(
                "INSERT INTO checkpoints (job, step, folder, hash, serves, metrics, created_at) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (job, step) DO UPDATE SET folder=excluded.folder, hash=COALESCE(excluded.hash, hash), "
                "serves=COALESCE(excluded.serves, serves)",
                (job.number, step, folder, hash, serves, json.dumps(metrics), self._now()),
            )
            return not known

    def set_served(self, job: JobRecord, step: int, name: str) -> None:
        with self.transaction():
            self._db.execute("UPDATE checkpoints SET serves=? WHERE job=? AND step=?", (name, job.number, step))

    def forget_served(self, job: JobRecord, *, before: int | None = None) -> None:
        """Nobody gets checkpoints before this step any more; None: any."""
        with self.transaction():
            self._db.execute("UPDATE checkpoints SET serves=NULL WHERE job=? AND step < ?", (job.number, _bound(before)))

    def drop_folders(self, job: JobRecord, *, before: int) -> list[str]:
        """Of checkpoints before a step: they are forgotten here, and to be removed."""
        with self.transaction():
            where = "job=? AND step < ? AND folder IS NOT NULL"
            found = [row[0] for row in self._all(f"SELECT folder FROM checkpoints WHERE {where}", job.number, before)]  # noqa: S608
            self._db.execute(f"UPDATE checkpoints SET folder=NULL WHERE {where}", (job.number, before))  # noqa: S608
            return found

    def checkpoints(self, job: JobRecord, *, after: int | None, limit: int) -> list[CheckpointRecord]:
        """Newest first."""
        sql = f"SELECT {_CHECKPOINT} FROM checkpoints WHERE job=? AND number < ? ORDER BY number DESC LIMIT ?"  # noqa: S608
        return [_checkpoint(row) for row in self._all(sql, job.number, _bound(after), limit)]

    def last_checkpoint(self, job: JobRecord) -> CheckpointRecord | None:
        """The one to go on from."""
        sql = f"SELECT {_CHECKPOINT} FROM checkpoints WHERE job=? AND folder IS NOT NULL ORDER BY step DESC LIMIT 1"  # noqa: S608
        found = self._all(sql, job.number)
        return _checkpoint(found[0]) if found else None


def _bound(number: int | None) -> int:
    return (1 << 62) if number is None else number


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):  # all kinds of them
            raise StorageFull("the server's disk is full: nothing was changed. Try again later, or tell the provider") from None
        raise
