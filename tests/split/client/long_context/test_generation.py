"""`generate` with a KV cache in host memory gives what it gives with transformers' own cache."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import symbiosis
from symbiosis.errors import CannotOffload, OutOfHostMemory, OutOfRange
from symbiosis.gpu import host_memory
from symbiosis.split.client.long_context import generation, host_cache
from symbiosis.split.client.long_context.host_cache import HostKVCache
from symbiosis.split.client.long_context.placement import HostPlacement
from tests.conftest import tiny_config

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(tiny_config()),
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=11)),
    "softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=32, sliding_window=13, attn_logit_softcapping=2.0)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4)),
}
PADDED = torch.tensor([[0] * 9 + [1] * 31, [1] * 40, [0] * 23 + [1] * 17])


def make(family):
    torch.manual_seed(0)
    return FAMILIES[family]().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(1, 128, (3, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def model():
    with symbiosis.Executor(make("llama")) as executor:
        connected = symbiosis.connect(executor)
        yield connected
        connected.symbiosis.close()


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(host_cache, "SEGMENT_TOKENS", 16)


def run(model, prompt, **options):
    defaults = {
        "max_new_tokens": 10,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    found = model.generate(prompt, **{"attention_mask": torch.ones_like(prompt), **defaults, **options})
    return found.sequences, torch.stack(found.logits), found.past_key_values


def assert_same(model, prompt, atol=1e-4, expected=None, **options):
    host = {name: options.pop(name) for name in ("kv_dtype", "kv_chunk_tokens") if name in options}
    tokens, logits, _ = run(expected or model, prompt, **options)
    found, found_logits, cache = run(model, prompt, **options, kv="host", **host)
    assert isinstance(cache, HostKVCache)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(found_logits, logits, rtol=0, atol=atol)


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_and_logits_in_chunks_with_padding(family, chunk, prompt, small_segments):
    plain = make(family)
    with symbiosis.Executor(copy.deepcopy(plain)) as executor:
        model = symbiosis.connect(executor)
        assert_same(model, prompt, expected=plain, kv_chunk_tokens=chunk)
        assert_same(model, prompt, expected=plain, kv_chunk_tokens=chunk, attention_mask=PADDED)
        model.symbiosis.close()


def test_without_the_compiled_kernel(model, prompt, processor):
    assert_same(model, prompt, attention_mask=PADDED)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.02), ("float16", 0.005), ("int8", 0.03)])
def test_numbers_are_stored_in_another_dtype(model, prompt, small_segments, dtype, atol):
    _, logits, _ = run(model, prompt)
    _, found, cache = run(model, prompt, kv="host", kv_dtype=dtype, kv_chunk_tokens=16)
    assert cache.layers[0].keys.dtype is host_cache.DTYPES[dtype]
    torch.testing.assert_close(found[0], logits[0], rtol=0, atol=atol)


def test_a_half_precision_model(prompt):
    plain = make("llama").bfloat16()
    with symbiosis.Executor(copy.deepcopy(plain)) as executor:
        model = symbiosis.connect(executor)
        _, logits, _ = run(plain, prompt)
        _, found, cache = run(model, prompt, kv="host", kv_chunk_tokens=16)
        assert cache.layers[0].keys.dtype is torch.bfloat16
        torch.testing.assert_close(found[0], logits[0], rtol=0, atol=0.03)
        model.symbiosis.close()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 2, "num_return_sequences": 2, "attention_mask": PADDED},
        {"repetition_penalty": 1.3, "kv_chunk_tokens": 5},
    ],
    ids=["beams", "samples", "beams of padded prompts", "penalty"],
)
def test_ways_of_decoding(model, prompt, options):
    host = {name: options[name] for name in ("kv_chunk_tokens",) if name in options}
    rest = {name: value for name, value in options.items() if name not in host}
    found = []
    for kv in ({"kv": "device"}, {"kv": "host", **host}):
        torch.manual_seed(5)
        mask = {"attention_mask": torch.ones_like(prompt)}
        found.append(
            model.generate(prompt, **{**mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **rest}, **kv)
        )
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    ],
    ids=["lora", "prefix", "prompt"],
)
def test_adapters(prompt, config):
    with symbiosis.Executor(make("llama")) as executor:
        torch.manual_seed(1)
        model = get_peft_model(symbiosis.connect(executor), config).eval()
        assert_same(model, prompt, kv_chunk_tokens=16)


def test_padding_with_prefix_tuning_is_refused(prompt):
    with symbiosis.Executor(make("llama")) as executor:
        model = get_peft_model(symbiosis.connect(executor), PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
        with pytest.raises(CannotOffload, match="padding before the prompt only"):
            model.generate(input_ids=prompt, attention_mask=PADDED, max_new_tokens=3, kv="host")


def test_a_conversation_continues_with_its_cache(model, prompt):
    tokens, _, cache = run(model, prompt, kv="host")
    longer = torch.cat([tokens, prompt[:, :5]], 1)
    expected, _, _ = run(model, longer)
    found, _, continued = run(model, longer, past_key_values=cache)
    assert continued is cache
    assert cache.get_seq_length() == longer.shape[1] + 9
    assert torch.equal(found, expected)


def test_memory_is_reserved_once(model, prompt):
    _, _, cache = run(model, prompt, kv="host")
    numbers = cache.layers[0]._memory[0].tensor
    assert numbers.shape == (2, 3, 2, 50, 16)
    assert cache.layers[0].keys.data_ptr() == numbers.data_ptr(), "keys are read in place"
    assert cache.nbytes == 2 * numbers.nbytes


def test_the_model_is_as_before_afterwards(model, prompt):
    before = dict(model.__dict__), model.config._attn_implementation
    with pytest.raises(ValueError, match="boom"):
        model.generate(prompt, max_new_tokens=3, kv="host", stopping_criteria=[_Boom()])
    assert (dict(model.__dict__), model.config._attn_implementation) == before
    assert_same(model, prompt)


class _Boom:
    def __call__(self, *_, **__):
        raise ValueError("boom")


def test_auto_chooses_host_where_the_cache_would_not_fit(model, prompt, monkeypatch):
    assert not isinstance(run(model, prompt)[2], HostKVCache)
    sizes = []
    monkeypatch.setattr(generation, "would_not_fit", lambda size, device: sizes.append(size) or True)
    assert isinstance(run(model, prompt)[2], HostKVCache)
    assert not isinstance(run(model, prompt, kv="device")[2], HostKVCache)
    assert not isinstance(run(model, prompt, cache_implementation="dynamic")[2], HostKVCache), "not supported: stays"
    assert sizes[0] == generation.CacheSize(3, 50, 3 * 50 * 2 * 2 * 2 * 16 * 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output_attentions": True}, "attention weights"),
        ({"prompt_lookup_num_tokens": 2}, "prompt lookup"),
        ({"cache_implementation": "static"}, "another cache"),
        ({"use_cache": False}, "without a cache"),
        ({"prefill_chunk_size": 4}, "kv_chunk_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(model, prompt, options, text):
    with pytest.raises(CannotOffload, match=text) as error:
        run(model, prompt, kv="host", **options)
    assert "\n" not in str(error.value)


def test_wrong_options_are_refused(model, prompt):
    for options in (
        {"kv": "disk"},
        {"kv": "host", "kv_dtype": "int4"},
        {"kv": "host", "kv_chunk_tokens": 0},
        {"kv_dtype": "int8"},
    ):
        with pytest.raises(OutOfRange):
            model.generate(prompt, max_new_tokens=2, **options)
    mask = torch.ones_like(prompt)
    mask[0, -3:] = 0
    with pytest.raises(CannotOffload, match="padding before the prompt"):
        model.generate(prompt, attention_mask=mask, max_new_tokens=2, kv="host")


def test_a_cache_larger_than_host_memory_is_refused(model, prompt, monkeypatch):
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    with pytest.raises(OutOfHostMemory, match="kv_dtype"):
        model.generate(prompt, max_new_tokens=2, kv="host")


def test_placement_calls_the_executor_instead_of_mapped_weights(prompt):
    """As decode after a prefill in direct mode does: the client part computes here, base layers in the executor."""
    with symbiosis.Executor(make("llama")) as executor:
        model = symbiosis.connect(executor, mode="direct")
        with torch.no_grad():
            expected = model(prompt).logits
            assert executor.stats()["calls"] == 0
            with HostPlacement(model, model.symbiosis):
                torch.testing.assert_close(model(prompt).logits, expected, rtol=0, atol=1e-5)
                assert executor.stats()["calls"] > 0
            calls = executor.stats()["calls"]
            assert torch.equal(model(prompt).logits, expected)
            assert executor.stats()["calls"] == calls
        model.symbiosis.close()
