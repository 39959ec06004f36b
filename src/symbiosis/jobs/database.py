"""Files, jobs, events and checkpoints in SQLite (WAL, synchronous=FULL).

Every change is on disk before its method returns. A job's state changes by compare-and-set on its state and epoch.
The epoch is the number of its run: late messages of an earlier run are rejected.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from symbiosis.errors import SymbiosisError
from symbiosis.jobs.errors import KeyReused, StorageFull, UnknownFile, UnknownJob
from symbiosis.jobs.layout import RESULT_PREFIX, result_file_id
from symbiosis.jobs.queue import QueuedJob
from symbiosis.jobs.states import JobState, StateChange, next_state

VERSION = 1
HYPERPARAMETERS = "wishes"  # key of `asked`, fixed by the on-disk format (check_vocabulary)
_MAX_NUMBER = 1 << 62
_NEWEST_FIRST = "job=? AND number < ? ORDER BY number DESC LIMIT ?"
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
    """Owner of the adapter; None: shared by all tenants."""
    state: JobState
    epoch: int
    """Number of runs so far."""
    name: str
    """Name of the adapter."""
    created_at: int
    began_at: int | None
    finished_at: int | None
    asked: dict[str, Any]
    """The request's fields."""
    plan: dict[str, Any] | None
    step: int
    steps: int
    tokens: int
    figures: dict[str, Any]
    """Metrics of the last step."""
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
    """None: removed."""
    hash: str | None
    serves: str | None
    metrics: dict[str, Any]
    created_at: int


Record = TypeVar("Record", FileRecord, JobRecord, EventRecord, CheckpointRecord)
_TABLES: dict[type[Any], str] = {FileRecord: "files", JobRecord: "jobs", EventRecord: "events", CheckpointRecord: "checkpoints"}
_JSON_COLUMNS = ("asked", "plan", "figures", "error", "data", "metrics")


class Database:
    """One per server. Thread-safe. Each method is a transaction, or part of the enclosing one."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises `SymbiosisError` if the database has another schema version."""
        self._clock = clock
        self._lock = threading.RLock()
        self._in_transaction = False
        with _map_sqlite_errors():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA foreign_keys=ON")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
            elif version != VERSION:
                self._db.close()
                raise SymbiosisError(f"{path} was written by another version: schema {version}, expected {VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. Raises `StorageFull`."""
        with self._lock, _map_sqlite_errors():
            if self._in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            self._in_transaction = True
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._in_transaction = False

    def _query(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, _map_sqlite_errors():
            return self._db.execute(sql, values).fetchall()

    def _select(self, kind: type[Record], where: str, *values: Any) -> list[Record]:
        """`where` is built from constants only; everything else is in `values`."""
        names = [field.name for field in fields(kind)]
        rows = self._query(f"SELECT {', '.join(names)} FROM {_TABLES[kind]} WHERE {where}", *values)  # noqa: S608
        return [kind(**{name: _decode(name, value) for name, value in zip(names, row, strict=True)}) for row in rows]

    def _now(self) -> int:
        return int(self._clock())

    # Files

    def add_file(self, id: str, tenant: str, filename: str, size: int) -> FileRecord:
        with self.transaction():
            self._db.execute(
                "INSERT INTO files (id, tenant, filename, bytes, created_at) VALUES (?, ?, ?, ?, ?)",
                (id, tenant, filename, size, self._now()),
            )
            return self.get_file(id, tenant)

    def get_file(self, id: str, tenant: str) -> FileRecord:
        """Raises `UnknownFile`, also for a file of another tenant."""
        found = self._select(FileRecord, "id=? AND tenant=?", id, tenant)
        if not found:
            raise UnknownFile(f"there is no file {id!r:.80} of yours")
        return found[0]

    def list_files(
        self, tenant: str, *, after: str | None, limit: int, oldest_first: bool = False, results: bool | None = None
    ) -> list[FileRecord]:
        """`results`: only result files of jobs, or only uploads. Raises `UnknownFile` if `after` does not exist."""
        sign, direction = (">", "ASC") if oldest_first else ("<", "DESC")
        bound = (0 if oldest_first else _MAX_NUMBER) if after is None else self.get_file(after, tenant).number
        kind = "" if results is None else f"AND id {'' if results else 'NOT'} GLOB '{RESULT_PREFIX}*'"
        where = f"tenant=? AND number {sign} ? {kind} ORDER BY number {direction} LIMIT ?"
        return self._select(FileRecord, where, tenant, bound, limit)

    def find_result_files(self, jobs: Collection[JobRecord]) -> dict[str, str]:
        """Ids of existing result files, by job."""
        ids = {result_file_id(job.id): job.id for job in jobs}
        found = self._query(f"SELECT id FROM files WHERE id IN ({_marks(ids)})", *ids)  # noqa: S608 - marks only
        return {ids[row[0]]: row[0] for row in found}

    def file_usage(self, tenant: str) -> tuple[int, int]:
        """Number of uploaded files and their total bytes."""
        where = f"tenant=? AND id NOT GLOB '{RESULT_PREFIX}*'"
        count, size = self._query(f"SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE {where}", tenant)[0]  # noqa: S608
        return int(count), int(size)

    def remove_file(self, id: str, tenant: str) -> None:
        with self.transaction():
            self.get_file(id, tenant)
            self.remove_files([id])

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._query("SELECT id FROM files")}

    def remove_files(self, ids: Collection[str]) -> None:
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
        """Add a job, or return the one that already has this idempotency key. Raises `KeyReused`."""
        with self.transaction():
            if key is not None:
                if (existing := self.find_job_by_key(tenant, key, digest)) is not None:
                    return existing
                self._db.execute("INSERT INTO keys (tenant, key, digest, job) VALUES (?, ?, ?, ?)", (tenant, key, digest, id))
            encoded, steps = (None, 0) if plan is None else (json.dumps(plan), plan["steps"])
            self._db.execute(
                "INSERT INTO jobs (id, tenant, owner, state, name, created_at, asked, plan, steps) VALUES (?,?,?,?,?,?,?,?,?)",
                (id, tenant, owner, state.value, name, self._now(), json.dumps(asked), encoded, steps),
            )
            self.add_event(id, "created", f"Created fine-tuning job: {id}")
            return self.get_job(id)

    def find_job_by_key(self, tenant: str, key: str, digest: str) -> JobRecord | None:
        """Raises `KeyReused` if the key belongs to a request with another digest."""
        found = self._query("SELECT digest, job FROM keys WHERE tenant=? AND key=?", tenant, key)
        if not found:
            return None
        if found[0][0] != digest:
            raise KeyReused("this Idempotency-Key belongs to a different request: use a new one")
        return self.get_job(found[0][1])

    def get_job(self, id: str, tenant: str | None = None) -> JobRecord:
        """Raises `UnknownJob`, with a `tenant` also for a job of another one."""
        found = self._select(JobRecord, "id=?", id)
        if not found or tenant not in (None, found[0].tenant):
            raise UnknownJob(f"there is no fine-tuning job {id!r:.80} of yours")
        return found[0]

    def list_jobs_named(self, owner: str | None, *names: str) -> list[JobRecord]:
        """Jobs in any state whose adapter belongs to `owner` and has one of these names."""
        return self._select(JobRecord, f"owner IS ? AND name IN ({_marks(names)})", owner, *names)

    def list_jobs(self, tenant: str | None, *, after: str | None, limit: int) -> list[JobRecord]:
        """Newest first; `tenant` None: all tenants. Raises `UnknownJob` if `after` does not exist."""
        bound = _MAX_NUMBER if after is None else self.get_job(after, tenant).number
        where, values = ("1", ()) if tenant is None else ("tenant=?", (tenant,))
        return self._select(JobRecord, f"{where} AND number < ? ORDER BY number DESC LIMIT ?", *values, bound, limit)

    def list_jobs_in(self, *states: JobState) -> list[JobRecord]:
        """Oldest first."""
        return self._select(JobRecord, f"state IN ({_marks(states)}) ORDER BY number", *(state.value for state in states))

    def list_queued(self) -> list[QueuedJob]:
        """Oldest first."""
        sql = "SELECT id, tenant FROM jobs WHERE state=? ORDER BY number"
        return [QueuedJob(*row) for row in self._query(sql, JobState.QUEUED.value)]

    def count_jobs(self) -> list[tuple[str, str, int]]:
        """Tenant, state and number of all jobs."""
        return self._query("SELECT tenant, state, COUNT(*) FROM jobs GROUP BY tenant, state")

    def count_by_state(self, tenant: str) -> dict[JobState, int]:
        found = dict(self._query("SELECT state, COUNT(*) FROM jobs WHERE tenant=? GROUP BY state", tenant))
        return {state: found.get(state.value, 0) for state in JobState}

    def count_open(self, tenant: str) -> int:
        """Jobs of a tenant that have not ended."""
        return sum(count for state, count in self.count_by_state(tenant).items() if not state.is_end)

    def sum_open_tokens(self, tenant: str) -> int:
        """Dataset tokens of a tenant's jobs that have not ended."""
        states = [state.value for state in JobState if not state.is_end]
        where = f"tenant=? AND state IN ({_marks(states)})"
        sql = f"SELECT COALESCE(SUM(json_extract(plan, '$.tokens')), 0) FROM jobs WHERE {where}"  # noqa: S608 - marks only
        return int(self._query(sql, tenant, *states)[0][0])

    def prune_ended(self, tenant: str, max_jobs: int, max_steps: int, *, exclude: Collection[str] = ()) -> list[str]:
        """Remove a tenant's oldest ended jobs, beyond `max_jobs` jobs or `max_steps` steps in total.

        Returns the ids of their result files; the caller removes the contents.
        """
        ended = [state.value for state in JobState if state.is_end]
        sql = f"""SELECT number, id FROM (
            SELECT number, id, COUNT(*) OVER newer AS jobs, SUM(step) OVER newer AS steps FROM jobs
            WHERE tenant=? AND state IN ({_marks(ended)}) WINDOW newer AS (ORDER BY number DESC)) WHERE jobs > ? OR steps > ?"""  # noqa: S608
        with self.transaction():
            found = [each for each in self._query(sql, tenant, *ended, max_jobs, max_steps) if each[1] not in exclude]
            old, results = [(number,) for number, _ in found], [result_file_id(id) for _, id in found]
            self._db.executemany("DELETE FROM events WHERE job=?", old)
            self._db.executemany("DELETE FROM checkpoints WHERE job=?", old)
            self._db.executemany("DELETE FROM keys WHERE job=(SELECT id FROM jobs WHERE number=?)", old)
            self._db.executemany("DELETE FROM jobs WHERE number=?", old)
            self.remove_files(results)
            return results

    def change_state(self, id: str, change: StateChange, *, epoch: int | None = None, **columns: Any) -> JobRecord:
        """Compare-and-set. Raises `WrongState`, also if the job was started again since run `epoch`."""
        with self.transaction():
            job = self.get_job(id)
            state = next_state(job.state, change)
            if epoch is not None and epoch != job.epoch:
                next_state(JobState.CANCELLED, change)  # raises: that run is over
            if change is StateChange.BEGIN:
                columns["epoch"] = job.epoch + 1
                columns["began_at"] = job.began_at or self._now()
            if state.is_end:
                columns["finished_at"] = self._now()
            self.update_job(id, state=state.value, **columns)
            return self.get_job(id)

    def update_job(self, id: str, **columns: Any) -> None:
        """Set columns of a job; dictionaries become JSON."""
        with self.transaction():
            sql = f"UPDATE jobs SET {', '.join(f'{name}=?' for name in columns)} WHERE id=?"  # noqa: S608 - constant names
            values = [json.dumps(value) if isinstance(value, dict) else value for value in columns.values()]
            self._db.execute(sql, (*values, id))

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

    def discard_after_step(self, job: JobRecord, step: int) -> None:
        """Remove events and checkpoints of later steps, which will run again."""
        with self.transaction():
            self._db.execute("DELETE FROM events WHERE job=? AND step > ?", (job.number, step))
            self._db.execute("DELETE FROM checkpoints WHERE job=? AND step > ?", (job.number, step))
            tokens = self._query(
                "SELECT COALESCE(SUM(json_extract(data, '$.tokens')), 0) FROM events WHERE job=? AND kind='metrics'", job.number
            )
            self.update_job(job.id, step=step, tokens=int(tokens[0][0]))

    def list_events(self, job: JobRecord, *, after: int | None, limit: int) -> list[EventRecord]:
        """Newest first."""
        return self._select(EventRecord, _NEWEST_FIRST, job.number, _MAX_NUMBER if after is None else after, limit)

    def list_metrics(self, job: JobRecord) -> list[dict[str, Any]]:
        """Data of the job's metrics events, oldest first."""
        sql = "SELECT data FROM events WHERE job=? AND kind='metrics' ORDER BY number"
        return [json.loads(row[0]) for row in self._query(sql, job.number)]

    def add_checkpoint(
        self, job: JobRecord, step: int, folder: str, hash: str | None, serves: str | None, metrics: dict[str, Any]
    ) -> bool:
        """Add a checkpoint, or fill in what was unknown of an existing one. Returns whether it is new."""
        with self.transaction():
            known = self._query("SELECT 1 FROM checkpoints WHERE job=? AND step=?", job.number, step)
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

    def clear_served(self, job: JobRecord, *, before: int | None = None) -> None:
        """Mark checkpoints before this step, or all, as not served."""
        before = _MAX_NUMBER if before is None else before
        with self.transaction():
            self._db.execute("UPDATE checkpoints SET serves=NULL WHERE job=? AND step < ?", (job.number, before))

    def release_folders(self, job: JobRecord, *, before: int) -> list[str]:
        """Clear the folders of checkpoints before a step. Returns them; the caller removes them."""
        with self.transaction():
            where = "job=? AND step < ? AND folder IS NOT NULL"
            found = [row[0] for row in self._query(f"SELECT folder FROM checkpoints WHERE {where}", job.number, before)]  # noqa: S608
            self._db.execute(f"UPDATE checkpoints SET folder=NULL WHERE {where}", (job.number, before))  # noqa: S608
            return found

    def list_checkpoints(self, job: JobRecord, *, after: int | None, limit: int) -> list[CheckpointRecord]:
        """Newest first."""
        return self._select(CheckpointRecord, _NEWEST_FIRST, job.number, _MAX_NUMBER if after is None else after, limit)

    def last_checkpoint(self, job: JobRecord) -> CheckpointRecord | None:
        """The checkpoint to resume from."""
        found = self._select(CheckpointRecord, "job=? AND folder IS NOT NULL ORDER BY step DESC LIMIT 1", job.number)
        return found[0] if found else None


def _decode(name: str, value: Any) -> Any:
    if name == "state":
        return JobState(value)
    return json.loads(value) if name in _JSON_COLUMNS and value is not None else value


def _marks(values: Collection[Any]) -> str:
    return ", ".join("?" * len(values))


@contextmanager
def _map_sqlite_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):  # extended codes included
            raise StorageFull("the server's disk is full: nothing was changed. Try again later, or tell the provider") from None
        raise
