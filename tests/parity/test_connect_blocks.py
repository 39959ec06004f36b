"""A local model of which some blocks run in an executor computes, generates and trains as the local one."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.errors import CannotSplit
from symbiosis.zoo.errors import UnknownBlock
from symbiosis.zoo.surrogates.block_modules import Piece
from symbiosis.zoo.surrogates.speculation import Speculation
from tests.zoo.conftest import make_model
from tests.zoo.test_speculation import nearly

BLOCKS = (["ffn 1"], ["attention 2"], ["layer 0"], ["ffn 1", "layer 3"])


@pytest.fixture
def model():
    return make_model(initializer_range=0.2).requires_grad_(False)


@pytest.fixture
def executor():
    with symbiosis.Executor(make_model(initializer_range=0.2)) as executor:
        yield executor


@pytest.fixture
def ids():
    return torch.randint(3, 64, (1, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_only_the_blocks_are_remote(model, executor, ids, blocks):
    connected = symbiosis.connect_blocks(model, blocks, executor.listen())
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    assert torch.equal(connected.generate(ids, **options), expected)
    local = sum(p.numel() for p in connected.parameters())
    assert local < sum(p.numel() for p in model.parameters())
    before = connected.symbiosis.traffic()["round_trips"]
    assert torch.equal(connected.generate(ids, **options), expected)
    trips = connected.symbiosis.traffic()["round_trips"] - before
    assert 0 < trips <= 12 * 3 * len(blocks)
    connected.symbiosis.close()


@pytest.mark.parametrize("name", ["ffn 1", "attention 2", "layer 1"])
def test_speculation_at_a_remote_block_has_the_same_tokens(model, executor, ids, name):
    piece = Piece.parse(name)
    connected = symbiosis.connect_blocks(model, [name], executor.listen())
    speculation = Speculation(piece, nearly(model, piece))
    options = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    for more in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(0)
        expected = model.generate(ids, **options, **more)
        torch.manual_seed(0)
        assert torch.equal(connected.generate(ids, custom_generate=speculation, **options, **more), expected)
    connected.symbiosis.close()


def test_an_adapter_trains_through_a_remote_block(model, executor, ids):
    def gradients(base):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        adapted(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in adapted.parameters() if p.requires_grad]

    connected = symbiosis.connect_blocks(model, ["ffn 1"], executor)
    for own, theirs in zip(gradients(connected), gradients(make_model(initializer_range=0.2)), strict=True):
        assert torch.allclose(own, theirs, atol=1e-5)
    connected.symbiosis.close()


def test_an_executor_of_other_weights_is_refused_in_one_line(executor):
    with pytest.raises(CannotSplit, match="not that of the local model") as raised:
        symbiosis.connect_blocks(make_model(seed=1), ["ffn 1"], executor)
    assert "\n" not in str(raised.value)
    with pytest.raises(UnknownBlock, match="no layer 9"):
        symbiosis.connect_blocks(make_model(), ["ffn 9"], executor)
    with pytest.raises(CannotSplit, match="load it in that dtype"):
        symbiosis.connect_blocks(make_model().to(torch.bfloat16), ["ffn 1"], executor)
