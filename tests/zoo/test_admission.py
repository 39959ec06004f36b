"""Admission stores a model as cheaply as its owner allows, and refuses what keeps less."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from symbiosis.zoo.admission.admission import admit, first_true, tokenize
from symbiosis.zoo.admission.block_sharing import BlockSharing
from symbiosis.zoo.admission.calibration import Measurement, ReferenceModel, cut_windows
from symbiosis.zoo.admission.report import Limit, Verdict
from symbiosis.zoo.errors import BadText, BadZoo, NotAdmitted, UnknownZooModel
from symbiosis.zoo.partition import BlockKind
from symbiosis.zoo.text_file import read_text
from tests.zoo.conftest import fine_tuned, make_model, make_text, save_tokenizer, train
from tests.zoo.test_zoo import assert_equal, contents

IDS = torch.arange(1, 25)[None] % 20


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


def test_a_full_fine_tune_is_a_difference_that_keeps_its_gain(zoo_with_base, save_with_tokenizer, trained, sample):
    zoo = zoo_with_base
    folder = save_with_tokenizer(trained, "tuned")
    admission = admit(zoo, "tuned", folder, may_lose=0.05, text=sample)
    report = admission.report
    assert (report.verdict, report.base) == (Verdict.DIFFERENCE, "base")
    assert report.predict.has_gain
    assert report.predict.gain > 0.3
    assert report.admitted.kept >= 0.95
    assert report.confirm.kept(report.admitted.confirmed) >= 0.95
    assert abs(report.predicted_loss - report.admitted.confirmed.loss) < 0.05
    assert admission.added.new_bytes < 0.5 * report.own_bytes
    manifest = zoo.manifest("tuned")
    assert manifest.is_difference
    assert manifest.chain == zoo.manifest("base").chain
    assert manifest.provenance.keys() >= {"verdict", "loss_of_chain", "loss_predicted", "gain_kept", "cosine", "top1", "text"}
    merged = zoo.load("tuned")
    with zoo.adapter_folder(manifest) as adapter:
        adapted = PeftModel.from_pretrained(zoo.load("base"), str(adapter)).eval()
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-4, rtol=1e-4)
    text = tokenize(zoo, folder, manifest, *sample)
    measured = ReferenceModel(trained, text.confirm).measure(merged)
    assert measured.loss == pytest.approx(report.admitted.confirmed.loss, abs=1e-3)
    assert measured.cosine > 0.9
    assert zoo.verify() == []
    assert json.loads(json.dumps(report.as_json()))["verdict"] == "low-rank difference"


def test_zero_is_exact_and_needs_no_text(zoo_with_base, save_with_tokenizer, trained, trained_base):
    zoo = zoo_with_base
    admission = admit(zoo, "tuned", save_with_tokenizer(trained, "tuned"))
    assert (admission.report.verdict, admission.report.candidates) == (Verdict.OWN, ())
    assert_equal(zoo.load("tuned"), trained)
    again = admit(zoo, "again", save_with_tokenizer(trained_base, "again"), may_lose=0.5, text=None)
    assert (again.report.verdict, again.added.new_bytes) == (Verdict.SAME, 0)


def with_new_layers(base, text: str):
    """The last two layers are trained from scratch, which has no low-rank form; the first two have a little noise."""
    made = copy.deepcopy(base)
    torch.manual_seed(1)
    made.requires_grad_(False)
    for layer in made.model.layers[2:]:
        for weight in layer.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.15)
            weight.requires_grad_(True)
    train(made, text, 150)
    with torch.no_grad():
        for layer in made.model.layers[:2]:
            for weight in layer.parameters():
                weight.add_(0.003 * torch.randn_like(weight))
    return made


def test_blocks_are_shared_where_a_difference_keeps_too_little(zoo_with_base, save_with_tokenizer, trained_base, words):
    zoo = zoo_with_base
    tuned = with_new_layers(trained_base, make_text(1, words[1]))
    text = ("held-out", make_text(7, words[1], 1200))
    admission = admit(zoo, "new", save_with_tokenizer(tuned, "new"), may_lose=0.01, text=text)
    report = admission.report
    assert report.verdict is Verdict.SHARED, report.candidates
    assert all(each.refusal for each in report.candidates if each.verdict is Verdict.DIFFERENCE)
    assert any(each.refusal for each in report.candidates if each.verdict is Verdict.SHARED)
    assert report.admitted.kept >= 0.99
    assert report.confirm.allows(report.admitted.confirmed)
    base, own = zoo.manifest("base"), zoo.manifest("new")
    shared = [str(mine.place) for mine, theirs in zip(own.chain, base.chain, strict=True) if mine.object == theirs.object]
    assert {"attention 0", "ffn 0", "attention 1", "ffn 1"} <= set(shared)
    loaded = zoo.load("new")
    expected = tuned.state_dict() | {
        name: each for name, each in trained_base.state_dict().items() if ".layers.0." in name or ".layers.1." in name
    }
    assert all(torch.equal(each, expected[name]) for name, each in loaded.state_dict().items() if ".layers.3." not in name)
    assert zoo.verify() == []


def test_what_keeps_too_little_is_stored_as_it_is(zoo_with_base, save_with_tokenizer, sample):
    """Weights of their own everywhere, which no base and no few ranks stand for."""
    zoo = zoo_with_base
    other = make_model(seed=9, tie_word_embeddings=True, hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    admission = admit(zoo, "other", save_with_tokenizer(other, "other"), may_lose=1e-9, text=sample)
    assert admission.report.verdict is Verdict.OWN
    assert admission.report.candidates
    assert all(each.refusal and not each.is_admitted for each in admission.report.candidates)
    assert_equal(zoo.load("other"), other)


def test_without_a_gain_the_divergence_decides():
    limit = Limit(may_lose=0.02, loss_of_base=3.0, loss_of_model=3.1)
    near = Measurement(loss=3.0, divergence=0.01, cosine=0.99, top1=0.99)
    far = Measurement(loss=3.0, divergence=0.4, cosine=0.7, top1=0.6)
    assert not limit.has_gain
    assert (limit.kept(near), limit.allows(near), limit.allows(far)) == (None, True, False)
    with_gain = Limit(may_lose=0.05, loss_of_base=4.0, loss_of_model=3.0)
    assert with_gain.kept(far) == 1.0
    assert not with_gain.allows(Measurement(loss=3.06, divergence=0.0, cosine=1.0, top1=1.0))


def test_equal_blocks_have_the_cosine_one_and_near_ones_less(trained_base):
    own = copy.deepcopy(trained_base)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer, size in ((1, 0.05), (3, 0.5)):
            for weight in own.model.layers[layer].mlp.parameters():
                weight.add_(size * torch.randn_like(weight))
        own.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-6
        own.model.embed_tokens.weight[3] += 0.01
        own.model.norm.weight[3] += 0.01
    sharing = BlockSharing(trained_base, own)
    cosines = {str(place): cosine for place, cosine in sharing.cosines(IDS.repeat(4, 1)).items()}
    assert cosines.keys() == {"embedding", "ffn 1", "ffn 2", "ffn 3", "head"}
    assert cosines["ffn 2"] == pytest.approx(1.0, abs=1e-5)
    assert 1 > cosines["ffn 1"] > cosines["ffn 3"]
    assert list(cosines.values()) == sorted(cosines.values(), reverse=True)
    weights = sharing.weights([place for place in sharing.different if place.kind is BlockKind.FFN])
    assert len(weights) == 3 * 4
    assert all(name.split(".")[2] in "123" for name in weights)


def test_the_nearest_model_is_the_base(zoo, save_with_tokenizer, trained_base, trained, sample, words):
    stranger = train(
        make_model(seed=5, tie_word_embeddings=True, hidden_size=64, intermediate_size=96), make_text(0, words[0]), 5
    )
    zoo.add("a-stranger", save_with_tokenizer(stranger, "stranger"))
    zoo.add("true-base", save_with_tokenizer(trained_base, "base"))
    admission = admit(zoo, "tuned", save_with_tokenizer(trained, "tuned"), may_lose=0.05, text=sample)
    assert admission.report.base == "true-base"
    with pytest.raises(NotAdmitted, match="has an adapter itself"):
        admit(zoo, "more", save_with_tokenizer(fine_tuned_copy(trained), "more"), may_lose=0.05, text=sample, base="tuned")
    with pytest.raises(UnknownZooModel):
        admit(zoo, "more", save_with_tokenizer(fine_tuned_copy(trained), "more"), may_lose=0.05, text=sample, base="none")


def fine_tuned_copy(model):
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight.add_(0.01)
    return made


def test_an_adapter_is_exact_whatever_may_be_lost(zoo_with_base, trained_base, tmp_path, sample):
    adapted = get_peft_model(copy.deepcopy(trained_base), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "lora")
    admission = admit(zoo_with_base, "lora", tmp_path / "lora", base="base", may_lose=0.1, text=sample)
    assert admission.added.new_blocks == 0
    assert not zoo_with_base.manifest("lora").is_difference
    assert_equal(zoo_with_base.load("lora"), trained_base)


def test_the_first_model_of_a_zoo_has_its_own_blocks(zoo, save_with_tokenizer, trained, sample):
    admission = admit(zoo, "first", save_with_tokenizer(trained, "first"), may_lose=0.1, text=sample)
    assert admission.report.verdict is Verdict.OWN
    assert "no model of this architecture" in admission.report.note
    assert_equal(zoo.load("first"), trained)


def spoil_block(zoo, folder: Path) -> None:
    block = zoo.manifest("base").chain[2]
    path = zoo.path(block.object)
    path.write_bytes(path.read_bytes()[:100])


def flip_bit(zoo, folder: Path) -> None:
    path = zoo.path(zoo.manifest("base").chain[1].object)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def drop_tensor(zoo, folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(**changes):
    def change(zoo, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def change_tokenizer(zoo, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1}}, "added_tokens": []}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoil_block, "cannot be read"),
        (flip_bit, "a block of base was changed"),
        (drop_tensor, "has no tensor model.layers.2.mlp.up_proj.weight"),
        (change_config(model_type="mistral"), "the models of this zoo have 'llama'"),
        (change_tokenizer, "has another tokenizer"),
    ],
)
def test_a_bad_model_or_block_is_one_line_and_changes_nothing(
    zoo_with_base, save_with_tokenizer, trained, sample, tmp_path, change, says
):
    folder = save_with_tokenizer(trained, "tuned")
    change(zoo_with_base, folder)
    before = contents(tmp_path / "zoo")
    with pytest.raises((NotAdmitted, BadZoo), match=says) as caught:
        admit(zoo_with_base, "tuned", folder, may_lose=0.05, text=sample)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "zoo") == before


@pytest.mark.parametrize("may_lose", [-0.1, 1.0, 17, math.nan, math.inf])
def test_an_absurd_limit_is_one_line_and_changes_nothing(
    zoo_with_base, save_with_tokenizer, trained, sample, tmp_path, may_lose
):
    before = contents(tmp_path / "zoo")
    with pytest.raises(NotAdmitted, match="expected a share of the loss gain"):
        admit(zoo_with_base, "tuned", save_with_tokenizer(trained, "tuned"), may_lose=may_lose, text=sample)
    assert contents(tmp_path / "zoo") == before


def test_a_text_that_cannot_be_read_or_is_too_short_is_one_line(zoo_with_base, save_with_tokenizer, trained, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), (tmp_path / "bytes", "not UTF-8")):
        with pytest.raises(BadText, match=says):
            read_text(path)
    before = contents(tmp_path / "zoo")
    folder = save_with_tokenizer(trained, "tuned")
    with pytest.raises(NotAdmitted, match="has 5 tokens"):
        admit(zoo_with_base, "tuned", folder, may_lose=0.05, text=("short", "river"))
    with pytest.raises(NotAdmitted, match="needs a calibration text"):
        admit(zoo_with_base, "tuned", folder, may_lose=0.05)
    assert contents(tmp_path / "zoo") == before


def test_a_text_needs_a_tokenizer(zoo, save, trained_base, trained, sample):
    zoo.add("base", save(trained_base, "base"))
    with pytest.raises(NotAdmitted, match="has no tokenizer"):
        admit(zoo, "tuned", save(trained, "tuned"), may_lose=0.05, text=sample)


def test_a_base_that_is_replaced_during_the_measurement_is_noticed(zoo_with_base, save, save_with_tokenizer, trained, sample):
    zoo, folder = zoo_with_base, save_with_tokenizer(trained, "tuned")
    base = zoo.manifest("base")
    zoo.remove("base")
    zoo.add("base", save(fine_tuned(make_model(), range(4)), "other"))
    with pytest.raises(NotAdmitted, match="was replaced while"):
        zoo.add_sharing("tuned", folder, [], base, {})
    assert zoo.names() == ["base"]


@pytest.mark.parametrize("first", range(6))
def test_bisection_finds_the_first(first):
    assert first_true(5, lambda number: number >= first) == first


def test_halves_are_every_other_window():
    text = cut_windows("name", "text", list(range(32 * 9)), window=32)
    assert text.predict[:, 0].tolist() == [0, 64, 128, 192, 256]
    assert text.confirm[:, 0].tolist() == [32, 96, 160, 224]
    assert cut_windows("name", "text", list(range(100))).windows_NT.shape == (2, 50)
    save_tokenizer  # noqa: B018 - imported for the fixtures
