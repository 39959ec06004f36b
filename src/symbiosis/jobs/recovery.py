"""Recovery of jobs: after a restart of the server, at the start of each run, and from the checkpoint of a failed run.

Functions raise `StoreUnavailable` where jobs are in a cluster's store.
"""

from __future__ import annotations

import shutil

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk
from symbiosis.jobs.database import CheckpointRecord, Database, JobRecord
from symbiosis.jobs.event_recorder import FinishedAdapters
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.states import JobState, StateChange
from symbiosis.store.artifact_folders import ArtifactFolders


def recover_jobs(db: Database, layout: JobsLayout, store: FinishedAdapters) -> list[JobRecord]:
    """Queue interrupted jobs again and remove what a killed process left. Returns the jobs whose data is to be validated."""
    for job in db.list_jobs_in(JobState.RUNNING):
        with db.transaction():
            db.change_state(job.id, StateChange.INTERRUPT)
            db.add_event(job.id, "message", "The server was restarted: the job is queued again", level="warn")
        store.remove(job.owner, job.name)  # stored, but the job's end was not recorded
    unfinished = db.list_jobs_in(JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED)
    for job in unfinished:
        db.clear_served(job)  # the new engine serves none of its checkpoints
    db.remove_files(db.file_ids() - layout.file_ids())  # content deleted, record left
    layout.remove_unknown(files=db.file_ids(), jobs={job.id for job in unfinished})
    layout.remove_garbage(lambda: {job.id for job in unfinished})
    return [job for job in unfinished if job.state is JobState.VALIDATING]


def begin_run(db: Database, layout: JobsLayout, id: str) -> tuple[JobRecord, CheckpointRecord | None]:
    """Mark a queued job as running. Returns it with the checkpoint to resume from. Raises `WrongState` or `StorageFull`."""
    with db.transaction():
        job = db.change_state(id, StateChange.BEGIN)
        checkpoint = db.last_checkpoint(job)
        if checkpoint is not None and not layout.has_checkpoint(checkpoint.folder or ""):
            checkpoint = None
        db.discard_after_step(job, 0 if checkpoint is None else checkpoint.step)
        resumed = "Fine-tuning job started" if checkpoint is None else f"Fine-tuning job resumed after step {checkpoint.step}"
        if db.list_events(job, after=None, limit=1)[0].message != resumed:  # repeated attempts add one event
            db.add_event(id, "message", resumed)
    return job, checkpoint


def copy_adapter(folders: ArtifactFolders, checkpoint: str, target: str) -> None:
    """Copy PEFT's two files of a checkpoint, without the optimizer state, and sync them. Raises `StorageFull`."""
    draft = folders.draft(target)
    shutil.rmtree(draft, ignore_errors=True)
    with folders.hold(folders.find(checkpoint)) as source, map_os_errors():
        draft.mkdir(mode=0o700)
        for file in (CONFIG, TENSORS):
            shutil.copyfile(source / file, draft / file)
            sync_to_disk(draft / file)
    folders.publish(draft)
