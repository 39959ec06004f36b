"""Deferral in training: hooks may read, change and store every tensor, and see its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.pair import assert_same_gradients, gradients
from tests.split.client.deferred.pairs import LLAMA, PLACES, first, layers, replaced, same


def add_in_place(result: Any) -> None:
    with torch.no_grad():
        first(result).add_(0.5)


def through_data(result: Any) -> None:
    first(result).data.mul_(1.5)


def twice(result: Any) -> Any:
    return replaced(result, first(result) * 2)


def read_without_gradients(result: Any) -> None:
    with torch.no_grad():
        first(result).sum().item()


def read_in_inference_mode(result: Any) -> None:
    with torch.inference_mode():
        first(result).sum().item()


CHANGES = [add_in_place, through_data, twice, read_without_gradients, read_in_inference_mode]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_hooks_may_read_and_change(both, place, change):
    for each in both:
        for layer in layers(each):
            layer.get_submodule(place).register_forward_hook(lambda _, __, result: change(result))
    same(both)


@pytest.mark.parametrize("change", [through_data, read_without_gradients])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [False, True])
def test_hooks_may_change_what_modules_read(both, place, change, after):
    """`after`: when the module has read its input, so that the change must not affect its result."""
    for each in both:
        for layer in layers(each):
            module = layer.get_submodule(place)
            if after:
                module.register_forward_hook(lambda _, args, __: change(args) if args else None)
            else:
                module.register_forward_pre_hook(lambda _, args: change(args) if args else None)
    if change is through_data:  # what is saved for a gradient may be changed so, and plain models have other things saved
        for seed in range(6):
            batch = LLAMA.batch(seed)
            found, expected = (each(**batch).loss for each in reversed(both))
            torch.testing.assert_close(found, expected)
        return
    same(both)


def recorded_gradients(model: Any, place: str, read: Callable[[Tensor], None], of: str) -> list[Tensor]:
    """Of the outputs or inputs of modules, recorded by a hook, with respect to the loss."""
    recorded: list[Tensor] = []

    def record(value: Any) -> None:
        recorded.append(first(value))
        read(recorded[-1])

    modules = [layer.get_submodule(place) for layer in layers(model)]
    if of == "output":
        hooks = [module.register_forward_hook(lambda _, __, result: record(result)) for module in modules]
    else:
        hooks = [module.register_forward_pre_hook(lambda _, args: record(args)) for module in modules]
    loss = model(**LLAMA.batch()).loss
    found = list(torch.autograd.grad(loss, recorded))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("read", [lambda x: None, lambda x: x.requires_grad], ids=["unread", "read"])
@pytest.mark.parametrize(("place", "of"), [*((place, "output") for place in PLACES[:5]), ("mlp", "input"),
                                           ("post_attention_layernorm", "input"), ("self_attn.o_proj", "input")])  # fmt: skip
def test_stored_tensors_have_their_gradients(both, place, of, read):
    for _ in range(6):
        expected, found = (recorded_gradients(each, place, read, of) for each in both)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", [*PLACES, "self_attn.q_proj"])
@pytest.mark.parametrize("of", ["the layer", "a copy", "its adapter"])
def test_backward_hooks_of_modules_see_the_gradients(both, place, of):
    if of == "a copy":
        both = both[0], copy.deepcopy(both[1])
    seen: list[list[Tensor]] = []
    for each in both:
        mine: list[Tensor] = []
        seen.append(mine)
        for layer in layers(each):
            module = layer.get_submodule(place)
            if of == "the layer":
                module = getattr(module, "base_layer", module)
            module.register_full_backward_hook(lambda _, __, grads, mine=mine: mine.append(first(grads).clone()))
    same(both)
    assert len(seen[0]) == len(seen[1]) > 0
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_global_backward_hooks_are_called(both):
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        same(both, passes=2)
    finally:
        handle.remove()


def test_a_hook_may_read_checkpointed_layers_and_be_removed_before_backward(both):
    for each in both:
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each.enable_input_require_grads()
        each.train()
    found = []
    for each in both:
        each.zero_grad()
        hooks = [
            layer.self_attn.register_forward_hook(lambda _, __, y: first(y).detach().norm().item() and None)
            for layer in layers(each)
        ]
        loss = each(**LLAMA.batch()).loss
        for hook in hooks:
            hook.remove()
        loss.backward()
        found.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert_same_gradients(*found)


def double(grad: Tensor) -> Tensor:
    return grad * 2


def hook_at_once(x: Tensor) -> None:
    x.register_hook(double)


def hook_after_a_read(x: Tensor) -> None:
    x.sum().item()
    x.register_hook(double)


def hook_together(x: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook([x], lambda grads: COUNTED.append(len(grads)))


COUNTED: list[int] = []


@pytest.mark.parametrize("hook", [hook_at_once, hook_after_a_read, hook_together])
def test_hooks_on_a_tensor_are_called(both, hook):
    counts = []
    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(lambda _, __, result: hook(first(result)))
    for seed in range(6):
        expected = gradients(both[0], LLAMA.batch(seed))
        counts.append(len(COUNTED))
        assert_same_gradients(expected, gradients(both[1], LLAMA.batch(seed)))
        assert len(COUNTED) == 2 * counts[-1]
        COUNTED.clear()
    assert any(counts) is (hook is hook_together)
    assert len(layers(both[1])[0].self_attn.o_proj.base_layer.groups.train.refusal_hooks) == 1
