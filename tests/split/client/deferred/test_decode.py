"""In decoding a connected model computes late, in fewer calls; whoever looks in between finds what a plain one has."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import symbiosis
from symbiosis.errors import Closed
from symbiosis.split.client.deferred.decode import is_worth_deferring
from symbiosis.split.client.deferred.graph import Node
from symbiosis.split.client.deferred.tensor import DeferredTensor
from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import connected, twin

LLAMA = ARCHITECTURES[0]
LAYERS = 2
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


@pytest.fixture
def both() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    plain = LLAMA.model()
    with connected(plain, "inproc") as model, torch.no_grad():
        yield plain, model


def same(found: PreTrainedModel, expected: PreTrainedModel, passes: int = 6) -> None:
    for seed in range(passes):
        batch = LLAMA.batch(seed)
        assert torch.equal(found(**batch).logits, expected(**batch).logits), f"pass {seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("targets", TARGETS)
def test_from_attention_to_attention_is_one_call_with_adapters_too(targets, dtype):
    plain = LLAMA.model().to(dtype)
    with symbiosis.Executor(plain) as executor, torch.no_grad():
        expected = with_lora(twin(plain), TARGETS[targets])
        found = with_lora(symbiosis.connect(executor), TARGETS[targets])
        same(found, expected)
        before = executor.stats()["calls"]
        found(**LLAMA.batch())
        between = 2 if targets == "mlp" else 1  # its adapters read what is in the middle
        assert executor.stats()["calls"] - before == 1 + between * LAYERS


def test_with_gradients_or_many_rows_nothing_is_promised(both):
    _, model = both
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
def test_what_is_worth_a_promise(shape, anywhere, on_gpu):
    assert is_worth_deferring(torch.Size(shape), on_gpu=False) is anywhere
    assert is_worth_deferring(torch.Size(shape), on_gpu=True) is on_gpu


def test_what_somebody_always_looks_at_is_not_promised_any_more(both):
    plain, model = both
    for layer in (*plain.model.layers, *model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *call: call[-1].sum().item() and None)
    same(model, plain)
    assert type(model.model.layers[0].self_attn.o_proj(torch.randn(2, 32))) is Tensor


PLACES = ["self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp", "mlp.down_proj", "input_layernorm", ""]


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


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("change", [add_in_place, through_data, through_a_view, through_numpy, another])
@pytest.mark.parametrize("place", PLACES)
def test_hooks_may_change_whatever_is_on_the_way(both, place, change):
    for each in both:
        for layer in each.model.layers:
            layer.get_submodule(place).register_forward_hook(lambda _, __, result: change(result))
    same(both[1], both[0])


@pytest.mark.parametrize("change", [add_in_place, through_data, through_a_view, through_numpy])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
def test_hooks_may_change_what_modules_read(both, place, change, late):
    """`late`: when the module has read it, which for a plain model is too late to matter to that module."""
    for each in both:
        for layer in each.model.layers:
            module = layer.get_submodule(place)
            if late:
                module.register_forward_hook(lambda _, args, __: change(args) if args else None)
            else:
                module.register_forward_pre_hook(lambda _, args: change(args) if args else None)
    same(both[1], both[0])


@contextmanager
def keeping(model: PreTrainedModel, place: str) -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    hooks = [
        layer.get_submodule(place).register_forward_hook(lambda _, __, result: kept.append(first(result)))
        for layer in model.model.layers
    ]
    yield kept
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_kept_for_later_is_what_it_was(both, place):
    plain, model = both
    with keeping(plain, place) as expected, keeping(model, place) as found:
        plain(**LLAMA.batch())
        model(**LLAMA.batch())
    for layer in model.model.layers:  # what comes later has no part in it
        layer.post_attention_layernorm.weight.mul_(3.0)
        layer.input_layernorm.weight.data.add_(1.0)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_norm_of_the_tenants_own_is_used(both):
    plain, model = both
    same(model, plain)
    for each in both:
        each.model.layers[1].input_layernorm.weight.data.mul_(2.0)
    same(model, plain)
    for each in both:
        each.model.layers[0].post_attention_layernorm.variance_epsilon = 0.1
    same(model, plain)
    for each in both:
        each.model.layers[0].input_layernorm = nn.Identity()
    same(model, plain)


class Two(NamedTuple):
    one: Tensor
    other: Tensor


class Several(list[Tensor]):
    pass


class Adds:
    """Knows by itself how it is added to something."""

    def __radd__(self, other: Tensor) -> Tensor:
        return other * 3


class Sees(TorchFunctionMode):
    """What functions of torch are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def without_functions(look: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same where nobody is asked what torch's functions do."""

    def looked(promise: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return look(promise)

    return looked


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
def test_a_promise_is_a_tensor_to_everything(both, look):
    x = torch.randn(3, 32)
    expected, found = (each.model.layers[0].self_attn.o_proj(x) for each in both)
    assert isinstance(found, DeferredTensor)
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype, found.device, found.dim(), len(found)) == (expected.shape, x.dtype, x.device, 2, 3)
    result = look(found)
    assert isinstance(result, Tensor)
    assert torch.equal(result, look(expected))
    assert torch.equal(found, expected)  # changed in place, both are


def test_whoever_watches_torchs_functions_sees_what_is_done_with_promises(both):
    seen = []
    for each in both:
        promise = each.model.layers[0].self_attn.o_proj(torch.ones(3, 32))
        with Sees() as sees:
            result = (torch.ones(3, 32) + promise).to(torch.float64)
        seen.append((sees.names, result))
    (_, expected), (names, found) = seen
    assert torch.equal(found, expected)
    assert {"to", "add"} <= {name.strip("_").removeprefix("r") for name in names}


def test_sums_and_norms_are_promised_and_rounded_as_ever(both):
    results = []
    for each in both:
        layer, x, residual = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32), torch.ones(3, 32)
        total = residual + layer.self_attn.o_proj(x)
        normed = layer.post_attention_layernorm(total)
        end = total + layer.mlp(normed)
        x.zero_()  # what was read was read
        residual.zero_()
        results.append((end, total, normed))
    assert all(isinstance(each, DeferredTensor) for each in results[1])
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_changing_one_of_several_promises_leaves_the_others(both):
    results = []
    for each in both:
        layer, x = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32)
        total = x + layer.self_attn.o_proj(x)
        normed = layer.post_attention_layernorm(total)
        total.add_(1.0)
        end = total + layer.mlp(normed)
        normed.mul_(2.0)
        results.append((end, total, normed))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_looking_at_a_part_of_a_sum_before_the_sum(both):
    results = []
    for each in both:
        layer, x = each.model.layers[0], torch.linspace(-1, 1, 96).view(3, 32)
        part = layer.self_attn.o_proj(x)
        total = part + x
        after = layer.mlp(layer.post_attention_layernorm(total + part))
        results.append((part.norm(), total, after, part))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)


def test_a_sum_that_grows_for_ever_is_computed_on_the_way(both):
    totals = []
    for each in both:
        total = torch.zeros(2, 32)
        for step in range(200):
            total = each.model.layers[0].self_attn.o_proj(torch.full((2, 32), step / 200)) + total
        totals.append(total)
    assert torch.equal(totals[1], totals[0])


def test_promises_of_one_executor_mean_nothing_to_another():
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


def test_nothing_is_promised_in_functions_of_autograds(both):
    """Gradients of a checkpointed part of an OLMo-like stretch: its result goes straight into a layer."""
    grads = []
    for each in both:
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


def test_what_led_to_a_promise_goes_with_it_and_waits_for_no_collector(both):
    def nodes() -> int:
        return sum(type(each) is Node for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = nodes()
        same(both[1], both[0], passes=3)
        assert nodes() == before
    finally:
        gc.enable()


def test_what_models_give_has_its_numbers(both):
    _, model = both
    inner = model.model(LLAMA.batch()["input_ids"], output_hidden_states=True)
    assert type(inner.last_hidden_state) is Tensor
    assert all(type(state) is Tensor for state in inner.hidden_states)
    nn.Parameter(inner.last_hidden_state)


@pytest.mark.parametrize("link", ["inproc", "shm"])
def test_looking_in_inference_mode_makes_no_tensor_of_inference_mode(link):
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


def test_threads_share_a_model(both):
    plain, model = both
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


def test_a_promise_of_a_session_that_was_closed_says_so():
    with symbiosis.Executor(LLAMA.model()) as executor, torch.no_grad():
        model = symbiosis.connect(executor)
        promise = model.model.layers[0].self_attn.o_proj(torch.randn(3, 32))
        model.symbiosis.close()
        with pytest.raises(Closed):
            promise.sum()


def test_gradients_begin_where_promises_end(both):
    grads = []
    for each in both:
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
def test_sums_with_float32_are_rounded_as_ever(make):
    plain = LLAMA.model().to(torch.bfloat16)
    with connected(plain, "inproc") as model, torch.no_grad():
        x, change = torch.randn(3, 32).bfloat16(), torch.randn(3, 32)
        expected, found = (make(each.model.layers[0].self_attn.o_proj(x) + change) for each in (plain, model))
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
