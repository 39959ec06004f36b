"""Connected models in the modes and with the changes that tenants use."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

import symbiosis
from symbiosis.errors import BadCall, CannotMerge, CannotSave
from symbiosis.split.client.virtual_layers import VirtualConv1D, VirtualLayer, VirtualLinear
from tests.lora import random_lora
from tests.parity.architectures import ARCHITECTURES, _made
from tests.parity.pair import adapted, assert_same_gradients, connected, gradients, trainable, twin

LLAMA = ARCHITECTURES[0]
GPT2 = next(a for a in ARCHITECTURES if a.name == "gpt2")
MIXTRAL = next(a for a in ARCHITECTURES if a.name == "mixtral")


@pytest.fixture
def pair():
    plain = LLAMA.model()
    with connected(plain, "inproc") as model:
        yield plain, model


def test_a_connected_model_holds_no_base_weights(pair):
    plain, model = pair
    hosted = [m for m in plain.modules() if isinstance(m, nn.Linear) and m is not plain.lm_head]
    rest = sum(p.numel() for p in plain.parameters()) - sum(m.weight.numel() for m in hosted)
    assert sum(p.numel() for p in model.parameters()) == rest
    tensors = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    assert not tensors


def test_virtual_layers_are_real_ones_to_peft_and_transformers(pair):
    layer = pair[1].model.layers[0].self_attn.q_proj
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (32, 32)
    assert layer.weight.shape == (32, 32)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu")
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert "executor" in repr(layer)


def test_inference_mode_and_no_grad(pair):
    plain, model = pair
    batch = LLAMA.batch()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(2):
                assert torch.equal(model(**batch).logits, plain(**batch).logits)


def test_autocast_gives_what_plain_autocast_gives_within_its_rounding(pair):
    plain, model = pair
    batch = LLAMA.batch()
    expected, found = adapted(twin(plain), random_lora), adapted(model, random_lora)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference, result = expected(**batch), found(**batch)
    assert result.logits.dtype == reference.logits.dtype
    torch.testing.assert_close(result.logits, reference.logits, atol=2e-2, rtol=2e-2)
    result.loss.backward()
    assert all(p.grad.isfinite().all() for p in trainable(found).values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(pair, reentrant):
    plain, model = pair
    batch = LLAMA.batch()
    expected = gradients(adapted(twin(plain), random_lora), batch)
    shared = adapted(model, random_lora).train()
    shared.enable_input_require_grads()
    shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for _ in range(2):
        assert_same_gradients(expected, gradients(shared, batch))


def test_gradient_accumulation_and_several_forwards_before_a_backward(pair):
    plain, model = pair
    expected, found = adapted(twin(plain), random_lora), adapted(model, random_lora)
    for peft_model in (expected, found):
        losses = [peft_model(**LLAMA.batch(seed)).loss for seed in range(3)]
        (losses[0] + losses[2]).backward()
        losses[1].backward()
    assert_same_gradients({n: p.grad for n, p in trainable(expected).items()}, {n: p.grad for n, p in trainable(found).items()})


def test_loss_scaling_and_rows_of_nan_pass_through(pair):
    plain, model = pair
    expected, found = adapted(twin(plain), random_lora), adapted(model, random_lora)
    for peft_model in (expected, found):
        (peft_model(**LLAMA.batch()).loss * torch.tensor(float("inf"))).backward()
    for name, parameter in trainable(expected).items():
        assert torch.equal(parameter.grad.isfinite(), trainable(found)[name].grad.isfinite())


def test_several_threads_use_one_model(pair):
    plain, model = pair
    batches = [LLAMA.batch(seed) for seed in range(6)]
    expected = [plain(**batch).logits for batch in batches]
    results: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(3):
            results[i] = model(**batches[i]).logits

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, logits in enumerate(expected):
        torch.testing.assert_close(results[i], logits, atol=1e-5, rtol=0)


def test_a_tensor_changed_in_place_between_two_layers_is_not_taken_for_the_same_rows():
    class Changing(LlamaForCausalLM):
        def forward(self, x):
            attention = self.model.layers[0].self_attn
            first = attention.q_proj(x)
            x.mul_(2)
            return first, attention.k_proj(x), attention.v_proj(x)

    torch.manual_seed(0)
    plain = Changing(LLAMA.build().config).eval()
    with connected(plain, "inproc") as model, torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 3, 32)
            for found, expected in zip(model(x.clone()), plain(x.clone()), strict=True):
                assert torch.equal(found, expected)


def test_conditional_layers_break_a_learned_group_without_breaking_results(pair):
    plain, model = pair
    attention, reference = model.model.layers[0].self_attn, plain.model.layers[0].self_attn
    for names in [("q_proj", "k_proj", "v_proj")] * 2 + [("q_proj",)] * 3 + [("q_proj", "v_proj")] * 2:
        x = torch.randn(2, 3, 32)
        for name in names:
            assert torch.equal(getattr(attention, name)(x), getattr(reference, name)(x))


def test_q_k_v_and_gate_up_are_grouped_and_a_plain_mlp_is_one_call():
    plain = LLAMA.model()
    with symbiosis.Executor(plain) as executor:
        model = symbiosis.connect(executor)
        with torch.no_grad():
            model(**LLAMA.batch())  # learns which layers read the same rows
            calls = []
            for _ in range(2):
                before = executor.stats()["calls"]
                model(**LLAMA.batch())
                calls.append(executor.stats()["calls"] - before)
        assert calls == [3, 3]  # qkv of the first layer; per layer o, mlp and the next one's qkv
        shared = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "gate_proj"]))
        shared(**LLAMA.batch()).loss.backward()
        before = executor.stats()["calls"]
        shared(**LLAMA.batch()).loss.backward()
        # forward per layer: qkv, o, gate+up, down; backward the same, but nothing below the first adapter
        assert executor.stats()["calls"] - before == 16 - 1


def test_a_trained_bias_stays_with_its_tenant():
    plain = GPT2.model()
    original = {n: p.clone() for n, p in plain.named_parameters()}
    with symbiosis.Executor(plain) as executor:
        first, second = symbiosis.connect(executor), symbiosis.connect(executor)
        with torch.no_grad():
            for module in first.modules():
                if isinstance(module, VirtualLayer) and module.bias is not None:
                    module.bias.add_(1.0)
            changed, untouched = first(**GPT2.batch()).logits, second(**GPT2.batch()).logits
            assert torch.equal(untouched, plain(**GPT2.batch()).logits)
            reference = twin(plain)
            for name, parameter in reference.named_parameters():
                if name.endswith("bias") and "ln" not in name:
                    parameter.add_(1.0)
            torch.testing.assert_close(changed, reference(**GPT2.batch()).logits, atol=1e-4, rtol=0)
    assert all(torch.equal(p, original[n]) for n, p in plain.named_parameters())


def in_place(layer: nn.Module) -> None:
    layer.bias.mul_(3.0).add_(0.5)


def by_data(layer: nn.Module) -> None:
    layer.bias.data.mul_(3.0).add_(0.5)


def other_data(layer: nn.Module) -> None:
    layer.bias.data = 3.0 * layer.bias.data + 0.5


def other_parameter(layer: nn.Module) -> None:
    layer.bias = nn.Parameter(3.0 * layer.bias.detach() + 0.5)


def by_vector(layer: nn.Module) -> None:
    nn.utils.vector_to_parameters(3.0 * nn.utils.parameters_to_vector([layer.bias]) + 0.5, [layer.bias])


@pytest.mark.parametrize("path", ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"])
@pytest.mark.parametrize("change", [in_place, by_data, other_data, other_parameter, by_vector])
@pytest.mark.parametrize("then", [lambda model: model, copy.deepcopy, lambda model: model.to(torch.float32)])
def test_a_bias_that_a_tenant_changes_in_any_way_is_its_own(path, change, then):
    plain = GPT2.model()
    with connected(twin(plain), "inproc") as model, torch.no_grad():
        for each in (plain, model):
            change(each.get_submodule(path))
        torch.testing.assert_close(then(model)(**GPT2.batch()).logits, plain(**GPT2.batch()).logits, atol=1e-5, rtol=0)


def test_a_copy_with_unchanged_biases_leaves_them_to_the_executor():
    plain = GPT2.model()
    with connected(plain, "inproc") as model, torch.no_grad():
        copied = copy.deepcopy(model)
        assert all(m.has_shared_bias() for m in copied.modules() if isinstance(m, VirtualLinear | VirtualConv1D))
        assert torch.equal(copied(**GPT2.batch()).logits, plain(**GPT2.batch()).logits)


def test_a_bias_where_there_was_none_and_one_for_a_single_call(pair):
    plain, model = twin(pair[0]), pair[1]
    for each in (plain, model):
        each.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, 32), requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)
    reference = GPT2.model()
    name = "transformer.h.0.attn.c_attn.bias"
    with connected(twin(reference), "inproc") as other, torch.no_grad():
        replaced = {name: reference.get_parameter(name) + 1.0}
        found, expected = (torch.func.functional_call(each, replaced, (), GPT2.batch()).logits for each in (other, reference))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(other(**GPT2.batch()).logits, reference(**GPT2.batch()).logits, atol=1e-5, rtol=0)


def test_hooked_or_replaced_parts_of_a_block_are_called(pair):
    plain, model = twin(pair[0]), pair[1]
    called = []
    parts = [each.model.layers[0].mlp.up_proj for each in (plain, model)]
    for part in parts:
        part.forward = lambda x, forward=part.forward: 2 * forward(x)
    with torch.no_grad():
        torch.testing.assert_close(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits, atol=1e-5, rtol=0)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    try:
        with torch.no_grad():
            model(**LLAMA.batch())
    finally:
        handle.remove()
    assert called.count("VirtualLinear") == 2 * 7
    for part in parts:
        del part.forward
    model.model.layers[1].mlp.down_proj.register_full_backward_pre_hook(lambda *_: called.append("back"))
    shared = adapted(model, random_lora)
    shared(**LLAMA.batch()).loss.backward()
    assert called.count("back") == 1


def test_writing_to_a_weight_changes_only_this_tenants_layer():
    plain = LLAMA.model()
    with symbiosis.Executor(plain) as executor:
        first, second = symbiosis.connect(executor), symbiosis.connect(executor)
        weight = first.model.layers[0].self_attn.q_proj.weight
        with torch.no_grad():
            weight[0] = 7.0
            weight.data.mul_(2)
            assert not torch.equal(first(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits)
            assert torch.equal(second(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits)
            reference = twin(plain)
            own = reference.model.layers[0].self_attn.q_proj.weight
            own[0] = 7.0
            own.mul_(2)
            torch.testing.assert_close(first(**LLAMA.batch()).logits, reference(**LLAMA.batch()).logits, atol=1e-5, rtol=0)


def test_a_deep_copy_of_the_model_stays_virtual_and_works(pair):
    plain, model = pair
    clone = copy.deepcopy(adapted(model, random_lora))
    assert sum(p.numel() for p in clone.parameters()) < sum(p.numel() for p in plain.parameters())
    assert_same_gradients(gradients(adapted(twin(plain), random_lora), LLAMA.batch()), gradients(clone, LLAMA.batch()))


def test_another_dtype_at_the_tenant(pair):
    plain, model = pair
    cast = model.to(torch.bfloat16)
    result = cast(**LLAMA.batch()).logits
    assert result.dtype == torch.bfloat16
    expected = twin(plain).to(torch.bfloat16)(**LLAMA.batch()).logits
    torch.testing.assert_close(result.float(), expected.float(), atol=5e-2, rtol=5e-2)


def test_an_executor_in_bfloat16_gives_the_bits_of_the_plain_bfloat16_model():
    plain = LLAMA.model().to(torch.bfloat16)
    with connected(plain, "shm") as model:
        assert model.dtype == torch.bfloat16
        assert torch.equal(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits)
        expected, found = adapted(twin(plain), random_lora), adapted(model, random_lora)
        assert_same_gradients(gradients(expected, LLAMA.batch()), gradients(found, LLAMA.batch()), relative=2e-2)


def test_tenants_that_connect_and_build_adapters_at_once_are_isolated():
    plain = LLAMA.model()
    losses: list[float] = []

    def tenant(executor: symbiosis.Executor) -> None:
        model = get_peft_model(symbiosis.connect(executor), random_lora(("q_proj",)))
        assert all(p.device.type == "cpu" and p.abs().sum() > 0 for p in trainable(model).values())
        loss = model(**LLAMA.batch()).loss
        loss.backward()
        losses.append(float(loss.detach()))

    with symbiosis.Executor(plain) as executor:
        threads = [threading.Thread(target=tenant, args=(executor,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(losses) == 6


def test_rows_of_the_wrong_dtype_or_width_are_refused_by_name(pair):
    layer = pair[1].model.layers[0].self_attn.q_proj
    with pytest.raises(BadCall, match=r"q_proj computes in torch.float32, got torch.float64"):
        layer(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(BadCall, match=r"q_proj takes inputs of width 32"):
        layer(torch.zeros(2, 31))


def test_no_rows_at_all(pair):
    plain, model = pair
    x = torch.empty(0, 32)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj(x).shape == (0, 32)
    assert model.model.layers[0].mlp(x).shape == plain.model.layers[0].mlp(x).shape


@pytest.mark.parametrize("safe", [True, False])
def test_merging_into_a_virtual_layer_is_refused_with_an_alternative(pair, safe):
    shared = adapted(pair[1], random_lora)
    before = shared(**LLAMA.batch()).logits
    with pytest.raises(CannotMerge, match="save_pretrained"):
        shared.merge_and_unload(safe_merge=safe)
    with pytest.raises(CannotMerge):
        shared.merge_adapter(safe_merge=safe)
    assert torch.equal(shared(**LLAMA.batch()).logits, before)


def test_saving_the_whole_model_is_refused_with_an_alternative(pair, tmp_path):
    with pytest.raises(CannotSave, match="adapter"):
        pair[1].save_pretrained(tmp_path)


def test_lora_on_stacked_expert_weights_takes_them_to_the_tenant():
    plain = MIXTRAL.model()

    def config():
        return LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False
        )

    with connected(plain, "inproc") as model:
        expected, found = adapted(twin(plain), config), adapted(model, config)
        assert_same_gradients(gradients(expected, MIXTRAL.batch()), gradients(found, MIXTRAL.batch()))


def test_dropout_inside_a_block_is_drawn_by_the_tenant():
    plain = _made("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.5)()
    with connected(plain, "inproc") as model:
        plain.train()
        model.train()
        results = []
        for each in (plain, model):
            torch.manual_seed(5)
            results.append(each(**GPT2.batch()).logits)
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)
