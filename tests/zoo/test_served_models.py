"""Models of a zoo in memory: each block once, and only those that one engine can serve together."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from symbiosis.app.served_zoo import ServedZoo
from symbiosis.zoo.errors import BadZoo, NotAdmitted, UnknownZooModel
from symbiosis.zoo.served_models import chain_hash, load_models, select_models
from tests.zoo.conftest import fine_tuned, make_model

CPU = torch.device("cpu")


@pytest.fixture
def root(zoo, base, save):
    """`base`, which was added first, and others."""
    zoo.add("base", save(base, "base"))
    zoo.add("a-tuned", save(fine_tuned(base, range(3, 4)), "tuned"))
    return zoo._root


def addresses(model) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_models_equal_those_that_were_added_and_share_memory(root, base):
    selection = select_models(root)
    loaded = {each.name: each.model for each in load_models(root, selection, device=CPU)}
    assert list(loaded) == ["base", "a-tuned"]
    for name, parameter in loaded["base"].state_dict().items():
        assert torch.equal(parameter, base.state_dict()[name])
    mine, other = addresses(loaded["base"]), addresses(loaded["a-tuned"])
    assert {name for name in mine if mine[name] != other[name]} == {name for name in mine if "layers.3." in name}
    layer = loaded["base"].model.layers[0].self_attn
    assert layer.k_proj.weight.data_ptr() == layer.q_proj.weight.data_ptr() + layer.q_proj.weight.nbytes  # one product


def test_a_block_that_stands_twice_in_a_model_is_in_memory_once(zoo, base, save):
    twice = fine_tuned(base, range(0))
    twice.model.layers[2].load_state_dict(base.model.layers[0].state_dict())
    zoo.add("twice", save(twice, "twice"))
    (loaded,) = load_models(zoo._root, select_models(zoo._root), device=CPU)
    layers = loaded.model.model.layers
    assert layers[2].mlp.up_proj.weight.data_ptr() == layers[0].mlp.up_proj.weight.data_ptr()
    assert layers[1].mlp.up_proj.weight.data_ptr() != layers[0].mlp.up_proj.weight.data_ptr()


def test_another_dtype_is_computed_in_and_shared_as_well(root):
    loaded = load_models(root, select_models(root), device=CPU, dtype=torch.bfloat16)
    mine, other = (addresses(each.model) for each in loaded)
    assert loaded[0].model.dtype is torch.bfloat16
    assert mine["model.embed_tokens.weight"] == other["model.embed_tokens.weight"]


def test_a_model_of_another_dtype_needs_one_for_all(zoo, root, base, save):
    zoo.add("half", save(fine_tuned(base, range(1)).bfloat16(), "half"))
    with pytest.raises(NotAdmitted, match="half has the dtype bfloat16, base has float32: name one for all with --dtype"):
        load_models(root, select_models(root), device=CPU)
    assert len(load_models(root, select_models(root), device=CPU, dtype=torch.float32)) == 3


def test_a_model_of_another_config_is_refused_with_the_reason(zoo, root, save):
    zoo.add("deeper", save(make_model(num_hidden_layers=5), "deeper"))
    zoo.add("turned", save(make_model(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "turned"))
    selection = select_models(root)
    assert [each.name for each in selection.manifests] == ["base", "a-tuned"]
    assert selection.refused["deeper"].startswith("its num_hidden_layers is 5, that of base is 4")
    assert selection.refused["turned"].startswith("its rope_parameters is ")
    assert list(select_models(root, ["deeper", "base"]).refused) == ["base"]


def test_names_are_checked(zoo, root, tmp_path):
    assert [each.name for each in select_models(root, ["a-tuned", "base"]).manifests] == ["a-tuned", "base"]
    with pytest.raises(UnknownZooModel, match="the zoo has no model 'x': expected some of a-tuned, base"):
        select_models(root, ["x"])
    zoo.remove("base")
    zoo.remove("a-tuned")
    with pytest.raises(BadZoo, match="the zoo is empty"):
        select_models(root)


def test_a_chains_hash_covers_blocks_places_and_configs(zoo, root, base, save):
    manifests = {name: zoo.manifest(name) for name in zoo.names()}
    assert chain_hash(manifests["base"]) != chain_hash(manifests["a-tuned"])
    swapped = fine_tuned(base, range(0))
    swapped.model.layers[0].load_state_dict(base.model.layers[1].state_dict())
    swapped.model.layers[1].load_state_dict(base.model.layers[0].state_dict())
    zoo.add("swapped", save(swapped, "swapped"))
    zoo.add("copy", save(base, "copy"))
    folder = save(base, "others-end")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [5, 7]}))
    zoo.add("others-end", folder)
    hashes = {name: chain_hash(zoo.manifest(name)) for name in ("base", "swapped", "copy", "others-end")}
    assert hashes["copy"] == hashes["base"]
    assert len(set(hashes.values())) == 3
    with ServedZoo(root) as served:
        assert served.chains["copy"] is served.chains["base"]
        assert served.chains["others-end"].eos_ids == (5, 7)


def test_adapters_are_served_on_their_base_also_if_it_was_not_asked_for(zoo, root, base, save, tmp_path):
    torch.manual_seed(0)
    adapted = get_peft_model(fine_tuned(base, range(3, 4)), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "lora")
    zoo.add("lora", tmp_path / "lora", base="a-tuned")
    for names in (None, ["base", "lora"], ["lora"]):
        with ServedZoo(root, names) as served:
            assert list(served.adapters) == ["lora"]
            assert served.adapter_models == {"lora": "a-tuned"}
            assert served.default == ("a-tuned" if names == ["lora"] else "base")
            assert served.chains[served.default].model.name_or_path == served.default
            assert (served.adapters["lora"] / "adapter_config.json").is_file()
    assert not served.adapters["lora"].exists()
    zoo.remove("a-tuned")
    with ServedZoo(root) as served:
        assert served.adapter_models == {"lora": "a-tuned"}
        assert list(served.chains) == ["base", "a-tuned"]


def test_a_changed_or_missing_block_is_named(zoo, root):
    block = zoo.manifest("a-tuned").chain[-2].object
    path = root / "objects" / block.sha256[:2] / block.sha256
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadZoo, match="a-tuned: ffn 3 was changed"):
        load_models(root, select_models(root), device=CPU)
    path.unlink()
    with pytest.raises(BadZoo, match="an object of the zoo is missing"):
        load_models(root, select_models(root), device=CPU)
