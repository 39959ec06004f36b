"""The engine over several shards gives the answers of the engine with the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM

from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import CannotServe
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.serving.sharding.worker import EngineWorker
from tests.conftest import tiny_config
from tests.distributed.ranks import divide, sharded
from tests.parity.architectures import ARCHITECTURES

BY_NAME = {a.name: a for a in ARCHITECTURES}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OFTEN = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
KINDS = {
    "lora": LoraConfig(r=4, lora_alpha=6, target_modules=ALL, **OFTEN),
    "dora": LoraConfig(r=3, target_modules=["k_proj", "o_proj", "down_proj"], use_dora=True, **OFTEN),
    "bias": LoraConfig(r=2, target_modules=["q_proj", "o_proj"], lora_bias=True, **OFTEN),
    "ia3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], **OFTEN),
    "embedding": LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"], **OFTEN),
    "tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 40, 77], **OFTEN),
    "prefix": PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
PROMPTS = [[5, 6, 7], list(range(1, 24)), [9], [88, 2, 45, 3, 1]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plain model with four key-value heads, and the folders of its adapters."""
    torch.manual_seed(3)
    base = LlamaForCausalLM(tiny_config(num_key_value_heads=4)).eval()
    folder = tmp_path_factory.mktemp("adapters")
    for number, (name, config) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        model = get_peft_model(copy.deepcopy(base), copy.deepcopy(config)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = 0.4 * torch.randn_like(parameter)
                    parameter.copy_(parameter + noise if "magnitude" not in parameter_name else parameter * (1 + noise / 4))
        model.save_pretrained(folder / name)
    return base, folder


def complete(core: EngineCore, names: list[str | None], count: int = 10) -> list[tuple[list[int], list[float]]]:
    """Greedy completions of the prompts with these adapters, in shared batches: tokens and their log probabilities."""
    sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    sequences = [core.add(PROMPTS[i % len(PROMPTS)], sampling, adapter=name) for i, name in enumerate(names)]
    found: dict[str, list[float]] = {sequence.id: [] for sequence in sequences}
    while not core.is_idle():
        for sequence, _, logprobs in core.step():
            assert logprobs is not None
            found[sequence.id].append(logprobs.chosen)
    assert not core.take_failed()
    return [(sequence.outputs, found[sequence.id]) for sequence in sequences]


def assert_same(found, expected):
    for (tokens, logprobs), (tokens_0, logprobs_0) in zip(found, expected, strict=True):
        assert tokens == tokens_0
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(logprobs_0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mixed_batch_gets_the_answers_of_one_device(saved, size):
    base, folder = saved
    whole = EngineCore(copy.deepcopy(base), pages=200, page_size=4)
    with sharded(base, size, lambda part: EngineWorker(part).handlers) as (first, _):
        core = EngineCore(first, pages=200, page_size=4)
        for each in (whole, core):
            for name in KINDS:
                each.add_adapter(name, folder / name)
        names = [None, *KINDS] * 2
        expected = complete(whole, names)
        assert_same(complete(core, names), expected)
        assert_same(complete(core, names), expected)  # with cached prefixes


def test_a_stored_copy_of_the_base_embedding_is_not_served_again(saved):
    base, folder = saved
    first, _ = divide(base, 2)
    adapter = read_adapter(folder / "embedding", first.facts)  # PEFT stores the whole embedding with it
    assert any("equals the model's own" in warning for warning in adapter.warnings)


def test_a_model_that_cannot_be_divided_is_refused(saved):
    base, _ = saved
    with pytest.raises(CannotServe, match="has 4 key-value heads, which 5 shards cannot divide"):
        divide(base, 5)
    with pytest.raises(CannotServe, match="no tensor-parallel plan"):
        divide(BY_NAME["gpt2"].model(), 2)


@pytest.mark.parametrize(
    ("size", "name"),
    [(2, name) for name in ("mistral", "gemma2", "qwen2", "qwen3", "phi3", "starcoder2", "granite", "mixtral", "gpt_neox")],
)
def test_every_plan_of_transformers_serves(name, size):
    base = BY_NAME[name].model().eval()
    expected = complete(EngineCore(copy.deepcopy(base), pages=64, page_size=4), [None] * 4)
    with sharded(base, size, lambda part: EngineWorker(part).handlers) as (first, _):
        assert_same(complete(EngineCore(first, pages=64, page_size=4), [None] * 4), expected)
