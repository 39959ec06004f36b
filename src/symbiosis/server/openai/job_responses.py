"""Files, jobs, events and checkpoints in OpenAI's format, with extensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from symbiosis.jobs.database import HYPERPARAMETERS, CheckpointRecord, EventRecord, FileRecord, JobRecord
from symbiosis.jobs.layout import RESULT_PREFIX
from symbiosis.jobs.states import JobState

Body = dict[str, Any]
PURPOSE = "fine-tune"
RESULTS_PURPOSE = "fine-tune-results"


def file_body(file: FileRecord) -> Body:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": RESULTS_PURPOSE if file.id.startswith(RESULT_PREFIX) else PURPOSE,
        "status": "processed",
        "status_details": None,
        "expires_at": None,
    }


def job_body(job: JobRecord, base: str, position: int | None, result_file: str | None = None) -> Body:
    """`position`: in the queue; None if the job is not queued."""
    given = {name: value for name, value in job.asked[HYPERPARAMETERS].items() if value is not None}
    hyperparameters = dict(given if job.plan is None else job.plan["shown"])
    if "n_epochs" in hyperparameters:
        hyperparameters["n_epochs"] = math.ceil(hyperparameters["n_epochs"])  # clients expect an integer; n_steps is exact
    finish = job.figures.get("finish_at") if job.state is JobState.RUNNING else None
    openai_names = ("n_epochs", "batch_size", "learning_rate_multiplier")
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "model": base,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "fine_tuned_model": job.name if job.state is JobState.SUCCEEDED else None,
        "organization_id": job.tenant,
        "result_files": [] if result_file is None else [result_file],
        "status": job.state.value,
        "validation_file": job.asked["validation_file"],
        "training_file": job.asked["training_file"],
        "hyperparameters": {name: hyperparameters.get(name, "auto") for name in openai_names},
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "trained_tokens": job.tokens if job.state.is_end else None,
        "error": job.error,
        "user_provided_suffix": job.asked["suffix"],
        "seed": job.asked["seed"],
        "metadata": job.asked["metadata"],
        "estimated_finish": finish,
        "integrations": [],
        "queue_position": position,
        "progress": {
            "step": job.step,
            "total_steps": job.steps,
            "tokens": job.tokens,
            **{key: value for key, value in job.figures.items() if key != "finish_at"},
            "began_at": job.began_at,
        },
        "will_be_named": job.name,
        "content_hash": job.hash,
    }


def event_body(event: EventRecord) -> Body:
    return {
        "id": f"ftevent-{event.number}",
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "metrics" if event.kind == "metrics" else "message",
        "data": event.data,
    }


def checkpoint_body(checkpoint: CheckpointRecord, job: JobRecord) -> Body:
    return {
        "id": f"ftckpt-{checkpoint.number}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": checkpoint.created_at,
        "fine_tuned_model_checkpoint": checkpoint.serves,
        "fine_tuning_job_id": job.id,
        "step_number": checkpoint.step,
        "metrics": checkpoint.metrics,
        "content_hash": checkpoint.hash,
    }


def list_body(bodies: Sequence[Body], limit: int) -> Body:
    """The caller queries one more than `limit`, which decides `has_more`."""
    data = list(bodies[:limit])
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(bodies) > limit, **ends}
