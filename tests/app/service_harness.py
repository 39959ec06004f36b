"""An engine with a training service over IPC, and the peer that an HTTP process is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq
from safetensors.torch import save_file

from symbiosis.app.planning.job_memory import JobMemory
from symbiosis.app.training_service import TrainingService
from symbiosis.device_sharing.cpu_time_share import CpuTimeShare
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.trainer import Trainer
from symbiosis.models.loading import shared_copy
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.engine_service import EngineService
from symbiosis.transport.engine_ipc import EngineListener
from symbiosis.transport.shm import runtime_folder
from tests.finetuning.trainer_reference import Task, base
from tests.lora import lora

ENDS = {"trained", "stopped", "failed"}
PLAIN = Task("plain", lora(lora_dropout=0.1), {"max_steps": 12, "gradient_accumulation_steps": 3})


@dataclass
class IpcPeer:
    """The HTTP process's end of the connection."""

    address: str
    received: list[Any] = field(default_factory=list)
    numbers: dict[str, str] = field(default_factory=dict)
    """Ids of requests, which are numbers, by name."""

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.address)

    def send(self, **body: Any) -> None:
        self._socket.send(json.dumps(body).encode())

    def receive(self, seconds: float = 0.05) -> None:
        while self._socket.poll(int(seconds * 1000)):
            self.received += json.loads(self._socket.recv()).get("events", [])
            seconds = 0

    def of(self, id: str) -> list[dict[str, Any]]:
        return [event for event in self.received if isinstance(event, dict) and event["id"] == self.numbers.get(id, id)]

    def events(self, id: str, kind: str) -> list[dict[str, Any]]:
        """A job's events of one kind."""
        return [event["training"][kind] for event in self.of(id) if kind in event.get("training", {})]

    def ends(self, id: str) -> list[str]:
        """The kinds of a job's final events."""
        return [kind for event in self.of(id) for kind in event.get("training", {}) if kind in ENDS]

    def tokens(self, id: str) -> list[int]:
        return [event[2] for event in self.received if isinstance(event, list) and event[0] == self.numbers[id]]

    def wait(self, *ids: str, seconds: float = 60) -> None:
        """Until each has ended."""
        self.wait_for(lambda: all(any(_is_end(event) for event in self.of(id)) for id in ids), seconds)

    def wait_for(self, over: Any, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not over():
            assert time.monotonic() < until, self.received[-20:]
            self.receive()

    def generate(self, id: str, prompt: list[int], adapter: str | None = None, tenant: str = "", count: int = 8) -> list[int]:
        """Greedy tokens."""
        self.submit(id, prompt, adapter, tenant, count)
        self.wait(id)
        return self.tokens(id)

    def submit(self, id: str, prompt: list[int], adapter: str | None = None, tenant: str = "", count: int = 8) -> None:
        # with logprobs, tokens are events; without, they are frames of another socket
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
        self.numbers[id] = str(len(self.numbers))
        self.send(op="submit", id=self.numbers[id], prompt=prompt, sampling=sampling, adapter=adapter, tenant=tenant)

    def stats(self) -> dict[str, Any]:
        id = f"stats-{len(self.received)}"
        self.send(op="stats", id=id)
        self.wait(id)
        return self.of(id)[0]["settled"]

    def close(self) -> None:
        self._context.destroy(linger=0)


def _is_end(event: dict[str, Any]) -> bool:
    return bool({"refused", "end", "settled"} & event.keys() or ENDS & event.get("training", {}).keys())


@dataclass
class RunningService:
    engine: EngineService
    service: TrainingService
    core: EngineCore
    trainer: Trainer
    peer: IpcPeer


@contextmanager
def run_service(**settings: Any) -> Iterator[RunningService]:
    """The engine and the trainer over the same weights."""
    model, device_share = shared_copy(base()), CpuTimeShare(settings.pop("share", 0.1))
    trainer = Trainer(shared_copy(model), TrainerConfig(**settings), device_share)
    core = EngineCore(model, device_share=device_share)
    engine = EngineService(core, EngineListener(runtime_folder()))
    service = TrainingService(engine, core, trainer, JobMemory(model))
    peer = IpcPeer(engine.address.messages)
    try:
        yield RunningService(engine, service, core, trainer, peer)
    finally:
        peer.close()
        engine.rpc.close()


def write_dataset(path: Path, examples: list[Example]) -> Path:
    ids, labels = ([token for example in examples for token in getattr(example, name)] for name in ("ids", "labels"))
    ends = torch.tensor([len(example.ids) for example in examples]).cumsum(0)
    save_file({"ids": torch.tensor(ids, dtype=torch.int32), "labels": torch.tensor(labels), "ends": ends}, path)
    return path


def train_message(task: Task, root: Path, id: str, **changes: Any) -> dict[str, Any]:
    """As an HTTP process sends it."""
    folder = root / id
    folder.mkdir(parents=True, exist_ok=True)
    adapter = {key: sorted(v) if isinstance(v, set) else v for key, v in task.adapter.to_dict().items()}
    return {
        "op": "train",
        "id": id,
        "tenant": task.name,
        "adapter": adapter,
        "recipe": {**task.settings(), **changes.pop("recipe", {})},
        "seed": task.settings()["seed"],
        "weight": 1.0,
        "data": str(write_dataset(folder / "data.safetensors", task.data())),
        "validation": None,
        "evaluate_every": None,
        "checkpoints": str(folder / "checkpoints"),
        "checkpoint_every": 20,
        "resume": None,
        "after": 0,
        "final": str(folder / "final"),
        "serve_as": f"{task.name}:mine",
        "serve_checkpoints": False,
        **changes,
    }
