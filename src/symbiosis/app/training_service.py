"""The engine process's RPC handler for training jobs. Trained adapters are served from memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from symbiosis.adapters.parts import Adapter
from symbiosis.app.planning.job_memory import JobMemory
from symbiosis.errors import BadAdapter, BadMessage, Closed, SymbiosisError
from symbiosis.finetuning.loop import events
from symbiosis.finetuning.loop.job_runner import JobRunner, JobSpec
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.trainer import Trainer
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_messages import JobEvent, Rejected, Result, int_field, text_field
from symbiosis.serving.engine_service import EngineService
from symbiosis.serving.rpc_server import RpcServer
from symbiosis.store.artifact_folders import ArtifactFolders

_MAX_PATH = 4096
_MAX_COUNT = (1 << 31) - 1
_RECIPE_FIELDS = {each.name for each in fields(Recipe)}
_TRAIN_FIELDS = {each.name for each in fields(JobSpec)} | {"op"}
_log = logging.getLogger("symbiosis")


class TrainingService:
    """Aborts the jobs of a peer that disconnects. Nothing of a job is stored here."""

    operations = ("train", "stop_training", "check_adapter", "check_job")

    def __init__(self, engine: EngineService, core: EngineCore, trainer: Trainer, memory: JobMemory) -> None:
        self._engine, self._core, self._trainer, self._memory = engine, core, trainer, memory
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-checks")
        self.jobs = JobRunner(trainer, self._send_event, self._serve, core.folders)
        engine.rpc.add_handler(self)

    def handle(self, ticket: str, body: dict[str, Any]) -> None:
        if body.get("op") == "stop_training":
            (self.jobs.abort if body.get("at_once") is True else self.jobs.stop)(ticket)
        elif body.get("op") in ("check_adapter", "check_job"):
            adapter, length = _parse_adapter(body.get("adapter")), None
            if body.get("op") == "check_job":
                length = _parse_count(body, "length", 1)
            try:
                self._checks.submit(self._check_adapter, ticket, adapter, length)
            except RuntimeError:
                raise Closed("this server is shutting down") from None
        else:
            try:
                spec = _parse_spec(ticket, body, self._core.folders)
            except (TypeError, ValueError, OverflowError) as error:
                raise BadMessage(f"train: {type(error).__name__}: {error!s:.200}") from None
            self.jobs.train(spec)

    def drop_peer(self, peer: str) -> None:
        for id in self.jobs.ids():
            if id.startswith(f"{peer}:"):
                self.jobs.abort(id)

    def close(self) -> None:
        self._checks.shutdown(wait=False, cancel_futures=True)
        self.jobs.close()
        self._trainer.close()

    def _check_adapter(self, ticket: str, adapter: dict[str, Any], length: int | None) -> None:
        """On a thread of its own: the check searches the whole model. `length`: of the longest example, if it is known."""
        try:
            exact = self._trainer.check(adapter)
            if length is not None:
                self._memory.check(exact, length)
            self._engine.rpc.publish([Result(ticket, {})])
        except SymbiosisError as error:
            self._engine.rpc.publish([Rejected(ticket, error)])
        except Exception:  # noqa: BLE001 - PEFT may raise anything, and the peer waits for a reply
            _log.exception("an adapter could not be checked")
            self._engine.rpc.publish(
                [Rejected(ticket, BadAdapter("this adapter cannot be trained: the server's log has the reason"))]
            )

    def _serve(self, name: str, adapter: Adapter, folder: Path) -> int:
        """On a job's thread; the engine's thread only changes the name."""
        prepared = self._core.prepare_held(adapter, folder)
        return self._engine.engine_loop.serve(name, prepared).result().generation

    def _send_event(self, id: str, event: events.Event) -> None:
        if isinstance(event, events.JobRejected):
            self._engine.rpc.publish([Rejected(id, event.error)])
        else:
            self._engine.rpc.publish([JobEvent(id, {"training": events.to_message(event)})])

    def stats(self) -> dict[str, Any]:
        """Totals of passes and jobs since the start. Callable from any thread."""
        passes, jobs = asdict(self._trainer.stats), asdict(self.jobs.stats)
        return {"passes": passes, "jobs": jobs, "sharing": self._trainer.sharing_stats()}

    def tensors(self) -> list[Tensor]:
        """What training holds besides the base weights. Callable from any thread."""
        return self._trainer.tensors()


class NoTrainingService:
    """Rejects every job with the reason why this model cannot be trained."""

    operations = TrainingService.operations

    def __init__(self, rpc: RpcServer, reason: SymbiosisError) -> None:
        self._reason = reason
        rpc.add_handler(self)

    def handle(self, ticket: str, body: dict[str, Any]) -> None:
        if body.get("op") != "stop_training":
            raise self._reason

    def drop_peer(self, peer: str) -> None:
        """There are no jobs."""

    def close(self) -> None:
        """There are no jobs."""


def _parse_spec(ticket: str, body: dict[str, Any], folders: ArtifactFolders) -> JobSpec:
    """Raises `BadMessage`, `OutOfRange` or `BadArtifact`."""
    if body.keys() != _TRAIN_FIELDS:
        wrong = min(str(key) for key in body.keys() ^ _TRAIN_FIELDS)
        raise BadMessage(f"train: {wrong!r:.60} is missing, or unknown")
    adapter, recipe = _parse_adapter(body["adapter"]), body["recipe"]
    if not isinstance(recipe, dict) or not recipe.keys() <= _RECIPE_FIELDS:
        raise BadMessage(f"recipe: expected an object with some of {', '.join(sorted(_RECIPE_FIELDS))}")
    weight = body["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise BadMessage("weight: expected a number")
    resume, after = _parse_optional_path(body, "resume", folders.find), _parse_count(body, "after", 0)
    if (resume is None) != (after == 0):
        raise BadMessage("after: expected the steps of the checkpoint to resume, 0 without one")
    if type(body["serve_checkpoints"]) is not bool:
        raise BadMessage("serve_checkpoints: expected true or false")
    return JobSpec(
        id=ticket,
        tenant=text_field(body, "tenant"),
        adapter=adapter,
        recipe=Recipe(**recipe),
        seed=int_field(body["seed"], "seed"),
        weight=weight,
        data=_parse_path(body, "data", folders.find),
        validation=_parse_optional_path(body, "validation", folders.find),
        evaluate_every=None if body["evaluate_every"] is None else _parse_count(body, "evaluate_every", 1),
        checkpoints=_parse_path(body, "checkpoints", folders.draft),
        checkpoint_every=_parse_count(body, "checkpoint_every", 1),
        resume=resume,
        after=after,
        final=_parse_path(body, "final", folders.draft),
        serve_as=None if body["serve_as"] is None else text_field(body, "serve_as"),
        serve_checkpoints=body["serve_checkpoints"],
    )


def _parse_adapter(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadMessage("adapter: expected an object, a PEFT config")
    return value


def _parse_count(body: dict[str, Any], name: str, least: int) -> int:
    value = int_field(body[name], name)
    if not least <= value <= _MAX_COUNT:
        raise BadMessage(f"{name}: expected {least} to {_MAX_COUNT}")
    return value


def _parse_path(body: dict[str, Any], name: str, find: Callable[[str], Path]) -> Path:
    path = find(text_field(body, name, _MAX_PATH))
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise BadMessage(f"{name}: expected an absolute path without ..")
    return path


def _parse_optional_path(body: dict[str, Any], name: str, find: Callable[[str], Path]) -> Path | None:
    return None if body[name] is None else _parse_path(body, name, find)
