"""A deferred tensor is a tensor to every function and mode of torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from symbiosis.split.client.deferred.tensor import DeferredTensor


class Two(NamedTuple):
    one: Tensor
    other: Tensor


class Several(list[Tensor]):
    pass


class Adds:
    """Defines its own addition."""

    def __radd__(self, other: Tensor) -> Tensor:
        return other * 3


class FunctionRecorder(TorchFunctionMode):
    """Records the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def without_functions(look: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same with `__torch_function__` disabled."""

    def read(deferred: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return look(deferred)

    return read


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p + p,
        lambda p: p + 1.0,
        lambda p: 1.0 + p,
        lambda p: torch.ones(3, 32) + p,
        lambda p: p + torch.ones(3, 32, dtype=torch.float64),
        lambda p: p + Adds(),
        lambda p: 2.0 - p,
        lambda p: p + torch.ones(32),
        lambda p: torch.add(p, p, alpha=2),
        lambda p: torch.cat([p, p * 2]),
        lambda p: torch.stack((p, torch.zeros_like(p))),
        lambda p: torch.add(p, 1.0, out=torch.empty(3, 32)),
        lambda p: p.clone().add_(p),
        lambda p: p.add_(p),
        lambda p: p.to(torch.float64),
        lambda p: p.to(dtype=torch.float16, copy=True),
        lambda p: p.to("cpu", torch.float64),
        lambda p: p.to(torch.float64, True),
        lambda p: p + torch.ones(3, 32).to_sparse(),
        without_functions(lambda p: torch.from_numpy((p + torch.ones(3, 32)).numpy())),
        lambda p: p.to(torch.ones(2, dtype=torch.float64)),
        lambda p: p.T.contiguous(),
        lambda p: p[1:, ::2],
        lambda p: torch.tensor(p.tolist()),
        lambda p: torch.from_numpy(p.numpy().copy()),
        torch.from_dlpack,
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: torch.where(p > 0, p, -p),
        lambda p: torch.nn.functional.dropout(p, 0.5, training=False),
        torch.vmap(lambda row: row * 2),
        lambda p: torch.vmap(lambda row: p + row)(torch.ones(4, 3, 32)),
        lambda p: torch.func.grad(lambda y: (p * y).sum())(torch.ones(3, 32)),
        lambda p: torch.stack(Two(p, p)),
        lambda p: torch.cat(Several([p, p])),
        lambda p: torch.full((2,), float(torch.is_floating_point(input=p))),
        torch.ops.aten.relu,
        lambda p: torch.stack(list(p)),
    ],
)
def test_a_deferred_tensor_is_a_tensor_to_all_functions(decoding, look):
    x = torch.randn(3, 32)
    expected, found = (each.model.layers[0].self_attn.o_proj(x) for each in decoding)
    assert isinstance(found, DeferredTensor)
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype, found.device, found.dim(), len(found)) == (expected.shape, x.dtype, x.device, 2, 3)
    result = look(found)
    assert isinstance(result, Tensor)
    assert torch.equal(result, look(expected))
    assert torch.equal(found, expected)  # changed in place, decoding are


def test_function_modes_see_what_is_done_with_deferred_tensors(decoding):
    seen = []
    for each in decoding:
        deferred = each.model.layers[0].self_attn.o_proj(torch.ones(3, 32))
        with FunctionRecorder() as recorder:
            result = (torch.ones(3, 32) + deferred).to(torch.float64)
        seen.append((recorder.names, result))
    (_, expected), (names, found) = seen
    assert torch.equal(found, expected)
    assert {"to", "add"} <= {name.strip("_").removeprefix("r") for name in names}
