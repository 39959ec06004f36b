"""A plain model and a connected one, built alike and run alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed import HashStore
from transformers import PreTrainedModel

import symbiosis
from symbiosis.distributed.mesh import ShardMesh

LINKS = ["inproc", "shm", "tcp"]


def slow_but_every_third(cases: Sequence[Any]) -> list[Any]:
    """Cases with a name, of which the others are slow."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if at % 3 else []) for at, case in enumerate(cases)]


def on_links(cases: Sequence[Any], often: Collection[str]) -> list[Any]:
    """Cases with a name: all of them within a process, those named `often` over every link. The others are slow."""

    def marks(case: Any, link: str) -> list[Any]:
        return [] if link == "inproc" or case.name in often else [pytest.mark.slow]

    pairs = [(case, link) for case in cases for link in LINKS]
    return [pytest.param(case, link, id=f"{case.name}-{link}", marks=marks(case, link)) for case, link in pairs]


LISTEN = {"shm": "shm://", "tcp": "tcp://127.0.0.1:0"}


@contextmanager
def sharded(plain: PreTrainedModel, shards: int, **options: object) -> Iterator[list[symbiosis.Executor]]:
    """Executors of `plain`, one for each shard. Their processes are threads here."""
    store, cpu = HashStore(), torch.device("cpu")
    copies = [copy.deepcopy(plain) for _ in range(shards)]

    def start(rank: int) -> symbiosis.Executor:
        return symbiosis.Executor(copies[rank], shards=ShardMesh(rank, shards, store, cpu), **options)

    with ThreadPoolExecutor(shards) as threads:
        executors = list(threads.map(start, range(shards)))
    try:
        yield executors
    finally:
        with ThreadPoolExecutor(shards) as threads:
            list(threads.map(symbiosis.Executor.close, executors))


@contextmanager
def connected(plain: PreTrainedModel, link: str, shards: int = 1, **options: object) -> Iterator[PreTrainedModel]:
    """`plain` behind an executor, over a link; with shards, behind the last one."""
    if shards > 1:
        with sharded(plain, shards, **options) as executors:
            model = symbiosis.connect(executors[-1] if link == "inproc" else executors[-1].listen(LISTEN[link]))
            yield model
            model.symbiosis.close()
        return
    with symbiosis.Executor(plain, **options) as executor:
        model = symbiosis.connect(executor if link == "inproc" else executor.listen(LISTEN[link]))
        yield model
        model.symbiosis.close()


def adapted(model: PreTrainedModel, config: Callable[[], PeftConfig]) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model, config())


def trainable(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(3)  # some methods sample in their forward
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}


def train(model: torch.nn.Module, batches: Iterator[dict[str, Tensor]]) -> None:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(list(trainable(model).values()), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def assert_same_gradients(plain: dict[str, Tensor], shared: dict[str, Tensor], relative: float = 1e-5) -> None:
    assert plain.keys() == shared.keys()
    assert plain
    for name, expected in plain.items():
        error = (shared[name] - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error <= relative, f"{name}: relative error {error:.1e}"


def assert_same_training(plain: PeftModel, shared: PeftModel, batch: Callable[..., dict[str, Tensor]]) -> None:
    """The same gradients at the start, and the same adapters after 20 steps of AdamW."""
    assert_same_gradients(gradients(plain, batch()), gradients(shared, batch()))
    for model in (plain, shared):
        train(model, (batch(seed=step) for step in range(20)))
    expected, found = trainable(plain), trainable(shared)
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def twin(plain: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(plain)
