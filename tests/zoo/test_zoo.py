"""Models of a zoo are equal to those that were added, each block is there once, and what is wrong changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from symbiosis.zoo.errors import BadZoo, NotAdmitted, UnknownZooModel
from symbiosis.zoo.zoo import Zoo
from tests.zoo.conftest import CONFIG, fine_tuned, make_model


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_equal(found, expected) -> None:
    theirs, own = expected.state_dict(), found.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    "model",
    [
        make_model,
        lambda: make_model(tie_word_embeddings=True),
        lambda: make_model().to(torch.bfloat16),
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=64)).eval(),
        lambda: Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8)).eval(),
        lambda: MixtralForCausalLM(MixtralConfig(**CONFIG, num_local_experts=4)).eval(),
    ],
    ids=["llama", "tied", "bfloat16", "gpt2", "qwen3", "mixtral"],
)
def test_a_model_is_equal_to_the_one_that_was_added(zoo, save, model):
    folder = save(model(), "one")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    added = zoo.add("one", folder)
    assert added.new_blocks == len(added.manifest.chain) == 2 + 2 * expected.config.num_hidden_layers
    assert_equal(zoo.load("one"), expected)
    assert zoo.verify() == []


def test_equal_blocks_are_stored_once(zoo, save, base):
    tuned = fine_tuned(base, range(2, 4))
    first, second = zoo.add("base", save(base, "base")), zoo.add("tuned", save(tuned, "tuned"))
    assert (first.new_blocks, second.new_blocks) == (10, 4)
    again = zoo.add("again", save(base, "again"))
    assert (again.new_blocks, again.new_bytes) == (0, 0)
    assert_equal(zoo.load("tuned"), tuned)
    usage = zoo.usage()
    assert (usage.models, usage.blocks) == (3, 14)
    assert usage.bytes == first.new_bytes + second.new_bytes
    assert usage.bytes_as_copies == sum(each.size for each in zoo.manifests())
    shared = zoo.users("tuned")
    assert sorted(map(len, shared.values())) == [0] * 4 + [2] * 6


def test_a_block_is_shared_with_another_depth(zoo, save, base):
    shifted = make_model()
    shifted.load_state_dict(base.state_dict())
    shifted.model.layers[3].load_state_dict(base.model.layers[1].state_dict())
    zoo.add("base", save(base, "base"))
    assert zoo.add("shifted", save(shifted, "shifted")).new_blocks == 0
    assert_equal(zoo.load("shifted"), shifted)


def test_removed_models_free_their_own_blocks(zoo, save, base, tmp_path):
    tuned = fine_tuned(base, range(4))
    zoo.add("base", save(base, "base"))
    before = contents(tmp_path / "zoo")
    zoo.add("tuned", save(tuned, "tuned"))
    zoo.remove("tuned")
    assert zoo.names() == ["base"]
    count, size = zoo.gc()
    assert (count, size > 0) == (8, True)
    assert contents(tmp_path / "zoo") == before
    assert zoo.gc() == (0, 0)
    with pytest.raises(UnknownZooModel, match="no model 'tuned': there are base"):
        zoo.load("tuned")


def test_an_adapter_shares_the_chain_of_its_base(zoo, save, base, tmp_path):
    zoo.add("base", save(base, "base"))
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(NotAdmitted, match="--base"):
        zoo.add("lora", tmp_path / "lora")
    added = zoo.add("lora", tmp_path / "lora", base="base")
    assert added.new_blocks == 0
    assert added.manifest.adapter.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    zoo.remove("base")
    zoo.gc()
    assert zoo.verify() == []
    with pytest.raises(NotAdmitted, match="has an adapter itself"):
        zoo.add("more", tmp_path / "lora", base="lora")


def drop_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors | {"extra": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})


def cut_file(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def change_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))


def change_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))


def change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1}}, "added_tokens": []}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_tensor, "has no tensor model.layers.2.mlp.up_proj.weight"),
        (add_tensor, "its architecture does not have, extra"),
        (cut_file, "cannot be read"),
        (change_vocabulary, "has the vocab_size 65, the models of this zoo have 64"),
        (change_family, "has the model_type 'mistral', the models of this zoo have 'llama'"),
        (change_tokenizer, "has another tokenizer"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(zoo, save, base, tmp_path, change, says):
    first = save(base, "base")
    (first / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}))
    zoo.add("base", first)
    before = contents(tmp_path / "zoo")
    wrong = save(fine_tuned(base, range(4)), "wrong")
    change(wrong)
    with pytest.raises(NotAdmitted, match=says) as caught:
        zoo.add("wrong", wrong)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "zoo") == before


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a" * 101, "ä"])
def test_names_do_not_leave_the_zoo(zoo, save, base, name):
    with pytest.raises(NotAdmitted, match="no name of a model"):
        zoo.add(name, save(base, "base"))
    with pytest.raises(UnknownZooModel):
        zoo.load(name)


def test_a_name_is_used_once(zoo, save, base):
    zoo.add("one", save(base, "one"))
    with pytest.raises(NotAdmitted, match="the zoo has a model one"):
        zoo.add("one", save(base, "two"))


def test_changed_and_missing_blocks_are_found(zoo, save, base):
    manifest = zoo.add("base", save(base, "base")).manifest
    embedding, attention = (zoo._objects.path(manifest.chain[number].object) for number in (0, 1))
    content = bytearray(embedding.read_bytes())
    content[-1] ^= 1
    embedding.write_bytes(content)
    attention.unlink()
    assert zoo.verify() == ["base: embedding was changed", "base: attention 0 is missing"]
    with pytest.raises(BadZoo, match="is missing"):
        zoo.load("base")


def test_a_folder_with_other_files_is_no_zoo(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadZoo, match="other files"):
        Zoo(tmp_path, create=True)
    with pytest.raises(BadZoo, match="no zoo"):
        Zoo(tmp_path / "none")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "name": "other", "chain": []}',
        '{"format": 1, "name": "base", "chain": [["x", 0, "..", 1]]}',
    ],
)
def test_a_broken_manifest_is_one_line(zoo, tmp_path, content):
    (tmp_path / "zoo" / "models" / "base.json").write_text(content)
    with pytest.raises(BadZoo, match="the manifest of base cannot be read"):
        zoo.manifests()


def test_what_is_no_gguf_file_is_one_line(zoo, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(NotAdmitted, match=r"model\.gguf cannot be converted"):
        zoo.add("model", tmp_path / "model.gguf")
    assert zoo.names() == []
    assert not list((tmp_path / "zoo" / "scratch").iterdir())
