"""Surrogates are smaller, fit their blocks better than pruning alone, and are kept in a zoo with their figures."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from symbiosis.zoo.errors import BadText, BadZoo, NoSurrogate, UnknownBlock
from symbiosis.zoo.surrogates.activations import output_sensitivity, record
from symbiosis.zoo.surrogates.block_modules import Piece, module_path, replace_module
from symbiosis.zoo.surrogates.chain_comparison import compare_chains
from symbiosis.zoo.surrogates.distillation import Training, parts_of, prune, train
from symbiosis.zoo.surrogates.pruning import HeadShape, head_shapes
from symbiosis.zoo.surrogates.surrogate import (
    load_surrogate,
    make_surrogates,
    store_surrogate,
    surrogate_chain,
    tokenize,
)
from symbiosis.zoo.text_file import read_text
from tests.zoo.conftest import CONFIG, fine_tuned, make_model

PIECES = ("ffn 1", "attention 2", "layer 3")
QUICK = Training(seconds=5.0, epochs=100, learning_rate=3e-3)


@pytest.fixture
def model():
    return make_model(initializer_range=0.2).requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(0, 64, (24, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PIECES)
def test_training_brings_a_pruned_block_nearer_to_the_true_one(model, ids, name):
    piece = Piece.parse(name)
    true = model.get_submodule(module_path(model, piece))
    known = record(model, parts_of(piece), ids)
    small = prune(piece, true, known, 0.5)
    sizes = [sum(p.numel() for p in module.parameters() if p.dim() == 2) for module in (small, true)]
    assert sizes[0] == sizes[1] / 2
    errors = train(piece, small, true, known[piece], QUICK, output_sensitivity(model, piece.layer, ids[:8]))
    assert errors[-1] < 0.9 * errors[0]


def test_a_block_that_keeps_its_function_is_found_in_closed_form(model, ids):
    """Half of the channels are dead: without them the block is the same."""
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.up_proj.weight[::2] = 0
    piece = Piece.parse("ffn 1")
    small = prune(piece, mlp, record(model, [piece], ids), 0.5)
    (found,) = compare_chains(model, [(piece, small)], ids)
    assert found.top1 > 0.99
    assert found.loss == pytest.approx(found.true_loss, abs=1e-3)


def test_the_shapes_of_heads_are_the_largest_that_fit(model):
    attention = model.model.layers[0].self_attn  # two groups of two heads
    assert head_shapes(attention, 0.5) == [HeadShape(1, 2)]
    assert head_shapes(attention, 0.7) == [HeadShape(1, 2), HeadShape(2, 1)]
    assert head_shapes(attention, 0.1) == []


def test_the_model_is_as_it_was(model, ids):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = list(model.modules())
    make_surrogates(model, [Piece.parse("ffn 1"), Piece.parse("layer 1")], ids[:16], ids[16:], training=QUICK)
    assert list(model.modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", PIECES)
def test_a_surrogate_comes_back_from_the_zoo(zoo, save, model, ids, name):
    zoo.add("base", save(model, "base"))
    piece = Piece.parse(name)
    made = make_surrogates(model, [piece], ids[:16], ids[16:], training=QUICK)[piece]
    stored = store_surrogate(zoo, "base", piece, made)
    manifest = zoo.manifest("base")
    assert len(stored.stands_for) == (2 if name.startswith("layer") else 1)
    assert set(stored.stands_for) <= {block.object.sha256 for block in manifest.chain}
    assert manifest.surrogates[name].figures["top1"] == made.report.trained.top1
    with torch.inference_mode():
        found = surrogate_chain(model, piece, load_surrogate(zoo, "base", name))(ids).logits
        replace_module(model, module_path(model, piece), made.module)
        assert torch.allclose(found, model(ids).logits, atol=1e-5)
    assert zoo.verify() == []


def test_gc_keeps_surrogates_until_their_model_is_removed(zoo, save, model, ids):
    zoo.add("base", save(model, "base"))
    zoo.add("other", save(fine_tuned(model, range(0, 1)), "other"))
    piece = Piece.parse("ffn 1")
    for seed in (0, 1):  # the second takes the place of the first
        training = Training(seconds=5.0, epochs=5, seed=seed)
        store_surrogate(zoo, "base", piece, make_surrogates(model, [piece], ids[:16], ids[16:], training=training)[piece])
    assert zoo.gc()[0] == 1
    load_surrogate(zoo, "base", piece)
    zoo.remove("base")
    assert zoo.gc()[0] > 1
    assert zoo.names() == ["other"]


def test_a_changed_surrogate_is_found(zoo, save, model, ids):
    zoo.add("base", save(model, "base"))
    piece = Piece.parse("ffn 1")
    stored = store_surrogate(zoo, "base", piece, make_surrogates(model, [piece], ids[:16], ids[16:], training=QUICK)[piece])
    zoo._objects.path(stored.object).write_bytes(b"changed")
    assert zoo.verify() == ["base: surrogate of ffn 1 was changed"]
    with pytest.raises(BadZoo, match="does not fit"):
        load_surrogate(zoo, "base", piece)


def test_a_chain_of_another_family_has_surrogates_too(ids):
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8, initializer_range=0.2)).eval().requires_grad_(False)
    pieces = [Piece.parse(f"{kind} 1") for kind in ("ffn", "attention", "layer")]
    made = make_surrogates(model, pieces, ids[:16], ids[16:], training=QUICK)
    assert all(each.report.parameters < 0.6 for each in made.values())


@pytest.mark.parametrize(
    ("name", "keep", "says"),
    [
        ("head", 0.5, "'head' is no block"),
        ("ffn twelve", 0.5, "is no block"),
        ("ffn 9", 0.5, "no layer 9: expected 0 to 3"),
        ("ffn 1", 0.0, "expected a share"),
        ("ffn 1", 1.5, "expected a share"),
        ("attention 1", 0.1, "leaves no head"),
    ],
)
def test_what_cannot_be_made_is_one_line(model, ids, name, keep, says):
    with pytest.raises((NoSurrogate, UnknownBlock), match=says) as raised:
        make_surrogates(model, [Piece.parse(name)], ids[:16], ids[16:], keep=keep, training=QUICK)
    assert "\n" not in str(raised.value)


def test_an_architecture_without_such_layers_is_one_line(ids):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=64)).eval()
    with pytest.raises(NoSurrogate, match="expected linear layers gate_proj"):
        make_surrogates(model, [Piece.parse("ffn 1")], ids[:16], ids[16:], training=QUICK)


def test_text_that_cannot_be_read_or_is_too_short_is_one_line(tmp_path):
    with pytest.raises(BadText, match="No such file"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadText, match="not UTF-8"):
        read_text(tmp_path / "bytes.txt")
    with pytest.raises(NoSurrogate, match="expected at least 2560"):
        tokenize(lambda text, **_: {"input_ids": [1] * 2000}, "", 10_000)


def test_held_out_text_is_not_used(ids):
    used, held_out = tokenize(lambda text, **_: {"input_ids": list(range(16 * 256))}, "", 100_000)
    assert (len(used), len(held_out)) == (8, 2)
    assert not set(used.flatten().tolist()) & set(held_out.flatten().tolist())
