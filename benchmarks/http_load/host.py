"""What is measured, each in a process of its own: the server (engine and HTTP), and an engine alone with the same model."""

from __future__ import annotations

import inspect
import multiprocessing as mp
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.http_load.engine import EngineAlone
from benchmarks.http_load.vocabulary import save_tokenizer
from benchmarks.http_load.workload import BASE
from benchmarks.shapes import random_model

DEFAULT = "default"
"""The embedded default model instead of a shape with random weights."""
_START_S = 600.0
_CHECK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model and how it is served. The server and the engine alone have the same."""

    model: str
    device: str
    adapters: int = 0
    rank: int = 16
    engine: Mapping[str, int] = field(default_factory=dict)
    """Options of `EngineCore`."""
    http: Mapping[str, Any] = field(default_factory=dict)
    """Options of `HttpHost`; those that it does not have are left out."""


def load(served: Served, folder: Path) -> tuple[Any, Path, dict[str, Path]]:
    """The model, the folder of its tokenizer, and the folders of adapters with random weights."""
    import torch

    from benchmarks.gpu_serving import write_adapters
    from symbiosis.models.default_model import default_model_folder
    from symbiosis.models.fuse_projections import fuse_projections
    from symbiosis.models.loading import load_model_and_tokenizer

    if served.model == DEFAULT:
        tokenizer = default_model_folder()
        model, _ = load_model_and_tokenizer(None, device=torch.device(served.device), dtype=None)
    else:
        model, tokenizer = random_model(served.model, served.device), folder
        save_tokenizer(model.config.vocab_size, folder)
    torch.manual_seed(0)  # the same adapters in both processes
    write_adapters(model, served.adapters, served.rank, folder)
    fuse_projections(model)
    return model, tokenizer, {f"a{number}": folder / f"a{number}" for number in range(served.adapters)}


def serve(served: Served, pipe: Any) -> None:
    """The process of the server."""
    from symbiosis.app.http_host import HttpHost

    with tempfile.TemporaryDirectory() as place:
        model, tokenizer, adapters = load(served, Path(place))
        known = inspect.signature(HttpHost).parameters
        options = {name: value for name, value in served.http.items() if name in known and value is not None}
        with HttpHost(model, BASE, tokenizer, "127.0.0.1:0", adapters=adapters, **options, **served.engine) as host:
            pipe.send({"url": host.url, "tokenizer": str(tokenizer / "tokenizer.json"), **_facts(model)})
            while not pipe.poll(_CHECK_S) or pipe.recv() != "stop":
                host.check()


def compute(served: Served, pipe: Any) -> None:
    """The process of the engine alone."""
    from symbiosis.serving.engine_core import EngineCore

    with tempfile.TemporaryDirectory() as place:
        model, _, adapters = load(served, Path(place))
        core = EngineCore(model, **served.engine)
        for name, folder in adapters.items():
            core.add_adapter(name, folder)
        engine = EngineAlone(core)
        pipe.send(_facts(model))
        while (workload := pipe.recv()) != "stop":
            pipe.send(engine.run(workload))


def _facts(model: Any) -> dict[str, int]:
    return {"vocabulary": model.config.vocab_size}


class HostProcess(AbstractContextManager["HostProcess"]):
    """The process of the server or of the engine alone. It starts at once; `facts` waits until it is ready."""

    def __init__(self, target: Any, served: Served) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(served, theirs))
        self._process.start()
        theirs.close()
        self._facts: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    @property
    def facts(self) -> dict[str, Any]:
        if self._facts is None:
            deadline = time.monotonic() + _START_S
            while not self._pipe.poll(1.0):
                if time.monotonic() > deadline or not self._process.is_alive():
                    raise RuntimeError("a process of the benchmark did not start: see the log above")
            self._facts = self._pipe.recv()
        return self._facts

    def ask(self, message: Any) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.is_alive():
            self._pipe.send("stop")
            self._process.join(60)
        self._process.kill()
        self._process.join()
