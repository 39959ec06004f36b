"""Deferral in decoding: fewer calls, and every tensor that code reads in between equals that of a plain model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import symbiosis
from symbiosis.errors import Closed
from symbiosis.split.client.deferred.decode import is_worth_deferring
from symbiosis.split.client.deferred.graph import Node
from symbiosis.split.client.deferred.tensor import DeferredTensor
from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import connected, twin
from tests.split.client.deferred.pairs import LAYERS, LLAMA, PLACES, first

TARGETS: dict[str, list[str]] = {
    "none": [],
    "q and v": ["q_proj", "v_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "down_proj"],
}


def with_lora(model: PreTrainedModel, targets: list[str]) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(model, config).eval() if targets else model


def same(found: PreTrainedModel, expected: PreTrainedModel, passes: int = 6) -> None:
    for seed in range(passes):
        batch = LLAMA.batch(seed)
        assert torch.equal(found(**batch).logits, expected(**batch).logits), f"pass {seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("targets", TARGETS)
def test_attention_to_attention_is_one_call_with_adapters_too(targets, dtype):
    plain = LLAMA.model().to(dtype)
    with symbiosis.Executor(plain) as executor, torch.no_grad():
        expected = with_lora(twin(plain), TARGETS[targets])
        found = with_lora(symbiosis.connect(executor), TARGETS[targets])
        same(found, expected)
        before = executor.stats()["calls"]
        found(**LLAMA.batch())
        between = 2 if targets == "mlp" else 1  # its adapters read what is in the middle
        assert executor.stats()["calls"] - before == 1 + between * LAYERS


def test_nothing_is_deferred_with_gradients_or_many_rows(decoding):
    _, model = decoding
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.o_proj(torch.randn(512, 32)), DeferredTensor)
    assert type(attention.o_proj(torch.randn(513, 32))) is Tensor
    with torch.enable_grad():
        assert type(attention.o_proj(torch.randn(2, 32))) is not DeferredTensor
    with torch.inference_mode():
        assert not isinstance(attention.o_proj(torch.randn(2, 32)), DeferredTensor)


@pytest.mark.parametrize(
    ("shape", "anywhere", "on_gpu"),
    [((1, 1, 32), True, True), ((512, 1, 32), True, True), ((1, 8, 32), True, True), ((1, 9, 32), True, False),
     ((8, 32), True, True), ((9, 32), True, False), ((513, 1, 32), False, False), ((0, 1, 32), False, False),
     ((1, 1, 0), False, False)],
)  # fmt: skip
def test_which_shapes_are_worth_deferring(shape, anywhere, on_gpu):
    assert is_worth_deferring(torch.Size(shape), on_gpu=False) is anywhere
    assert is_worth_deferring(torch.Size(shape), on_gpu=True) is on_gpu


def test_a_result_that_is_always_read_is_not_deferred_any_more(decoding):
    plain, model = decoding
    for layer in (*plain.model.layers, *model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *call: call[-1].sum().item() and None)
    same(model, plain)
    assert type(model.model.layers[0].self_attn.o_proj(torch.randn(2, 32))) is Tensor


def add_in_place(result: Any) -> None:
    first(result).add_(0.5)


def through_data(result: Any) -> None:
    first(result).data.mul_(1.5)


def through_a_view(result: Any) -> None:
    first(result)[..., :3] = 0.25


def through_numpy(result: Any) -> None:
    first(result).numpy()[..., 0] = 2.0


def another(result: Any) -> Any:
    changed = first(result) * 2
    return (changed, *result[1:]) if isinstance(result, tuple) else changed


@pytest.mark.parametrize("change", [add_in_place, through_data, through_a_view, through_numpy, another])
@pytest.mark.parametrize("place", PLACES)
def test_hooks_may_change_every_result(decoding, place, change):
    for each in decoding:
        for layer in each.model.layers:
            layer.get_submodule(place).register_forward_hook(lambda _, __, result: change(result))
    same(decoding[1], decoding[0])


@pytest.mark.parametrize("change", [add_in_place, through_data, through_a_view, through_numpy])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("after", [False, True])
def test_hooks_may_change_what_modules_read(decoding, place, change, after):
    """`after`: when the module has read its input, so that the change must not affect its result."""
    for each in decoding:
        for layer in each.model.layers:
            module = layer.get_submodule(place)
            if after:
                module.register_forward_hook(lambda _, args, __: change(args) if args else None)
            else:
                module.register_forward_pre_hook(lambda _, args: change(args) if args else None)
    same(decoding[1], decoding[0])


@contextmanager
def recording(model: PreTrainedModel, place: str) -> Iterator[list[Tensor]]:
    outputs: list[Tensor] = []
    hooks = [
        layer.get_submodule(place).register_forward_hook(lambda _, __, result: outputs.append(first(result)))
        for layer in model.model.layers
    ]
    yield outputs
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_stored_results_do_not_change(decoding, place):
    plain, model = decoding
    with recording(plain, place) as expected, recording(model, place) as found:
        plain(**LLAMA.batch())
        model(**LLAMA.batch())
    for layer in model.model.layers:  # later changes do not affect them
        layer.post_attention_layernorm.weight.mul_(3.0)
        layer.input_layernorm.weight.data.add_(1.0)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_norm_of_the_tenants_own_is_used(decoding):
    plain, model = decoding
    same(model, plain)
    for each in decoding:
        each.model.layers[1].input_layernorm.weight.data.mul_(2.0)
    same(model, plain)
    for each in decoding:
        each.model.layers[0].post_attention_layernorm.variance_epsilon = 0.1
    same(model, plain)
    for each in decoding:
        each.model.layers[0].input_layernorm = nn.Identity()
    same(model, plain)


def test_sums_and_norms_are_deferred_and_rounded_alike(decoding):
    results = []
    for each in decoding:
        layer, x, residual = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32), torch.ones(3, 32)
        total = residual + layer.self_attn.o_proj(x)
        normed = layer.post_attention_layernorm(total)
        end = total + layer.mlp(normed)
        x.zero_()  # inputs were read at the call
        residual.zero_()
        results.append((end, total, normed))
    assert all(isinstance(each, DeferredTensor) for each in results[1])
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_changing_one_of_several_deferred_tensors_leaves_the_others(decoding):
    results = []
    for each in decoding:
        layer, x = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32)
        total = x + layer.self_attn.o_proj(x)
        normed = layer.post_attention_layernorm(total)
        total.add_(1.0)
        end = total + layer.mlp(normed)
        normed.mul_(2.0)
        results.append((end, total, normed))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_reading_a_term_before_its_sum(decoding):
    results = []
    for each in decoding:
        layer, x = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32)
        part = layer.self_attn.o_proj(x)
        total = part + x
        after = layer.mlp(layer.post_attention_layernorm(total + part))
        results.append((part.norm(), total, after, part))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_an_endless_sum_is_computed_in_parts(decoding):
    totals = []
    for each in decoding:
        total = torch.zeros(2, 32)
        for step in range(200):
            total = each.model.layers[0].self_attn.o_proj(torch.full((2, 32), step / 200)) + total
        totals.append(total)
    assert torch.equal(totals[1], totals[0])


def test_deferred_tensors_of_one_executor_are_plain_inputs_to_another():
    plain = [LLAMA.model() for _ in range(2)]
    with torch.no_grad():
        for parameter in plain[1].parameters():
            parameter.mul_(1.5)
    with connected(plain[0], "inproc") as one, connected(plain[1], "inproc") as other, torch.no_grad():
        results = []
        for first, second in (plain, (one, other)):
            start = first.model.layers[0].self_attn.o_proj(torch.linspace(-1, 1, 96).view(3, 32))
            layer = second.model.layers[0]
            total = start + layer.self_attn.o_proj(start)
            results.append((total, layer.mlp(layer.post_attention_layernorm(total)), layer.input_layernorm(start)))
        for found, expected in zip(results[1], results[0], strict=True):
            assert torch.equal(found, expected)


def test_nothing_is_deferred_inside_autograd_functions(decoding):
    """Gradients of a checkpointed part whose result is the input of a layer, as in OLMo."""
    grads = []
    for each in decoding:
        layer, x = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32).requires_grad_()
        with torch.enable_grad():
            middle = checkpoint(layer.self_attn.o_proj, x, use_reentrant=True)
            (layer.mlp(middle) + middle).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "phi3"])
def test_tokens_are_counted_once(name):
    architecture = next(each for each in ARCHITECTURES if each.name == name)
    batch = architecture.batch()
    with symbiosis.Executor(architecture.model()) as executor, torch.no_grad():
        model = symbiosis.connect(executor)
        for passes in range(1, 8):
            model(**batch)
            assert executor.stats()["tokens"] == passes * batch["input_ids"].numel()


def test_nodes_are_freed_without_the_garbage_collector(decoding):
    def nodes() -> int:
        return sum(type(each) is Node for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = nodes()
        same(decoding[1], decoding[0], passes=3)
        assert nodes() == before
    finally:
        gc.enable()


def test_outputs_of_models_are_computed(decoding):
    _, model = decoding
    inner = model.model(LLAMA.batch()["input_ids"], output_hidden_states=True)
    assert type(inner.last_hidden_state) is Tensor
    assert all(type(state) is Tensor for state in inner.hidden_states)
    nn.Parameter(inner.last_hidden_state)


@pytest.mark.parametrize("link", ["inproc", "shm"])
def test_reading_in_inference_mode_makes_no_inference_tensor(link):
    plain = LLAMA.model()
    with connected(plain, link) as model:
        results = []
        for each in (plain, model):
            with torch.no_grad():
                part = each.model.layers[0].self_attn.o_proj(torch.linspace(-1, 1, 96).view(3, 32))
                total = part + torch.ones(3, 32)
            with torch.inference_mode():
                part.sum()
                total.sum()
            with torch.no_grad():
                results.append(total.add_(1.0) * part.mul_(2.0))
        assert torch.equal(results[1], results[0])


def test_threads_share_a_model(decoding):
    plain, model = decoding
    expected = [plain(**LLAMA.batch(seed)).logits for seed in range(4)]
    failures: list[str] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(model(**LLAMA.batch(seed)).logits, expected[seed]):
                    failures.append(f"seed {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_reading_a_deferred_tensor_of_a_closed_session_raises():
    with symbiosis.Executor(LLAMA.model()) as executor, torch.no_grad():
        model = symbiosis.connect(executor)
        deferred = model.model.layers[0].self_attn.o_proj(torch.randn(3, 32))
        model.symbiosis.close()
        with pytest.raises(Closed):
            deferred.sum()


def test_gradients_start_where_deferral_ends(decoding):
    grads = []
    for each in decoding:
        layer = each.model.layers[0]
        start = layer.self_attn.o_proj(torch.linspace(-1, 1, 96).view(3, 32))
        with torch.enable_grad():
            leaf = start.detach().requires_grad_()
            layer.mlp(layer.post_attention_layernorm(leaf + start)).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make", [lambda s: s, lambda s: s.to(torch.bfloat16), lambda s: s.bfloat16(), lambda s: s + s, torch.sin]
)
def test_sums_with_float32_are_rounded_alike(make):
    plain = LLAMA.model().to(torch.bfloat16)
    with connected(plain, "inproc") as model, torch.no_grad():
        x, change = torch.randn(3, 32).bfloat16(), torch.randn(3, 32)
        expected, found = (make(each.model.layers[0].self_attn.o_proj(x) + change) for each in (plain, model))
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
