"""A plain model and a connected one, built alike and run alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

import symbiosis

LINKS = ["inproc", "shm", "tcp"]
LISTEN = {"shm": "shm://", "tcp": "tcp://127.0.0.1:0"}


@contextmanager
def connected(plain: PreTrainedModel, link: str, **options: object) -> Iterator[PreTrainedModel]:
    """`plain` behind an executor, over a link."""
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
