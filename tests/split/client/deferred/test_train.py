"""Deferral in training: one call each way from attention to layer end; tensors read in between have their history."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import symbiosis
from symbiosis.errors import BadCall
from symbiosis.split.client.deferred.train import DeferredGradTensor
from symbiosis.types import Limits
from tests.parity.pair import assert_same_gradients, connected, gradients, twin
from tests.split.client.deferred.pairs import LAYERS, LLAMA, TARGETS, first, layers, replaced, same, with_lora

EXACT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def calls(model: Any) -> int:
    """Of one step."""
    session = model.base_model.model.symbiosis
    before = session.stats()["calls"]
    gradients(model, LLAMA.batch())
    return int(session.stats()["calls"] - before)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("targets", TARGETS)
def test_attention_to_layer_end_is_one_call_each_way(targets, dtype):
    plain = LLAMA.model().to(dtype)
    with connected(plain, "inproc") as model:
        expected, found = with_lora(twin(plain), targets), with_lora(model, targets)
        for seed in range(3):
            batch = LLAMA.batch(seed)
            assert_same_gradients(gradients(expected, batch), gradients(found, batch), EXACT[dtype])
        if targets != "mlp":  # its adapters read what is in the middle
            # q, k and v, and the rest; the first q, k and v have nothing before them to train
            assert calls(found) == 2 * LAYERS + 2 * LAYERS - 1


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_over_every_link(link):
    plain = LLAMA.model()
    with connected(plain, link) as model:
        same((with_lora(twin(plain)), with_lora(model)), passes=2)


def test_longer_calls_are_cut():
    plain = LLAMA.model()
    with symbiosis.Executor(plain) as executor:
        executor.limits = Limits(max_rows=48)  # what the executor announces to tenants
        model = with_lora(symbiosis.connect(executor))
        same((with_lora(twin(plain)), model), passes=2)
        assert calls(model) > 4 * LAYERS


def test_with_dropout_and_in_evaluation():
    plain = LLAMA.model()
    with connected(plain, "inproc") as model:
        pair = with_lora(twin(plain), lora_dropout=0.3), with_lora(model, lora_dropout=0.3)
        same(pair, passes=2)
        for each in pair:
            each.eval()
        same(pair, passes=2)


def test_hidden_states_have_their_gradients(both):
    found = []
    for each in both:
        output = each(**LLAMA.batch(), output_hidden_states=True)
        states = output.hidden_states
        loss = output.loss + sum(state.square().mean() for state in states)
        found.append([state for state in torch.autograd.grad(loss, states[1:])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_train_the_same(both, reentrant):
    for each in both:
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
        each.train()
    same(both)


class Injected(torch.autograd.Function):
    """Returns a gradient for a tensor that it never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_full((2, 12, 32), 0.1)


def test_an_autograd_function_that_does_not_read_is_refused_too(both):
    gradients(both[1], LLAMA.batch())

    def hook(_: Any, __: Any, result: Any) -> Any:
        one = torch.ones((), requires_grad=True)
        return replaced(result, first(result) + 0 * Injected.apply(one, first(result)))

    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(hook)
    with pytest.raises(BadCall, match="run the step again"):
        gradients(both[1], LLAMA.batch())
    same(both, passes=2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("function", [Doubled, Passed])
def test_an_autograd_function_that_would_lose_the_history_is_refused(both, function):
    gradients(both[1], LLAMA.batch())
    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(lambda _, __, result: replaced(result, function.apply(first(result))))
    with pytest.raises(BadCall, match="run the step again"):
        gradients(both[1], LLAMA.batch())
    same(both, passes=2)


@pytest.mark.parametrize("function", [Doubled, Passed])
def test_a_tensor_that_was_read_is_a_plain_one(both, function):
    def hook(_: Any, args: Any) -> Any:
        (x,) = args
        assert x.requires_grad
        assert type(x) is Tensor
        return (x + function.apply(x),)

    for each in both:
        for layer in layers(each):
            layer.post_attention_layernorm.register_forward_pre_hook(hook)
    same(both)


class Wrapped(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_a_stored_term_of_the_last_sum_has_its_gradient_or_is_refused(both):
    gradients(both[1], LLAMA.batch())
    for each in both:
        for layer in layers(each):
            layer.mlp = Wrapped(layer.mlp)
    found = []
    for each in both:
        stored: list[Tensor] = []
        hooks = [layer.mlp.register_forward_hook(lambda _, __, y, stored=stored: stored.append(y)) for layer in layers(each)]
        if each is both[1]:
            loss = each(**LLAMA.batch()).loss
            with pytest.raises(BadCall, match="run the step again"):
                torch.autograd.grad(loss, stored)
            stored.clear()
        found.append(torch.autograd.grad(each(**LLAMA.batch()).loss, stored))
        for hook in hooks:
            hook.remove()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    same(both, passes=2)


def test_a_deferred_tensor_may_be_read_inside_a_transform(both):
    def hook(_: Any, __: Any, result: Any) -> Any:
        scale = torch.func.vmap(lambda z: z * first(result).mean())(torch.ones(3)).sum() / 3
        return replaced(result, first(result) + scale.detach())

    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(hook)
    same(both)


def test_attributes_of_a_tensor_stay(both):
    gradients(both[1], LLAMA.batch())
    deferred = layers(both[1])[0].self_attn.o_proj.base_layer(torch.randn(2, 32, requires_grad=True))
    deferred.tag = 5
    deferred.sum()
    assert (type(deferred), deferred.tag) == (Tensor, 5)


def test_threads_may_read_one_tensor(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    for _ in range(40):
        o.groups.train.resolved.clear()
        deferred = o(torch.randn(2, 32, requires_grad=True))
        assert type(deferred) is DeferredGradTensor
        together = threading.Barrier(3)

        def look(deferred: Tensor = deferred, together: threading.Barrier = together) -> Tensor:
            together.wait()
            return (deferred * 2).sum()

        with ThreadPoolExecutor(3) as pool:
            sums = [each.result() for each in [pool.submit(look) for _ in range(3)]]
        assert torch.equal(torch.autograd.grad(sum(sums), deferred)[0], torch.full((2, 32), 6.0))


@contextmanager
def packed() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@pytest.mark.parametrize("packing", [packed, torch.autograd.graph.save_on_cpu])
def test_saved_tensor_hooks_may_start_inside_a_layer(packing):
    plain = LLAMA.model()
    with connected(plain, "inproc") as model:
        pair = with_lora(twin(plain), "mlp"), with_lora(model, "mlp")
        for each in pair:
            for layer in layers(each):

                def forward(x: Tensor, inner: Callable[..., Tensor] = layer.mlp.forward) -> Tensor:
                    with packing():
                        return inner(x)

                layer.mlp.forward = forward
        same(pair)


def test_a_checkpoint_inside_a_layer_is_refused_once_unless_deferral_is_off(both):
    def checkpointed(model: Any) -> None:
        for layer in layers(model):
            layer.mlp.forward = lambda x, inner=layer.mlp.forward: checkpoint(inner, x, use_reentrant=False)

    plain = LLAMA.model()
    for switched_off in (False, True):
        with connected(plain, "inproc") as model:
            pair = with_lora(twin(plain), "mlp"), with_lora(model, "mlp")
            for each in pair:
                checkpointed(each)
            if switched_off:
                model.symbiosis.defer_training = False
            else:
                with pytest.raises(BadCall, match="defer_training"):
                    gradients(pair[1], LLAMA.batch())
            same(pair)


def test_tensors_without_history_may_be_stored_and_read_later():
    plain = LLAMA.model().requires_grad_(False)
    with connected(plain, "inproc") as model:
        model.requires_grad_(False)
        found = []
        for each in (twin(plain), model):
            stored: list[Tensor] = []
            for layer in each.model.layers:
                layer.mlp = Wrapped(layer.mlp)
                layer.mlp.register_forward_hook(lambda _, __, y, stored=stored: stored.append(y))
            for _ in range(2):
                each(**LLAMA.batch())
            found.append([y.sum() for y in stored])
        torch.testing.assert_close(found[1], found[0])


def test_nothing_is_left_of_a_step(both):
    for _ in range(2):
        gradients(both[1], LLAMA.batch())
    gc.collect()
    gc.disable()
    try:
        gradients(both[1], LLAMA.batch())
        assert not [each for each in gc.get_objects() if type(each) is DeferredGradTensor]
    finally:
        gc.enable()


def test_a_norm_that_is_trained_gets_its_gradient(both):
    for each in both:
        for layer in layers(each):
            layer.post_attention_layernorm.weight.requires_grad_(True)
    same(both)
    assert any("post_attention_layernorm" in name for name in gradients(both[1], LLAMA.batch()))


def test_a_norm_of_the_tenants_own_is_used(both):
    same(both, passes=2)
    for each in both:
        layers(each)[1].post_attention_layernorm.weight.data.mul_(2.0)
    same(both, passes=2)
    for each in both:
        layers(each)[0].post_attention_layernorm.variance_epsilon = 0.1
    same(both, passes=2)


def test_nothing_is_deferred_under_autocast(both):
    gradients(both[1], LLAMA.batch())
    o, x = layers(both[1])[0].self_attn.o_proj.base_layer, torch.randn(2, 32)
    assert type(o(x)) is DeferredGradTensor
    with torch.autocast("cpu", torch.bfloat16):
        assert type(o(x)) is Tensor
    expected, found = [], []
    for each, losses in zip(both, (expected, found), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(each(**LLAMA.batch()).loss)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_copies_train_too(both):
    same((both[0], copy.deepcopy(both[1])), passes=2)


def test_second_derivatives_are_refused(both):
    loss = both[1](**LLAMA.batch()).loss
    wanted = [p for p in both[1].parameters() if p.requires_grad]
    with pytest.raises(BadCall, match="second derivatives"):
        torch.autograd.grad(loss, wanted, create_graph=True)


def test_metadata_is_known_without_values(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    deferred = o(torch.randn(2, 3, 32, requires_grad=True))
    assert type(deferred) is DeferredGradTensor
    assert deferred.shape == (2, 3, 32)
    assert (deferred.dim(), deferred.size(-1), len(deferred), deferred.dtype, deferred.device.type) == (
        3,
        32,
        2,
        torch.float32,
        "cpu",
    )
    assert deferred.node.value is None
    assert deferred.requires_grad
    assert deferred.grad_fn is not None
    assert type(deferred.sum()) is Tensor


def test_a_write_after_the_call_does_not_change_the_result(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    x = torch.randn(2, 32, requires_grad=True)
    y = x * 1
    deferred = o(y)
    total = deferred + y
    with torch.no_grad():
        y.zero_()
    expected = x.detach() @ o.weight.detach().T
    torch.testing.assert_close(total + 0, expected + x.detach())
    torch.testing.assert_close(deferred + 0, expected)
    total.sum().backward()
    torch.testing.assert_close(x.grad, o.weight.detach().sum(0).expand(2, -1) + 1)


def test_deferred_tensors_of_one_executor_are_plain_inputs_to_another():
    plain = [LLAMA.model().requires_grad_(False) for _ in range(2)]
    with torch.no_grad():
        for parameter in plain[1].parameters():
            parameter.mul_(1.5)
    with connected(plain[0], "inproc") as one, connected(plain[1], "inproc") as other:
        found = []
        for start, end in (plain, (one.requires_grad_(False), other.requires_grad_(False))):
            x = torch.linspace(-1, 1, 96).view(3, 32).requires_grad_()
            total = start.model.layers[0].self_attn.o_proj(x) + x
            layer = end.model.layers[0]
            result = total + layer.mlp(layer.post_attention_layernorm(total))
            found.append((result.detach(), *torch.autograd.grad(result.sin().sum(), x)))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
