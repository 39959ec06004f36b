"""What the first shard tells the others of a training pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from symbiosis.finetuning.adapters.trained_adapter import TrainedAdapter
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.packed.batch import PackedExample, SessionSlice


def encode_pass(slices: Sequence[SessionSlice], numbers: Sequence[int], closed: Sequence[int]) -> bytes:
    """`numbers` of the slices' adapters; those `closed` are not used any more."""
    described = [
        {
            "adapter": number,
            "requires_grad": each.requires_grad,
            "examples": [
                [list(one.example.ids), list(one.example.labels), one.loss_divisor, one.dropout_key] for one in each.examples
            ],
        }
        for each, number in zip(slices, numbers, strict=True)
    ]
    return json.dumps({"slices": described, "closed": list(closed)}).encode()


def decode_pass(content: bytes, adapters: Mapping[int, TrainedAdapter]) -> tuple[list[SessionSlice], list[int]]:
    about: dict[str, Any] = json.loads(content)
    slices = [
        SessionSlice(
            adapters[each["adapter"]],
            tuple(
                PackedExample(Example(tuple(ids), tuple(labels)), divisor, key)
                for ids, labels, divisor, key in each["examples"]
            ),
            each["requires_grad"],
        )
        for each in about["slices"]
    ]
    return slices, about["closed"]


def parameters_of(slices: Sequence[SessionSlice]) -> list[nn.Parameter]:
    """Of all adapters, in one order on every shard."""
    return [parameter for each in slices for parameter in each.adapter.parameters.values()]


def shapes_of(slices: Sequence[SessionSlice]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(parameter.shape), parameter.dtype) for parameter in parameters_of(slices)]


def values_of(slices: Sequence[SessionSlice]) -> list[Tensor]:
    return [parameter.detach() for parameter in parameters_of(slices)]
