"""A connected model computes what the plain one computes, whatever the architecture and the link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig

from tests.parity.architectures import ARCHITECTURES, MORE, Architecture
from tests.parity.pair import adapted, assert_same_training, connected, on_links, twin

OFTEN = (
    *("llama4", "dbrx", "jetmoe", "granitemoe", "bloom", "mamba", "mamba2"),
    *("gpt_oss", "deepseek_v3", "bart", "smollm3", "falcon"),
)
"""Of the further architectures, those with code paths of their own; the others are slow."""


def check(architecture: Architecture, link: str, **options: Any) -> None:
    plain, batch = architecture.model(), architecture.batch()
    with connected(plain, link, **options) as model:
        with torch.no_grad():
            expected = plain(**batch).logits
            for _ in range(2):  # the second pass groups the layers that read the same rows in the first
                torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=0)
        if architecture.generates:
            ids = batch["input_ids"]
            settings = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))

        def config() -> PeftConfig:
            return LoraConfig(r=4, target_modules=list(architecture.targets), init_lora_weights=False)

        assert_same_training(adapted(twin(plain), config), adapted(model, config), architecture.batch)


@pytest.mark.parametrize(("architecture", "link"), on_links(ARCHITECTURES, often=("llama", "mixtral", "gpt2", "t5")))
def test_logits_tokens_gradients_and_training_are_those_of_the_plain_model(architecture, link):
    check(architecture, link)


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, id=a.name, marks=[] if a.name in OFTEN else [pytest.mark.slow]) for a in MORE]
)
def test_further_architectures_work_too(architecture):
    check(architecture, "inproc")


SHARDED = [("inproc", 2, "tensor"), ("tcp", 2, "parameters"), ("inproc", 4, "auto")]
ALL_SHARDED = [(link, shards, way) for link in ("inproc", "tcp") for shards in (2, 4) for way in ("tensor", "parameters")]


@pytest.mark.parametrize(
    ("name", "link", "shards", "sharding"),
    [*(("llama", *case) for case in SHARDED), ("gpt2", *SHARDED[2]), ("mixtral", *SHARDED[0])],
)
def test_a_sharded_model_computes_the_same(name, link, shards, sharding):
    check(next(a for a in ARCHITECTURES if a.name == name), link, shards=shards, sharding=sharding)


@pytest.mark.slow
@pytest.mark.parametrize(("link", "shards", "sharding"), ALL_SHARDED, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_every_architecture_computes_the_same_with_shards(architecture, link, shards, sharding):
    check(architecture, link, shards=shards, sharding=sharding)
