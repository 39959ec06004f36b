"""Recovery of jobs: after a restart of the server, at the start of each run, and from the checkpoint of a failed run."""

from __future__ import annotations

import shutil
from pathlib import Path

from symbiosis.adapters.files import CONFIG, TENSORS
from symbiosis.jobs.atomic_files import map_os_errors, sync_to_disk
from symbiosis.jobs.database import CheckpointRecord, Database, JobRecord
from symbiosis.jobs.event_recorder import FinishedAdapters
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.states import JobState, StateChange


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
    return [job for job in unfinished if job.state is JobState.VALIDATING]


def begin_run(db: Database, id: str) -> tuple[JobRecord, CheckpointRecord | None]:
    """Mark a queued job as running. Returns it with the checkpoint to resume from. Raises `WrongState` or `StorageFull`."""
    with db.transaction():
        job = db.change_state(id, StateChange.BEGIN)
        checkpoint = db.last_checkpoint(job)
        if checkpoint is not None and not Path(checkpoint.folder or "").is_dir():
            checkpoint = None
        db.discard_after_step(job, 0 if checkpoint is None else checkpoint.step)
        resumed = "Fine-tuning job started" if checkpoint is None else f"Fine-tuning job resumed after step {checkpoint.step}"
        if db.list_events(job, after=None, limit=1)[0].message != resumed:  # repeated attempts add one event
            db.add_event(id, "message", resumed)
    return job, checkpoint


def make_checkpoint_folder(layout: JobsLayout, job: JobRecord, checkpoint: CheckpointRecord | None) -> None:
    """Make the folder of this run and remove those of earlier runs but the checkpoint's. Raises `StorageFull`."""
    kept = None if checkpoint is None else Path(checkpoint.folder or "").parent
    for folder in layout.job_folder(job.id).glob("try-*"):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
    folder = layout.checkpoint_folder(job.id, job.epoch)
    with map_os_errors():
        folder.mkdir(exist_ok=True)
        sync_to_disk(folder.parent)


def copy_adapter(checkpoint: Path, target: Path) -> None:
    """Copy PEFT's two files of a checkpoint, without the optimizer state, and sync them. Raises `StorageFull`."""
    shutil.rmtree(target, ignore_errors=True)
    with map_os_errors():
        target.mkdir(mode=0o700)
        for file in (CONFIG, TENSORS):
            shutil.copyfile(checkpoint / file, target / file)
            sync_to_disk(target / file)
