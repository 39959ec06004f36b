"""Where training and serving meet: jobs are ordered over the engine's line, and what they train is served from memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from symbiosis.adapters.parts import Adapter
from symbiosis.errors import BadAdapter, BadMessage, Closed, SymbiosisError
from symbiosis.finetuning.loop import events
from symbiosis.finetuning.loop.job_runner import JobRunner, JobSpec
from symbiosis.finetuning.loop.recipe import Recipe
from symbiosis.finetuning.trainer import Trainer
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_messages import JobEvent, Rejected, Result, int_field, text_field
from symbiosis.serving.ipc_server import IpcServer

_MAX_PATH = 4096
_MAX_COUNT = (1 << 31) - 1
_RECIPE = {each.name for each in fields(Recipe)}
_ORDER = {each.name for each in fields(JobSpec)} | {"op"}
_log = logging.getLogger("symbiosis")


class TrainingService:
    """A room of the window. Jobs of a peer that is gone are ended; nothing of them is remembered here."""

    operations = ("train", "stop_training", "check_adapter")

    def __init__(self, window: IpcServer, core: EngineCore, host: Trainer) -> None:
        self._window, self._core, self._host = window, core, host
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="symbiosis-checks")
        self.jobs = JobRunner(host, self._say, self._serve)
        window.engine_loop.extra_stats = self._figures
        window.add_handler(self)

    def handle(self, ticket: str, body: Mapping[str, Any]) -> None:
        if body.get("op") == "stop_training":
            (self.jobs.abandon if body.get("at_once") is True else self.jobs.stop)(ticket)
        elif body.get("op") == "check_adapter":
            adapter = _adapter(body.get("adapter"))
            try:
                self._checks.submit(self._check, ticket, adapter)
            except RuntimeError:
                raise Closed("this server is ending") from None
        else:
            try:
                order = _order(ticket, body)
            except (TypeError, ValueError, OverflowError) as error:
                raise BadMessage(f"train: {type(error).__name__}: {error!s:.200}") from None
            self.jobs.train(order)

    def drop_peer(self, peer: str) -> None:
        for id in self.jobs.ids():
            if id.startswith(f"{peer}:"):
                self.jobs.abandon(id)

    def close(self) -> None:
        self._checks.shutdown(wait=False, cancel_futures=True)
        self.jobs.close()
        self._host.close()

    def _check(self, ticket: str, adapter: dict[str, Any]) -> None:
        """On a thread of its own: what a config names is looked for in the whole model."""
        try:
            self._host.check(adapter)
            self._window.publish([Result(ticket, {})])
        except SymbiosisError as error:
            self._window.publish([Rejected(ticket, error)])
        except Exception:  # noqa: BLE001 - PEFT may raise anything, and who asked waits
            _log.exception("an adapter could not be checked")
            self._window.publish(
                [Rejected(ticket, BadAdapter("this adapter cannot be trained here: the server's log says why"))]
            )

    def _serve(self, name: str, adapter: Adapter, folder: Path) -> int:
        """On a job's thread; only the name is changed by the stepping one."""
        prepared = self._core.prepare_held(adapter, folder)
        return self._window.engine_loop.serve(name, prepared).result().generation

    def _say(self, id: str, event: events.Event) -> None:
        if isinstance(event, events.JobRejected):
            self._window.publish([Rejected(id, event.error)])
        else:
            self._window.publish([JobEvent(id, {"training": events.written(event)})])

    def _figures(self) -> dict[str, Any]:
        passes, jobs = asdict(self._host.stats), asdict(self.jobs.stats)
        return {"training": {"passes": passes, "jobs": jobs, "beside": self._host.beside()}}


class NoTrainingService:
    """The room where nothing is trained: says why."""

    operations = TrainingService.operations

    def __init__(self, window: IpcServer, why: SymbiosisError) -> None:
        self._why = why
        window.add_handler(self)

    def handle(self, ticket: str, body: Mapping[str, Any]) -> None:
        if body.get("op") != "stop_training":
            raise self._why

    def drop_peer(self, peer: str) -> None:
        """Nothing of anybody's is here."""

    def close(self) -> None:
        """As above."""


def _order(ticket: str, raw: Mapping[str, Any]) -> JobSpec:
    """Raises `BadMessage` or `OutOfRange`."""
    body = dict(raw)
    if body.keys() != _ORDER:
        wrong = sorted(str(key) for key in body.keys() ^ _ORDER)
        raise BadMessage(f"train: {wrong[0]!r:.60} is missing, or not known")
    adapter, recipe = _adapter(body["adapter"]), body["recipe"]
    if not isinstance(recipe, dict) or not recipe.keys() <= _RECIPE:
        raise BadMessage(f"recipe: expected an object with some of {', '.join(sorted(_RECIPE))}")
    weight = body["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise BadMessage("weight: expected a number")
    resume, after = _path_or_none(body, "resume"), _count(body, "after", 0)
    if (resume is None) != (after == 0):
        raise BadMessage("after: expected the steps of the checkpoint to resume, 0 without one")
    every = None if body["evaluate_every"] is None else _count(body, "evaluate_every", 1)
    if type(body["serve_checkpoints"]) is not bool:
        raise BadMessage("serve_checkpoints: expected true or false")
    return JobSpec(
        id=ticket,
        tenant=text_field(body, "tenant"),
        adapter=adapter,
        recipe=Recipe(**recipe),
        seed=int_field(body["seed"], "seed"),
        weight=weight,
        data=_path(body, "data"),
        validation=_path_or_none(body, "validation"),
        evaluate_every=every,
        checkpoints=_path(body, "checkpoints"),
        checkpoint_every=_count(body, "checkpoint_every", 1),
        resume=resume,
        after=after,
        final=_path(body, "final"),
        serve_as=None if body["serve_as"] is None else text_field(body, "serve_as"),
        serve_checkpoints=body["serve_checkpoints"],
    )


def _adapter(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadMessage("adapter: expected an object, a PEFT config")
    return value


def _count(body: dict[str, Any], name: str, least: int) -> int:
    value = int_field(body[name], name)
    if not least <= value <= _MAX_COUNT:
        raise BadMessage(f"{name}: expected {least} to {_MAX_COUNT}")
    return value


def _path(body: dict[str, Any], name: str) -> Path:
    path = Path(text_field(body, name, _MAX_PATH))
    if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise BadMessage(f"{name}: expected a whole path without ..")
    return path


def _path_or_none(body: dict[str, Any], name: str) -> Path | None:
    return None if body[name] is None else _path(body, name)
