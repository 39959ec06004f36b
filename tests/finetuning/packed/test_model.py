"""Every session's losses and gradients in a packed batch are those of PEFT alone, for all methods and architectures."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Llama4ForCausalLM, Llama4TextConfig, LlamaForCausalLM

from symbiosis.errors import CannotTrain
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.packed.attention import attend_batched
from symbiosis.finetuning.packed.model import PackedModel
from tests.conftest import tiny_config
from tests.finetuning.peft_reference import examples, max_relative_error, run_peft, slice_of
from tests.parity.architectures import ARCHITECTURES, MORE

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = {
    "LoRA": LoraConfig(r=3, target_modules=ALL, init_lora_weights=False),
    "rsLoRA with a bias": LoraConfig(r=3, target_modules=ALL, use_rslora=True, lora_bias=True),
    "LoRA on the head": LoraConfig(r=3, target_modules=["v_proj", "lm_head"], init_lora_weights=False),
    "orthogonal start": LoraConfig(r=4, target_modules="all-linear", init_lora_weights="orthogonal"),
    "DoRA": LoraConfig(r=3, target_modules=ALL, use_dora=True, init_lora_weights=False),
    "IA3": peft.IA3Config(target_modules=ALL, feedforward_modules=["up_proj", "down_proj"]),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4),
    "prefix tuning by an encoder": peft.PrefixTuningConfig(num_virtual_tokens=4, prefix_projection=True),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16),
}
for _config in METHODS.values():
    _config.task_type = "CAUSAL_LM"

PACKED = ["llama", "mistral", "gemma2", "qwen2", "phi3", "mixtral", "gpt2", "opt", "gpt_neox", "cohere", "deepseek_v3"]
REFUSED = ["bert", "t5", "gpt_oss", "bloom", "gptj", "mamba", "albert"]
BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *MORE]}


@pytest.fixture(scope="module")
def plain():
    """With biases: DoRA and IA3 treat them differently."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny_config(attention_bias=True, mlp_bias=True)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def packed(plain):
    return PackedModel(plain)


@pytest.fixture(scope="module")
def all_methods(plain, packed):
    """All methods in one batch, two examples or more each."""
    factory = AdapterFactory(plain)
    data = {name: examples(5 + at, 9, 2 + at) for at, name in enumerate(METHODS)}
    slices = [slice_of(factory.create(config, seed=7), data[name]) for name, config in METHODS.items()]
    return data, dict(zip(METHODS, packed.compute(slices), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_one_batch(name, plain, all_methods):
    data, results = all_methods
    _, losses, gradients = run_peft(plain, METHODS[name], data[name])
    assert results[name].losses == pytest.approx(losses, rel=1e-5)
    assert max_relative_error(results[name].gradients, gradients) < 5e-5
    assert results[name].is_finite


def test_a_model_in_bfloat16_trains_adapters_in_float32():
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny_config(attention_bias=True)).to(torch.bfloat16).eval()
    factory, data = AdapterFactory(model), examples(5, 9)
    slices = [slice_of(factory.create(config, seed=7), data) for config in METHODS.values()]
    assert all(p.dtype is torch.float32 for each in slices for p in each.adapter.parameters.values())
    for config, result in zip(METHODS.values(), PackedModel(model).compute(slices), strict=True):
        _, losses, gradients = run_peft(model, config, data)
        assert result.losses == pytest.approx(losses, rel=1e-2)
        assert max_relative_error(result.gradients, gradients) < 0.2


@pytest.mark.parametrize("name", PACKED)
def test_architectures(name):
    model, config = BY_NAME[name].model(), LoraConfig(r=4, target_modules=list(BY_NAME[name].targets), init_lora_weights=False)
    config.task_type = "CAUSAL_LM"
    factory, data = AdapterFactory(model), examples(9, 4, 12)
    slices = [
        slice_of(factory.create(config, seed=seed), rows) for seed, rows in ((3, examples(6, 7)), (7, data), (4, examples(5)))
    ]
    result = PackedModel(model).compute(slices)[1]
    _, losses, gradients = run_peft(model, config, data)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert max_relative_error(result.gradients, gradients) < 5e-5


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_rejected(name):
    with pytest.raises(CannotTrain):
        PackedModel(BY_NAME[name].model())


@pytest.mark.parametrize(
    ("said", "reason"), [({}, "window"), ({"layer_types": ["full_attention"] * 2}, "attn_temperature_tuning")]
)
def test_chunked_attention_and_temperature_tuning_are_rejected(said, reason):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8, "attention_chunk_size": 8, "pad_token_id": 0}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **more, **said, num_hidden_layers=2)).eval()
    with pytest.raises(CannotTrain, match=reason):
        PackedModel(model)


def test_a_prefix_before_a_window():
    torch.manual_seed(2)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_hidden_layers=6, head_dim=8, sliding_window=6)).eval()
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    data = examples(9, 14)
    result = PackedModel(model).compute([slice_of(AdapterFactory(model).create(config, seed=7), data)])[0]
    _, losses, gradients = run_peft(model, config, data)
    assert result.losses == pytest.approx(losses, rel=1e-4)
    assert max_relative_error(result.gradients, gradients) < 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_nan_and_overflow_stay_in_their_session(poison, plain, packed):
    """Bitwise: the other sessions' results do not depend on the bad session's values."""
    factory = AdapterFactory(plain)
    good = [
        slice_of(factory.create(METHODS[name], seed=7), examples(5, 8)) for name in ("LoRA", "DoRA", "IA3", "prefix tuning")
    ]
    for name in ("LoRA", "IA3", "prefix tuning", "prompt tuning"):
        bad = slice_of(factory.create(METHODS[name], seed=1), examples(6, 3))
        mixed = [*good[:2], bad, *good[2:]]
        harmless = packed.compute(mixed)
        with torch.no_grad():
            for parameter in bad.adapter.parameters.values():
                parameter.fill_(poison)
        found = packed.compute(mixed)
        assert poison == 3e38 or not found[2].is_finite
        for at in (0, 1, 3, 4):
            assert found[at].is_finite
            assert found[at].losses == harmless[at].losses
            for parameter, gradient in harmless[at].gradients.items():
                assert torch.equal(found[at].gradients[parameter], gradient)


def test_dropout_depends_on_the_example_and_not_on_the_batch(plain, packed):
    config = LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, lora_dropout=0.4, task_type="CAUSAL_LM")
    adapter = AdapterFactory(plain).create(config, seed=7)
    both = slice_of(adapter, examples(5, 8))
    together = packed.compute([slice_of(AdapterFactory(plain).create(config, seed=7), examples(4)), both])[1]
    alone = [packed.compute([type(both)(adapter, (example,))])[0] for example in both.examples]
    assert together.losses == pytest.approx([result.losses[0] for result in alone], rel=1e-5)
    summed = {name: alone[0].gradients[name] + alone[1].gradients[name] for name in together.gradients}
    assert max_relative_error(dict(together.gradients), summed) < 1e-5
    still = LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM")
    undropped = packed.compute([slice_of(AdapterFactory(plain).create(still, seed=7), examples(5, 8))])[0]
    assert together.losses != pytest.approx(undropped.losses, rel=1e-3)
    assert together.losses == pytest.approx(undropped.losses, rel=0.5)


def test_the_original_model_is_unchanged(plain):
    model = copy.deepcopy(plain).requires_grad_(True)
    kinds, before = {name: type(m) for name, m in model.named_modules()}, copy.deepcopy(model.state_dict())
    adapter = AdapterFactory(model).create(METHODS["DoRA"], seed=7)
    PackedModel(model).compute([slice_of(adapter, examples(5))])
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config._attn_implementation != "symbiosis_packed"


def test_sequences_of_one_length_attend_as_a_batch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, 15, 8) for heads in (4, 2, 2))
    found = attend_batched(q, k, v, 3, 0.3)
    parts = [attend_batched(*(x[:, start : start + 5] for x in (q, k, v)), 1, 0.3) for start in (0, 5, 10)]
    assert torch.allclose(found, torch.cat(parts, dim=1), atol=1e-6)
