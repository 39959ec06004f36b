"""A packed pass gives every session the losses and gradients it would have alone, whatever the model and the method."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Llama4ForCausalLM, Llama4TextConfig, LlamaForCausalLM

from symbiosis.errors import CannotTrain
from symbiosis.finetuning.adapter_factory import AdapterFactory
from symbiosis.finetuning.packed.attention import batched
from symbiosis.finetuning.packed.model import PackedModel
from tests.conftest import tiny_config
from tests.finetuning.peft_reference import examples, max_relative_error, run_peft, slice_of
from tests.parity.architectures import ARCHITECTURES, MORE

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
METHODS = {
    "LoRA": LoraConfig(r=3, target_modules=ALL, init_lora_weights=False),
    "rsLoRA with a bias of its own": LoraConfig(r=3, target_modules=ALL, use_rslora=True, lora_bias=True),
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
    """With biases, which DoRA and IA3 treat each in their way."""
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
def crowd(plain, packed):
    """All methods in one pass, two examples or more each."""
    maker = AdapterFactory(plain)
    data = {name: examples(5 + at, 9, 2 + at) for at, name in enumerate(METHODS)}
    shares = [slice_of(maker.create(config, seed=7), data[name]) for name, config in METHODS.items()]
    return data, dict(zip(METHODS, packed.compute(shares), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_one_pass(name, plain, crowd):
    data, outcomes = crowd
    _, losses, gradients = run_peft(plain, METHODS[name], data[name])
    assert outcomes[name].losses == pytest.approx(losses, rel=1e-5)
    assert max_relative_error(outcomes[name].gradients, gradients) < 5e-5
    assert outcomes[name].finite


def test_a_model_in_bfloat16_trains_adapters_in_float32():
    torch.manual_seed(3)
    model = LlamaForCausalLM(tiny_config(attention_bias=True)).to(torch.bfloat16).eval()
    maker, data = AdapterFactory(model), examples(5, 9)
    shares = [slice_of(maker.create(config, seed=7), data) for config in METHODS.values()]
    assert all(p.dtype is torch.float32 for each in shares for p in each.adapter.parameters.values())
    for config, outcome in zip(METHODS.values(), PackedModel(model).compute(shares), strict=True):
        _, losses, gradients = run_peft(model, config, data)
        assert outcome.losses == pytest.approx(losses, rel=1e-2)
        assert max_relative_error(outcome.gradients, gradients) < 0.2


@pytest.mark.parametrize("name", PACKED)
def test_architectures(name):
    model, config = BY_NAME[name].model(), LoraConfig(r=4, target_modules=list(BY_NAME[name].targets), init_lora_weights=False)
    config.task_type = "CAUSAL_LM"
    maker, data = AdapterFactory(model), examples(9, 4, 12)
    shares = [
        slice_of(maker.create(config, seed=seed), rows) for seed, rows in ((3, examples(6, 7)), (7, data), (4, examples(5)))
    ]
    outcome = PackedModel(model).compute(shares)[1]
    _, losses, gradients = run_peft(model, config, data)
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    assert max_relative_error(outcome.gradients, gradients) < 5e-5


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused(name):
    with pytest.raises(CannotTrain):
        PackedModel(BY_NAME[name].model())


@pytest.mark.parametrize(
    ("said", "reason"), [({}, "window"), ({"layer_types": ["full_attention"] * 2}, "attn_temperature_tuning")]
)
def test_chunks_and_temperatures_by_row_are_refused(said, reason):
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
    outcome = PackedModel(model).compute([slice_of(AdapterFactory(model).create(config, seed=7), data)])[0]
    _, losses, gradients = run_peft(model, config, data)
    assert outcome.losses == pytest.approx(losses, rel=1e-4)
    assert max_relative_error(outcome.gradients, gradients) < 1e-4


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_none_reach_nobody_else(poison, plain, packed):
    """To the bit: the others get what they get beside harmless rows."""
    maker = AdapterFactory(plain)
    good = [slice_of(maker.create(METHODS[name], seed=7), examples(5, 8)) for name in ("LoRA", "DoRA", "IA3", "prefix tuning")]
    for name in ("LoRA", "IA3", "prefix tuning", "prompt tuning"):
        bad = slice_of(maker.create(METHODS[name], seed=1), examples(6, 3))
        mixed = [*good[:2], bad, *good[2:]]
        harmless = packed.compute(mixed)
        with torch.no_grad():
            for parameter in bad.adapter.parameters.values():
                parameter.fill_(poison)
        found = packed.compute(mixed)
        assert poison == 3e38 or not found[2].finite
        for at in (0, 1, 3, 4):
            assert found[at].finite
            assert found[at].losses == harmless[at].losses
            for parameter, gradient in harmless[at].gradients.items():
                assert torch.equal(found[at].gradients[parameter], gradient)


def test_dropout_depends_on_the_example_and_not_on_the_pass(plain, packed):
    config = LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, lora_dropout=0.4, task_type="CAUSAL_LM")
    adapter = AdapterFactory(plain).create(config, seed=7)
    both = slice_of(adapter, examples(5, 8))
    together = packed.compute([slice_of(AdapterFactory(plain).create(config, seed=7), examples(4)), both])[1]
    alone = [packed.compute([type(both)(adapter, (piece,))])[0] for piece in both.pieces]
    assert together.losses == pytest.approx([outcome.losses[0] for outcome in alone], rel=1e-5)
    summed = {name: alone[0].gradients[name] + alone[1].gradients[name] for name in together.gradients}
    assert max_relative_error(dict(together.gradients), summed) < 1e-5
    still = LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM")
    undropped = packed.compute([slice_of(AdapterFactory(plain).create(still, seed=7), examples(5, 8))])[0]
    assert together.losses != pytest.approx(undropped.losses, rel=1e-3)
    assert together.losses == pytest.approx(undropped.losses, rel=0.5)


def test_the_model_itself_is_not_touched(plain):
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
    found = batched(q, k, v, 3, 0.3)
    parts = [batched(*(x[:, start : start + 5] for x in (q, k, v)), 1, 0.3) for start in (0, 5, 10)]
    assert torch.allclose(found, torch.cat(parts, dim=1), atol=1e-6)
