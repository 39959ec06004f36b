"""KV caches that grow in place equal those of transformers to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PrefixTuningConfig
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from symbiosis.split.client.kv_cache import PreallocatedCacheLayer, preallocate, preallocate_caches
from tests.lora import random_lora
from tests.parity.architectures import ARCHITECTURES, MORE
from tests.parity.pair import adapted, assert_same_gradients, connected, trainable, twin

DECODERS = [a for a in ARCHITECTURES + MORE if a.generates]
LLAMA = ARCHITECTURES[0]
GPT2 = next(a for a in ARCHITECTURES if a.name == "gpt2")  # without grouped heads attention saves the cache itself
GENERATION_MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
PREFIXED = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


def rows(count, tokens, generator, width=8):
    return torch.randn(count, 2, tokens, width, generator=generator)


def grown(length=5, batch=2):
    """A layer that has been continued in place, and transformers' own with the same in it."""
    generator = torch.Generator().manual_seed(0)
    layers = PreallocatedCacheLayer(), DynamicLayer()
    with torch.no_grad():
        for tokens in (length, 1, 1):
            new = rows(batch, tokens, generator), rows(batch, tokens, generator)
            for layer in layers:
                layer.update(*new)
    return layers


def assert_equal_layers(found, expected):
    assert found.get_seq_length() == expected.get_seq_length()
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


def held(cache):
    layers = getattr(cache, "self_attention_cache", cache).layers
    return [(layer.keys, layer.values) for layer in layers if hasattr(layer, "keys")]


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_operations_leaves_what_it_leaves_in_a_dynamic_layer(seed):
    generator = torch.Generator().manual_seed(seed)
    preallocated, plain = PreallocatedCacheLayer(), DynamicLayer()
    modes = [torch.no_grad, torch.no_grad, torch.inference_mode, torch.enable_grad]

    def draw(bound):
        return int(torch.randint(bound, (), generator=generator))

    for _ in range(150):
        kind, count = draw(10), plain.keys.shape[0] if plain.is_initialized else 3
        if kind == 0 and plain.get_seq_length() > 4:
            preallocated.crop(-(removed := 1 + draw(3)))
            plain.crop(-removed)
        elif kind == 1 and count > 1:
            order = torch.randint(count, (count,), generator=generator)
            preallocated.reorder_cache(order)
            plain.reorder_cache(order)
        elif kind == 2 and plain.is_initialized:
            some = torch.randperm(count, generator=generator)[: 1 + draw(count)]
            for layer in (preallocated, plain):
                layer.batch_select_indices(some)
                layer.batch_repeat_interleave(3 if len(some) < 3 else 1)
        elif kind == 3:
            preallocated = copy.deepcopy(preallocated)
        else:
            tokens = 1 if draw(4) else 1 + draw(90)
            new = rows(count, tokens, generator), rows(count, tokens, generator, width=4)
            with modes[draw(4)]():
                for found, expected in zip(preallocated.update(*new), plain.update(*new), strict=True):
                    assert torch.equal(found, expected)
        if plain.is_initialized:
            assert_equal_layers(preallocated, plain)


@pytest.mark.parametrize("architecture", DECODERS, ids=lambda a: a.name)
def test_generation_and_what_it_leaves_in_the_cache_are_equal_to_the_bit(architecture):
    plain = architecture.model()
    preallocated = twin(plain)
    preallocate_caches(preallocated)
    prompt = architecture.batch()["input_ids"]
    for mode in GENERATION_MODES.values():
        found, expected = (generated(model, prompt, **mode) for model in (preallocated, plain))
        assert torch.equal(found.sequences, expected.sequences)
        if "past_key_values" not in expected:  # Mamba has states
            continue
        for ours, theirs in zip(held(found.past_key_values), held(expected.past_key_values), strict=True):
            assert all(map(torch.equal, ours, theirs))


def generated(model, prompt, **settings):
    torch.manual_seed(0)
    return model.generate(prompt, max_new_tokens=10, min_new_tokens=10, return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("method", ["draft", "lookup"])
def test_assisted_generation_removes_rejected_drafts(method):
    plain = LLAMA.model()
    preallocated, prompt = twin(plain), LLAMA.batch(rows=1)["input_ids"].repeat(1, 2)
    preallocate_caches(preallocated)
    found = []
    for model in (preallocated, plain):
        guesses = {"assistant_model": model} if method == "draft" else {"prompt_lookup_num_tokens": 3}
        found.append(generated(model, prompt, do_sample=False, **guesses))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for ours, theirs in zip(held(found[0].past_key_values), held(found[1].past_key_values), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_connected_model_preallocates_by_default_and_others_do_not():
    plain, prompt = LLAMA.model(), LLAMA.batch()["input_ids"]
    own = DynamicCache(config=plain.config)
    with connected(plain, "inproc") as model, torch.no_grad():
        caches = [model(prompt).past_key_values, model(prompt, past_key_values=own, return_dict=False)[1]]
        caches.append(generated(adapted(model, random_lora), prompt, do_sample=False).past_key_values)
        assert caches[1] is own
        assert {type(layer) for cache in caches for layer in cache.layers} == {PreallocatedCacheLayer}
        assert {type(layer) for layer in plain(prompt).past_key_values.layers} == {DynamicLayer}


def test_new_tokens_are_written_in_place_and_attention_reads_them_there():
    model, batch = LLAMA.model(), LLAMA.batch()
    preallocate_caches(model)
    with torch.no_grad():
        output = model(batch["input_ids"], use_cache=True)
        layer = output.past_key_values.layers[0]
        model(batch["input_ids"][:, :1], past_key_values=output.past_key_values)
        start = layer.keys.data_ptr(), layer.values.data_ptr()
        for _ in range(5):
            model(batch["input_ids"][:, :1], past_key_values=output.past_key_values)
            output.past_key_values.crop(-1)
        model(batch["input_ids"][:, :4], past_key_values=output.past_key_values)
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) == start
    _, heads, length, width = layer.keys.shape
    spare = layer.keys.stride(1) // width
    assert spare > length == 17
    assert layer.keys.stride() == (heads * spare * width, spare * width, width, 1)
    assert layer.keys.flatten(0, 1).data_ptr() == start[0]  # as matrices of one batch, without a copy


def test_spare_capacity_is_a_fraction_of_the_length():
    layer, generator = PreallocatedCacheLayer(), torch.Generator().manual_seed(0)
    moves, where = 0, None
    with torch.no_grad():
        layer.update(rows(1, 1000, generator), rows(1, 1000, generator))
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes  # a prefill alone allocates no spare capacity
        for _ in range(1000):
            layer.update(rows(1, 1, generator), rows(1, 1, generator))
            moves, where = moves + (layer.keys.data_ptr() != where), layer.keys.data_ptr()
            assert layer.keys.untyped_storage().nbytes() < 1.13 * layer.keys.nbytes
    assert moves < 10


@pytest.mark.parametrize("link", ["inproc", "shm"])
def test_a_prefix_of_peft_is_continued(link):
    plain, batch = LLAMA.model(), LLAMA.batch()
    with connected(plain, link) as model:
        found, expected = (adapted(m, lambda: PrefixTuningConfig(**PREFIXED)) for m in (model, twin(plain)))
        for mode in GENERATION_MODES.values():
            sequences = [generated(m, batch["input_ids"], **mode).sequences for m in (found, expected)]
            assert torch.equal(*sequences)
        assert_same_gradients(through_a_cache(expected, batch), through_a_cache(found, batch))


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=lambda a: a.name)
def test_gradients_flow_through_a_cache(architecture):
    plain, batch = architecture.model(), architecture.batch()
    preallocated = twin(plain)
    preallocate_caches(preallocated)
    found, expected = (adapted(model, lambda: random_lora(tuple(architecture.targets))) for model in (preallocated, plain))
    assert_same_gradients(through_a_cache(expected, batch), through_a_cache(found, batch), relative=0)


def through_a_cache(model, batch):
    """Decode a little, train on the next tokens in two parts, and decode again before the backward pass."""
    ids, parts = batch["input_ids"], []
    model.zero_grad()
    with torch.no_grad():
        cache = model(input_ids=ids[:, :3], use_cache=True).past_key_values
        for place in (3, 4):
            cache = model(input_ids=ids[:, place : place + 1], past_key_values=cache).past_key_values
    for part in (slice(5, 8), slice(8, 12)):
        parts.append(model(input_ids=ids[:, part], past_key_values=cache).logits)
    with torch.no_grad():
        for _ in range(2):
            model(input_ids=ids[:, :1], past_key_values=cache)
    torch.cat(parts, 1).square().mean().backward()
    return {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}


def test_copies_and_earlier_states_are_not_written_over():
    first, _ = grown()
    earlier, length = (first.keys, first.values), first.get_seq_length()
    generator, branches = torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for layer in (copy.copy(first), copy.deepcopy(first), first, first):
            layer.keys, layer.values = earlier if layer is first else (layer.keys, layer.values)
            new = rows(2, 1, generator), rows(2, 1, generator)
            expected = [torch.cat(pair, 2) for pair in zip(earlier, new, strict=True)]
            branches.append((layer.update(*new), expected))
    for found, expected in branches:
        assert found[0].shape[2] == length + 1
        assert all(map(torch.equal, found, expected))


def test_a_dtype_that_is_wider_widens_all_and_a_batch_that_does_not_fit_is_refused():
    layer, plain = grown()
    wide = torch.randn(2, 2, 1, 8, dtype=torch.float64)
    with torch.no_grad():
        layer.update(wide, wide)
        plain.update(wide, wide)
        assert layer.keys.dtype is torch.float64
        assert_equal_layers(layer, plain)
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            layer.update(wide[:1], wide[:1])


def test_layers_that_do_not_grow_are_unchanged():
    windowed, config = DynamicCache(config=ARCHITECTURES[1].model().config), LLAMA.model().config
    mixed, fixed = DynamicCache(config=ARCHITECTURES[2].model().config), StaticCache(config=config, max_cache_len=8)
    before = [type(layer) for cache in (windowed, fixed) for layer in cache.layers]
    for cache in (windowed, fixed, mixed):
        preallocate(cache)
    assert [type(layer) for cache in (windowed, fixed) for layer in cache.layers] == before
    assert [type(layer) for layer in mixed.layers] == [DynamicSlidingWindowLayer, PreallocatedCacheLayer]
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True  # the constructor's option needs a GPU
    preallocate(offloaded)
    assert {type(layer) for layer in offloaded.layers} == {DynamicLayer}
