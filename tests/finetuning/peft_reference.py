"""PEFT's own losses and gradients, for comparison with a packed pass."""

from __future__ import annotations

import copy

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.batch import PackedExample, SessionSlice


def examples(*lengths: int, vocabulary: int = 96, hidden: int = 1) -> list[Example]:
    random = torch.Generator().manual_seed(sum(lengths))
    found = [tuple(torch.randint(3, vocabulary, (length,), generator=random).tolist()) for length in lengths]
    return [Example(ids, (-100,) * min(hidden, length) + ids[hidden:]) for ids, length in zip(found, lengths, strict=True)]


def slice_of(adapter: TrainedAdapter, data: list[Example], divisor: float = 5.0) -> SessionSlice:
    return SessionSlice(adapter, tuple(PackedExample(example, divisor, f"1/{number}") for number, example in enumerate(data)))


def run_peft(
    plain: PreTrainedModel, config: PeftConfig, data: list[Example], divisor: float = 5.0, seed: int = 7
) -> tuple[PeftModel, list[float], dict[str, Tensor]]:
    """A PEFT model, its losses one by one, and the gradients of their sum."""
    twin = copy.deepcopy(plain)
    set_seed(seed)
    model = get_peft_model(twin, copy.deepcopy(config)).eval()
    model.peft_config["default"].inference_mode = False
    losses = []
    for example in data:
        ids = torch.tensor([example.ids])
        loss = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            labels=torch.tensor([example.labels]),
            num_items_in_batch=divisor,
        ).loss
        loss.backward()
        losses.append(float(loss))
    return model, losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def max_relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert found.keys() == expected.keys()
    assert expected
    return max(float((found[name] - g).norm() / g.norm().clamp(min=1e-9)) for name, g in expected.items())
