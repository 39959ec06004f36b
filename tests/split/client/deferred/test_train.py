"""In training half a layer is one call each way; whoever looks in between finds what a plain model has, with its history."""

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
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import symbiosis
from symbiosis.errors import BadCall
from symbiosis.split.client.deferred.train import DeferredGradTensor
from symbiosis.types import Limits
from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import assert_same_gradients, connected, gradients, twin

LLAMA = ARCHITECTURES[0]
LAYERS = 2
TARGETS: dict[str, list[str]] = {
    "q and v": ["q_proj", "v_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "down_proj"],
}
EXACT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def with_lora(model: PreTrainedModel, targets: str = "attention", **more: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[targets], init_lora_weights=False, **more))


def layers(model: Any) -> Any:
    return model.base_model.model.model.layers


@pytest.fixture
def both() -> Iterator[tuple[Any, Any]]:
    plain = LLAMA.model()
    with connected(plain, "inproc") as model:
        yield with_lora(twin(plain)), with_lora(model)


def same(both: tuple[Any, Any], passes: int = 6) -> None:
    """More passes than tries: what is looked at comes late first, and at once then."""
    for seed in range(passes):
        assert_same_gradients(gradients(both[0], LLAMA.batch(seed)), gradients(both[1], LLAMA.batch(seed)))


def calls(model: Any) -> int:
    """Of one step."""
    session = model.base_model.model.symbiosis
    before = session.stats()["calls"]
    gradients(model, LLAMA.batch())
    return int(session.stats()["calls"] - before)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("targets", TARGETS)
def test_half_a_layer_is_one_call_each_way(targets, dtype):
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
        executor.limits = Limits(max_rows=48)  # as tenants are told
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


PLACES = ["self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp", "mlp.down_proj", "input_layernorm", ""]


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def replaced(result: Any, changed: Tensor) -> Any:
    return (changed, *result[1:]) if isinstance(result, tuple) else changed


def add_in_place(result: Any) -> None:
    with torch.no_grad():
        first(result).add_(0.5)


def through_data(result: Any) -> None:
    first(result).data.mul_(1.5)


def twice(result: Any) -> Any:
    return replaced(result, first(result) * 2)


def look_without_gradients(result: Any) -> None:
    with torch.no_grad():
        first(result).sum().item()


def look_in_inference_mode(result: Any) -> None:
    with torch.inference_mode():
        first(result).sum().item()


CHANGES = [add_in_place, through_data, twice, look_without_gradients, look_in_inference_mode]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_hooks_may_look_and_change(both, place, change):
    for each in both:
        for layer in layers(each):
            layer.get_submodule(place).register_forward_hook(lambda _, __, result: change(result))
    same(both)


@pytest.mark.parametrize("change", [through_data, look_without_gradients])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
def test_hooks_may_change_what_modules_read(both, place, change, late):
    """`late`: when the module has read it, which for a plain model is too late to matter to that module."""
    for each in both:
        for layer in layers(each):
            module = layer.get_submodule(place)
            if late:
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


def kept_gradients(model: Any, place: str, keep: Callable[[Tensor], None], of: str) -> list[Tensor]:
    """Of what modules give or read, kept by a hook, with respect to the loss."""
    kept: list[Tensor] = []

    def note(value: Any) -> None:
        kept.append(first(value))
        keep(kept[-1])

    modules = [layer.get_submodule(place) for layer in layers(model)]
    if of == "given":
        hooks = [module.register_forward_hook(lambda _, __, result: note(result)) for module in modules]
    else:
        hooks = [module.register_forward_pre_hook(lambda _, args: note(args)) for module in modules]
    loss = model(**LLAMA.batch()).loss
    found = list(torch.autograd.grad(loss, kept))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("keep", [lambda x: None, lambda x: x.requires_grad], ids=["unseen", "seen"])
@pytest.mark.parametrize(("place", "of"), [*((place, "given") for place in PLACES[:5]), ("mlp", "read"),
                                           ("post_attention_layernorm", "read"), ("self_attn.o_proj", "read")])  # fmt: skip
def test_what_somebody_keeps_has_its_gradient(both, place, of, keep):
    for _ in range(6):
        expected, found = (kept_gradients(each, place, keep, of) for each in both)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("place", [*PLACES, "self_attn.q_proj"])
@pytest.mark.parametrize("of", ["the layer", "a copy", "its adapter"])
def test_whoever_wants_to_see_gradients_sees_them(both, place, of):
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
            module.register_full_backward_hook(lambda _, __, given, mine=mine: mine.append(first(given).clone()))
    same(both)
    assert len(seen[0]) == len(seen[1]) > 0
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_everywhere_too(both):
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        same(both, passes=2)
    finally:
        handle.remove()


class Injected(torch.autograd.Function):
    """Gives a gradient to what it never looked at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_full((2, 12, 32), 0.1)


def test_a_function_of_autograds_that_does_not_look_is_refused_too(both):
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
def test_a_function_of_autograds_gets_no_tensor_whose_history_it_would_lose(both, function):
    gradients(both[1], LLAMA.batch())
    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(lambda _, __, result: replaced(result, function.apply(first(result))))
    with pytest.raises(BadCall, match="run the step again"):
        gradients(both[1], LLAMA.batch())
    same(both, passes=2)


@pytest.mark.parametrize("function", [Doubled, Passed])
def test_what_was_looked_at_is_a_tensor_like_any_other(both, function):
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


def test_what_is_kept_out_of_our_sight_has_its_gradient_or_is_refused(both):
    gradients(both[1], LLAMA.batch())
    for each in both:
        for layer in layers(each):
            layer.mlp = Wrapped(layer.mlp)
    found = []
    for each in both:
        kept: list[Tensor] = []
        hooks = [layer.mlp.register_forward_hook(lambda _, __, y, kept=kept: kept.append(y)) for layer in layers(each)]
        if each is both[1]:
            loss = each(**LLAMA.batch()).loss
            with pytest.raises(BadCall, match="run the step again"):
                torch.autograd.grad(loss, kept)
            kept.clear()
        found.append(torch.autograd.grad(each(**LLAMA.batch()).loss, kept))
        for hook in hooks:
            hook.remove()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    same(both, passes=2)


def test_a_hook_may_look_at_checkpointed_layers_and_go_before_backward(both):
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


def test_inside_a_transform_it_is_what_it_is(both):
    def hook(_: Any, __: Any, result: Any) -> Any:
        scale = torch.func.vmap(lambda z: z * first(result).mean())(torch.ones(3)).sum() / 3
        return replaced(result, first(result) + scale.detach())

    for each in both:
        for layer in layers(each):
            layer.self_attn.register_forward_hook(hook)
    same(both)


def double(grad: Tensor) -> Tensor:
    return grad * 2


def hook_at_once(x: Tensor) -> None:
    x.register_hook(double)


def hook_after_a_look(x: Tensor) -> None:
    x.sum().item()
    x.register_hook(double)


def hook_together(x: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook([x], lambda grads: COUNTED.append(len(grads)))


COUNTED: list[int] = []


@pytest.mark.parametrize("hook", [hook_at_once, hook_after_a_look, hook_together])
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


def test_what_is_written_on_a_tensor_stays(both):
    gradients(both[1], LLAMA.batch())
    late = layers(both[1])[0].self_attn.o_proj.base_layer(torch.randn(2, 32, requires_grad=True))
    late.tag = 5
    late.sum()
    assert (type(late), late.tag) == (Tensor, 5)


def test_threads_may_look_at_one_tensor(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    for _ in range(40):
        o.groups.train.resolved.clear()
        late = o(torch.randn(2, 32, requires_grad=True))
        assert type(late) is DeferredGradTensor
        together = threading.Barrier(3)

        def look(late: Tensor = late, together: threading.Barrier = together) -> Tensor:
            together.wait()
            return (late * 2).sum()

        with ThreadPoolExecutor(3) as pool:
            sums = [each.result() for each in [pool.submit(look) for _ in range(3)]]
        assert torch.equal(torch.autograd.grad(sum(sums), late)[0], torch.full((2, 32), 6.0))


@contextmanager
def packed() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@pytest.mark.parametrize("packing", [packed, torch.autograd.graph.save_on_cpu])
def test_packing_may_begin_inside_a_layer(packing):
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


def test_a_checkpoint_inside_a_layer_is_refused_once_or_told_before(both):
    def checkpointed(model: Any) -> None:
        for layer in layers(model):
            layer.mlp.forward = lambda x, inner=layer.mlp.forward: checkpoint(inner, x, use_reentrant=False)

    plain = LLAMA.model()
    for told in (False, True):
        with connected(plain, "inproc") as model:
            pair = with_lora(twin(plain), "mlp"), with_lora(model, "mlp")
            for each in pair:
                checkpointed(each)
            if told:
                model.symbiosis.defer_training = False
            else:
                with pytest.raises(BadCall, match="defer_training"):
                    gradients(pair[1], LLAMA.batch())
            same(pair)


def test_what_has_no_history_may_be_kept_and_looked_at_later():
    plain = LLAMA.model().requires_grad_(False)
    with connected(plain, "inproc") as model:
        model.requires_grad_(False)
        found = []
        for each in (twin(plain), model):
            kept: list[Tensor] = []
            for layer in each.model.layers:
                layer.mlp = Wrapped(layer.mlp)
                layer.mlp.register_forward_hook(lambda _, __, y, kept=kept: kept.append(y))
            for _ in range(2):
                each(**LLAMA.batch())
            found.append([y.sum() for y in kept])
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


def test_under_autocast_nothing_comes_late(both):
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


def test_what_comes_late_is_known_without_its_numbers(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    late = o(torch.randn(2, 3, 32, requires_grad=True))
    assert type(late) is DeferredGradTensor
    assert late.shape == (2, 3, 32)
    assert (late.dim(), late.size(-1), len(late), late.dtype, late.device.type) == (3, 32, 2, torch.float32, "cpu")
    assert late.node.value is None
    assert late.requires_grad
    assert late.grad_fn is not None
    assert type(late.sum()) is Tensor


def test_a_write_to_what_a_layer_has_read_comes_too_late(both):
    gradients(both[1], LLAMA.batch())
    o = layers(both[1])[0].self_attn.o_proj.base_layer
    x = torch.randn(2, 32, requires_grad=True)
    y = x * 1
    late = o(y)
    total = late + y
    with torch.no_grad():
        y.zero_()
    expected = x.detach() @ o.weight.detach().T
    torch.testing.assert_close(total + 0, expected + x.detach())
    torch.testing.assert_close(late + 0, expected)
    total.sum().backward()
    torch.testing.assert_close(x.grad, o.weight.detach().sum(0).expand(2, -1) + 1)
