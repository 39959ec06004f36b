"""Direct mode in the executor's process: tenants read the executor's weights and never change them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import symbiosis
from symbiosis.errors import BadMessage, DirectRefused, SymbiosisError
from symbiosis.split.client.direct_mode import MappedParameter, open_mapping
from tests.conftest import tiny_config

IDS = torch.arange(20).view(2, 10)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2)).eval()


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=128, num_key_value_heads=2, num_local_experts=4, **sizes)).eval()


@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_results_equal_the_plain_models_without_layer_calls(make):
    plain = make()
    with symbiosis.Executor(copy.deepcopy(plain), host_embeddings=make is llama) as executor:
        model = symbiosis.connect(executor, mode="direct")
        before = executor.stats()["calls"]
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=0)
        assert executor.stats()["calls"] == before


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"init_lora_weights": "pissa"}], ids=["lora", "dora", "pissa"])
def test_adapters_train_alike_and_never_touch_the_shared_weights(settings):
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], **settings)
    plain, shared = llama(), llama()
    torch.manual_seed(3)
    plain = get_peft_model(plain, config)
    with symbiosis.Executor(shared) as executor:
        originals = {name: weight.clone() for name, weight in shared.state_dict().items()}
        model = symbiosis.connect(executor, mode="direct")
        torch.manual_seed(3)
        model = get_peft_model(model, config)
        for each in (plain, model):
            torch.manual_seed(4)
            for name, parameter in each.named_parameters():
                if "lora_B" in name and not settings:
                    torch.nn.init.normal_(parameter, std=0.02)
            each(IDS, labels=IDS).loss.backward()
        ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            model.base_model.model.model.layers[0].mlp.up_proj.weight.mul_(2)  # becomes the tenant's own
        changed, again = model(IDS).logits, symbiosis.connect(executor, mode="direct")(IDS).logits
        assert not torch.equal(changed, again)
        for name, weight in shared.state_dict().items():
            assert torch.equal(weight, originals[name]), name


def test_a_copy_of_the_model_shares_the_memory_too():
    with symbiosis.Executor(llama()) as executor:
        model = symbiosis.connect(executor, mode="direct")
        twin = copy.deepcopy(model)
        first, second = model.model.layers[0].self_attn.q_proj, twin.model.layers[0].self_attn.q_proj
        assert first._direct.data_ptr() == second._direct.data_ptr()
        assert torch.equal(model(IDS).logits, twin(IDS).logits)


def test_direct_mode_is_refused_where_it_is_forbidden_or_impossible():
    with symbiosis.Executor(llama(), direct=False) as executor:
        with pytest.raises(DirectRefused, match="provider"):
            symbiosis.connect(executor, mode="direct")
        with pytest.raises(SymbiosisError, match="expected one of auto, direct, executor"):
            symbiosis.connect(executor, mode="fast")
    with symbiosis.Executor(llama(), weights=False) as executor, pytest.raises(DirectRefused):
        symbiosis.connect(executor, mode="direct")
    with symbiosis.Executor(llama()) as executor, pytest.raises(DirectRefused, match="GPU"):
        symbiosis.connect(executor.listen("shm://"), mode="direct")


def test_a_mapped_parameter_moves_when_it_is_made_trainable():
    memory = torch.ones(4)
    parameter = MappedParameter.over(memory)
    assert parameter.data_ptr() == memory.data_ptr()
    assert not parameter.requires_grad
    parameter.requires_grad = False
    assert parameter.is_mapped
    parameter.requires_grad_(True)
    assert parameter.requires_grad
    with torch.no_grad():
        parameter.mul_(3)
    assert memory.tolist() == [1.0] * 4
    frozen = MappedParameter.over(memory)
    twin = copy.deepcopy(frozen)
    assert not twin.is_mapped
    assert twin.data_ptr() != memory.data_ptr()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"allocations": 3, "base": [], "client": []},
        {"allocations": [["zz", 1]], "base": [], "client": []},
        {"allocations": [], "base": [[0, "weight", 0, 0, "float32", [2, 2]]], "client": []},
        {"allocations": [], "base": [[0]], "client": []},
    ],
)
def test_a_malformed_description_of_memory_is_refused(body):
    with pytest.raises(BadMessage, match="malformed"):
        open_mapping(body, torch.device("cuda", 0))
