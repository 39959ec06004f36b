"""Shared fixtures: a tiny random model, private folders, and an executor behind every kind of link."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.app import executor as launch
from symbiosis.kernels.cpu import library
from symbiosis.transport.base import Link
from symbiosis.transport.shm import ShmLink
from symbiosis.transport.tcp import TcpLink
from symbiosis.types import Limits

LINKS = ["inproc", "shm", "tcp", "tcp-token"]
TOKENS = {"ann": "a secret of ann's", "bob": "a secret of bob's"}


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})


@pytest.fixture(scope="session", autouse=True)
def own_folders() -> Iterator[None]:
    """No test reads or writes the user's folders."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="sy-")  # short: socket paths are limited
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYMBIOSIS_CACHE", f"{folder}/cache")
        patch.setenv("XDG_RUNTIME_DIR", f"{folder}/run")
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def real_cache(own_folders: None) -> Iterator[None]:
    """The user's own cache, which holds the real default model between runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SYMBIOSIS_CACHE")
        yield


@pytest.fixture(params=["compiled", "plain"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled CPU kernels, and without."""
    if request.param == "plain":
        monkeypatch.setattr(library, "_library", lambda: None)
    elif not library.is_compiled():
        pytest.skip("the package was installed without a compiler")
    return str(request.param)


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    """The plain model of all comparisons. Never train it."""
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))


@dataclass
class Served:
    """An executor that serves over one kind of link."""

    kind: str
    executor: symbiosis.Executor
    address: str | symbiosis.Executor
    tokens: dict[str, str]
    _open: list[Any] = field(default_factory=list)

    def connect(self, name: str = "ann", **options: Any) -> Any:
        """A connected model of the tenant `name`."""
        model = symbiosis.connect(self.address, name=name, token=self.tokens.get(name), **options)
        self._open.append(model.symbiosis)
        return model

    def raw(self, name: str = "ann", grace_s: float = 20.0) -> Link:
        """A bare link, for messages that no client sends."""
        hello = {"name": name}
        link: Link
        if isinstance(self.address, symbiosis.Executor):
            link = self.address.link(hello)
        else:
            kind = ShmLink if self.address.startswith("shm") else TcpLink
            link = kind(self.address, token=self.tokens.get(name), hello=hello, grace_s=grace_s)
        self._open.append(link)
        return link

    def close(self) -> None:
        for each in self._open:
            each.close()
        self.executor.close()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start executors: `serve("tcp", limits={...}, policy="none")`."""
    started: list[Served] = []

    def start(kind: str, *, model: Any = None, limits: dict[str, int] | None = None, **options: Any) -> Served:
        if limits:
            monkeypatch.setattr(launch, "Limits", lambda **given: Limits(**{**given, **limits}))
        tokens = TOKENS if kind.endswith("token") else {}
        executor = symbiosis.Executor(tiny if model is None else model, tokens=tokens, **options)
        address = {
            "inproc": lambda: executor,
            "shm": lambda: executor.listen("shm://"),
            "tcp": lambda: executor.listen("tcp://127.0.0.1:0"),
            "tcp-token": lambda: executor.listen("tcp://127.0.0.1:0"),
        }[kind]()
        started.append(Served(kind, executor, address, tokens))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, serve: Serve) -> Served:
    """An executor with the tiny model behind each kind of link."""
    return serve(request.param)
