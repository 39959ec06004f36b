"""Sizes of a model on the meta device equal those of the model itself, for every architecture of the parity tests."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from symbiosis.errors import UnknownModel
from symbiosis.models.split import split
from symbiosis.planning.model_size import ModelSize, check_heads, storage_bytes
from tests.conftest import tiny_config
from tests.parity.architectures import ARCHITECTURES, MORE


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE], ids=lambda each: each.name)
def test_parts_equal_those_of_the_loaded_model(architecture):
    model = architecture.model()
    config = model.config
    config.architectures = [type(model).__name__]
    size, real = ModelSize.of(config, model.dtype), split(model)
    assert sum(p.nbytes for p in size.model.parameters()) == sum(p.nbytes for p in model.parameters())
    assert size.split.parameters == real.parameters
    assert {layer.spec.paths for layer in size.split.layers} == {layer.spec.paths for layer in real.layers}
    assert size.split.hosted_parameters == real.hosted_parameters
    assert size.client_part == storage_bytes(real.client_tensors.values())


def test_shards_divide_the_base_layers():
    size = ModelSize.of(tiny_config())
    halves = 2 * size.shard(2)
    assert size.hosted <= halves <= size.hosted + 4096, "only norms are whole in both"
    assert size.max_shards() == 32, "the outputs of k_proj"


def test_the_dtype_halves_all_but_buffers():
    wide, narrow = ModelSize.of(tiny_config(), torch.float32), ModelSize.of(tiny_config(), torch.bfloat16)
    assert sum(p.nbytes for p in wide.model.parameters()) == 2 * sum(p.nbytes for p in narrow.model.parameters())
    assert wide.kv_cache_token() == 2 * narrow.kv_cache_token() == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 7}, "7 attention heads do not divide the model's width of 64"),
        ({"num_key_value_heads": 3}, "3 key-value heads do not divide 4 attention heads"),
    ],
)
def test_heads_that_do_not_divide_are_an_error(changes, said):
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    config.head_dim = None
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnknownModel, match=said):
        check_heads(config)
