"""Which layers of a model are hosted, and that the result is the plain model's whatever the split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.errors import CannotSplit
from symbiosis.models.split import split
from tests.lora import random_lora
from tests.parity.architectures import ARCHITECTURES, MORE
from tests.parity.pair import adapted, assert_same_gradients, connected, gradients, twin

LLAMA = ARCHITECTURES[0]
GPT2 = next(a for a in ARCHITECTURES if a.name == "gpt2")


def test_head_and_embeddings_in_the_executor():
    for plain in (LLAMA.model(), GPT2.model()):
        architecture = GPT2 if plain.config.model_type == "gpt2" else LLAMA
        with connected(plain, "inproc", host_head=True, host_embeddings=True) as model:
            norms = sum(p.numel() for p in model.parameters())
            assert norms < 0.2 * sum(p.numel() for p in plain.parameters())
            assert torch.equal(model(**architecture.batch()).logits, plain(**architecture.batch()).logits)
            found = adapted(model, lambda a=architecture: random_lora(tuple(a.targets), r=2))
            expected = adapted(twin(plain), lambda a=architecture: random_lora(tuple(a.targets), r=2))
            assert_same_gradients(gradients(expected, architecture.batch()), gradients(found, architecture.batch()))


def test_layers_with_a_forward_of_their_own_stay_with_the_tenant_and_say_why():
    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    class Routed(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.router = Router(32, 4)

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs), self.router(torch.ones(1, 32))

    plain = Routed(LLAMA.build().config).eval()
    with symbiosis.Executor(plain) as executor:
        assert executor.split.not_hosted["router"] == "Router has a forward of its own"
        assert "router" in executor.split.summary()
        model = symbiosis.connect(executor)
        assert torch.equal(model(**LLAMA.batch())[1][0], plain(**LLAMA.batch())[1][0])


def test_layers_whose_weight_is_read_directly_stay_with_the_tenant():
    class Reading(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.mixer = nn.Linear(32, 32)
            self.attention = nn.MultiheadAttention(32, 4)

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            x = torch.ones(2, 1, 32)
            return output.logits + (self.mixer.weight @ self.mixer.weight.T).sum() + self.attention(x, x, x)[0].sum()

    plain = Reading(LLAMA.build().config).eval()
    with symbiosis.Executor(plain) as executor:
        assert "read directly by Reading" in executor.split.not_hosted["mixer"]
        assert "read directly by MultiheadAttention" in executor.split.not_hosted["attention.out_proj"]
        model = symbiosis.connect(executor)
        batch = {"input_ids": LLAMA.batch()["input_ids"]}
        assert torch.equal(model(**batch), plain(**batch))


def test_one_module_in_several_places_is_one_layer():
    class Twice(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[1].mlp = self.model.layers[0].mlp

    plain = Twice(LLAMA.build().config).eval()
    with connected(plain, "inproc") as model:
        assert model.model.layers[1].mlp is model.model.layers[0].mlp
        for _ in range(2):
            assert torch.equal(model(**LLAMA.batch()).logits, plain(**LLAMA.batch()).logits)
        expected, found = adapted(twin(plain), random_lora), adapted(model, random_lora)
        assert_same_gradients(gradients(expected, LLAMA.batch()), gradients(found, LLAMA.batch()))


def test_a_model_without_layers_to_host_is_refused():
    class Empty(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers = nn.ModuleList()

    with pytest.raises(CannotSplit, match="no linear"):
        symbiosis.Executor(Empty(LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8)))


@pytest.mark.parametrize("name", ["llama4", "dbrx", "jetmoe", "granitemoe", "bloom", "mamba", "mamba2"])
def test_nearly_all_weights_of_linear_layers_and_experts_are_hosted(name):
    plain = next(a for a in MORE if a.name == name).model()
    split_model = split(plain)
    head, embeddings = plain.get_output_embeddings().weight, plain.get_input_embeddings().weight
    weights = {p.data_ptr(): p.numel() for p in plain.parameters() if p.dim() >= 2 and p is not head and p is not embeddings}
    for module in plain.modules():
        if isinstance(module, nn.Conv1d):
            weights.pop(module.weight.data_ptr())
    for path, parameter in plain.named_parameters():
        if path.endswith("A_log"):
            weights.pop(parameter.data_ptr(), None)
    hosted = {w.data_ptr() for layer in split_model.layers for w in layer.weights.values()}
    assert sum(size for place, size in weights.items() if place in hosted) >= 0.9 * sum(weights.values())


def test_a_weight_that_is_read_in_a_branch_that_runs_stays_with_the_tenant():
    class Reading(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.mixer, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, input_ids=None, **kwargs):
            x = torch.ones(1, 32)
            if self.training:
                x = x @ self.mixer.weight[:, :32].T
            if input_ids is None:
                x = x @ self.other.weight[:, :32].T
            out = super().forward(input_ids=input_ids, **kwargs)
            out.logits = out.logits + self.mixer(x).sum() + self.other(x).sum()
            return out

    found = split(Reading(LLAMA.build().config).eval())
    assert found.not_hosted["mixer"] == "its weight is read directly by Reading"
    assert "other" in [path for layer in found.layers for path in layer.spec.paths]
