"""Exact speculation has the tokens of plain generation, however late the true block is, and leaves the model as it was."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import TextStreamer

from symbiosis.zoo.errors import CannotSpeculate
from symbiosis.zoo.surrogates.block_modules import Piece, module_path, replace_module
from symbiosis.zoo.surrogates.speculation import Speculation
from symbiosis.zoo.surrogates.surrogate import surrogate_chain
from tests.zoo.conftest import make_model

PIECES = ("ffn 1", "ffn 3", "attention 0", "attention 2", "layer 1")
NEW = 24


class LateBlock(nn.Module):
    """A block that returns when the test lets it: never at once, at random, or before the next pass."""

    def __init__(self, block: nn.Module, wait) -> None:
        super().__init__()
        self.block, self.wait = block, wait

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args, **named):
        if threading.current_thread() is not threading.main_thread():
            self.wait()
        return self.block(*args, **named)


def nearly(model, piece: Piece) -> nn.Module:
    """A stand-in with the same shapes and changed weights: right about half of the time."""
    made = surrogate_chain(model, piece, nn.Identity())  # a copy of the modules, sharing tensors
    small = make_model().get_submodule(module_path(made, piece))
    small.load_state_dict(model.get_submodule(module_path(model, piece)).state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return small


@pytest.fixture
def model():
    return make_model(initializer_range=0.2).requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(3, 64, (1, 7), generator=torch.Generator().manual_seed(0))


def generate(model, ids, **options):
    return model.generate(
        ids,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )


def slow(model, piece: Piece, wait) -> None:
    path = module_path(model, piece)
    replace_module(model, path, LateBlock(model.get_submodule(path), wait))


ARRIVALS = {"at once": lambda: None, "late": lambda: threading.Event().wait(0.01), "at random": None}


@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"do_sample": True, "top_k": 5, "temperature": 0.7}, {"repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "top-k", "penalty"],
)
def test_tokens_and_cache_are_those_of_plain_generation(model, ids, name, options, arrival):
    piece, chance = Piece.parse(name), random.Random(0)
    surrogate = nearly(model, piece)
    torch.manual_seed(3)
    expected = generate(model, ids, **options)
    slow(model, piece, ARRIVALS[arrival] or (lambda: threading.Event().wait(chance.random() * 0.008)))
    speculation, modules = Speculation(piece, surrogate), list(model.modules())
    torch.manual_seed(3)
    found = generate(model, ids, custom_generate=speculation, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for own, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.allclose(own.keys, theirs.keys, atol=1e-4)
        assert torch.allclose(own.values, theirs.values, atol=1e-4)
    assert speculation.report.tokens == NEW
    assert list(model.modules()) == modules
    if arrival == "late":
        assert 0 < speculation.report.accepted <= speculation.report.drafts


def test_samples_have_the_distribution_of_the_true_model(model, ids):
    """Third tokens of many runs, over one surrogate that is often wrong: the shares are those of plain sampling."""
    piece = Piece.parse("ffn 1")
    speculation = Speculation(piece, nearly(model, piece))
    slow(model, piece, lambda: None)
    counts = {"plain": Counter(), "speculated": Counter()}
    options = {"do_sample": True, "temperature": 0.5, "top_k": 4, "max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None}
    for kind, more in (("plain", {}), ("speculated", {"custom_generate": speculation})):
        torch.manual_seed({"plain": 0, "speculated": 1_000_000}[kind])
        for _ in range(300):
            counts[kind][int(model.generate(ids, **options, **more)[0, 7])] += 1
    tokens = set(counts["plain"]) | set(counts["speculated"])
    distance = sum(abs(counts["plain"][token] - counts["speculated"][token]) for token in tokens) / 600
    assert distance < 0.12


def test_cosine_mode_keeps_outputs_that_are_near_and_replaces_others(model, ids):
    piece = Piece.parse("ffn 1")
    expected = generate(model, ids).sequences
    surrogate = nearly(model, piece)
    slow(model, piece, ARRIVALS["late"])
    never = Speculation(piece, surrogate, mode="cosine", min_cosine=1.1)
    assert torch.equal(generate(model, ids, custom_generate=never).sequences, expected)
    assert never.report.accepted == 0
    always = Speculation(piece, surrogate, mode="cosine", min_cosine=-1.0)
    generate(model, ids, custom_generate=always)
    assert always.report.accepted == always.report.drafts == len(always.report.cosines) > 0
    assert always.report.rows == always.report.passes  # each row once


def test_it_stops_at_the_end_token_and_streams_each_token_once(model, ids):
    piece = Piece.parse("ffn 1")
    surrogate = nearly(model, piece)
    plain = generate(model, ids).sequences[0]
    end = int(plain[12])
    streamed: list[int] = []

    class Streamer(TextStreamer):
        def __init__(self) -> None: ...
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append(-1)

    options = {"max_new_tokens": NEW, "eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    slow(model, piece, ARRIVALS["late"])
    found = model.generate(ids, custom_generate=Speculation(piece, surrogate, streamer=Streamer()), **options)
    assert found[0].tolist() == plain[: plain.tolist().index(end, 7) + 1].tolist()
    assert streamed == [*found[0].tolist(), -1]


def test_adapters_on_the_model_and_in_the_block_work(model, ids):
    piece = Piece.parse("attention 2")
    surrogate = nearly(model, piece)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    expected = generate(adapted, ids).sequences
    slow(model, piece, ARRIVALS["late"])
    assert torch.equal(generate(adapted, ids, custom_generate=Speculation(piece, surrogate)).sequences, expected)


@pytest.mark.parametrize("name", PIECES)
def test_the_surrogate_chain_is_an_assistant_as_transformers_has_it(model, ids, name):
    piece = Piece.parse(name)
    chain = surrogate_chain(model, piece, nearly(model, piece))
    expected = generate(model, ids).sequences
    assert torch.equal(generate(model, ids, assistant_model=chain).sequences, expected)
    shared = {tensor.data_ptr() for tensor in model.parameters()}
    own = [tensor for tensor in chain.parameters() if tensor.data_ptr() not in shared]
    assert len(own) == len(list(model.get_submodule(module_path(model, piece)).parameters()))


def test_a_conversation_continues_from_the_cache(model, ids):
    piece = Piece.parse("ffn 1")
    speculation = Speculation(piece, nearly(model, piece))
    first = generate(model, ids, custom_generate=speculation)
    more = torch.cat([first.sequences, torch.tensor([[5, 6]])], 1)
    found = generate(model, more, custom_generate=speculation, past_key_values=first.past_key_values)
    assert torch.equal(found.sequences, generate(model, more).sequences)


def test_an_error_of_the_true_block_reaches_the_caller_and_the_model_is_as_it_was(model, ids):
    piece, path = Piece.parse("ffn 1"), "model.layers.1.mlp"

    def fail():
        raise RuntimeError("the other host is gone")

    surrogate = nearly(model, piece)
    slow(model, piece, fail)
    block = model.get_submodule(path)
    with pytest.raises(RuntimeError, match="the other host is gone"):
        generate(model, ids, custom_generate=Speculation(piece, surrogate))
    assert model.get_submodule(path) is block


def test_what_is_not_supported_is_one_line(model, ids):
    piece = Piece.parse("attention 2")
    speculation = Speculation(piece, nearly(model, piece))
    for options, says in (
        ({"num_beams": 2}, "beams"),
        ({"use_cache": False}, "without a cache"),
        ({"output_scores": True}, "output_scores"),
        ({"past_key_values": generate(model, ids).past_key_values}, "holds tokens already"),
    ):
        with pytest.raises(CannotSpeculate, match=says) as raised:
            generate(model, ids, custom_generate=speculation, **options)
        assert "\n" not in str(raised.value)
    with pytest.raises(CannotSpeculate, match="several sequences"):
        generate(model, ids.repeat(2, 1), custom_generate=speculation)
    prefixed = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(CannotSpeculate, match="prompt tuning"):
        prefixed.generate(input_ids=ids, max_new_tokens=4, custom_generate=speculation)
    for options in ({"mode": "guess"}, {"window": 1}):
        with pytest.raises(CannotSpeculate, match="expected"):
            Speculation(piece, speculation.surrogate, **options)
