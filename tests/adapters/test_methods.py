"""An adapter read from a folder and merged into a plain model computes what PEFT computes with that folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import (
    IA3Config,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
)
from transformers import PreTrainedModel

from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.parts import (
    Adapter,
    Ia3Part,
    LoraPart,
    PrefixPart,
    PromptPart,
    ReplacedPart,
    TrainableTokensPart,
    build_adapter,
)
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter
from tests.adapters.formulas import logits
from tests.adapters.peft_adapters import NAMES, base, config_of, drop_config, save, served_by_peft, set_config
from tests.lora import random_lora as lora
from tests.parity.architectures import ARCHITECTURES, MORE


def ia3(targets: tuple[str, ...], feedforward: object) -> IA3Config:
    return IA3Config(
        task_type="CAUSAL_LM", target_modules=list(targets), feedforward_modules=feedforward, init_ia3_weights=False
    )


def prefix(**settings: object) -> PrefixTuningConfig:
    return PrefixTuningConfig(task_type="CAUSAL_LM", **settings)


def prompt(**settings: object) -> PromptTuningConfig:
    return PromptTuningConfig(task_type="CAUSAL_LM", **settings)


def same_as_peft(name: str, folder: Path) -> Adapter:
    """Read the folder, compare the logits with PEFT's."""
    # in double precision, where the order of sums does not matter
    adapter = read_adapter(folder, ModelFacts.from_model(base(name)))
    batch = NAMES[name if name in NAMES else "llama"].batch()
    with torch.no_grad():
        expected = served_by_peft(name, folder).double()(**batch).logits[:, -batch["input_ids"].shape[1] :]
        plain = base(name).double()(**batch).logits
    assert (expected - plain).abs().max() > 1e-3, "the adapter has no effect, so the comparison proves nothing"
    torch.testing.assert_close(logits(adapter, base(name).double(), batch), expected, atol=1e-5, rtol=1e-5)
    return adapter


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE], ids=lambda a: a.name)
def test_lora_of_every_architecture_computes_what_peft_computes(architecture, tmp_path):
    config = lora(tuple(architecture.targets), lora_alpha=16, task_type=None)
    save(architecture.name, config, tmp_path)
    adapter = same_as_peft(architecture.name, tmp_path)
    assert (adapter.method, adapter.rank) == ("lora", 4)
    assert all(path.endswith(architecture.targets) for path in adapter.parts)


CASES: dict[str, tuple[str, PeftConfig]] = {
    "rslora": ("llama", lora(use_rslora=True, lora_alpha=12)),
    "alpha that is no whole number": ("llama", lora(lora_alpha=2.5)),
    "a rank for each module": (
        "llama", lora(rank_pattern={"q_proj": 8, "^model.layers.1.self_attn.v_proj": 2}, alpha_pattern={r"layers\.0\..*": 32}),
    ),
    "patterns and rslora": (
        "llama", lora(use_rslora=True, rank_pattern={"layers.1.self_attn.q_proj": 3}, alpha_pattern={"q_proj": 5}),
    ),
    "targets by a regular expression": ("llama", lora(r"^(?!.*layers\.0\.).*\.(?:q_proj|down_proj)")),
    "all linear layers": ("llama", lora("all-linear")),
    "some layers": ("llama", lora(layers_to_transform=[1])),
    "some layers of a named list": ("gpt2", lora(("c_attn",), layers_to_transform=0, layers_pattern="h")),
    "excluded modules": ("llama", lora(exclude_modules=["layers.0.self_attn.q_proj"])),
    "dora": ("llama", lora(use_dora=True)),
    "dora on Conv1D with biases": ("gpt2", lora(("c_attn", "c_fc"), use_dora=True)),
    "dora of an embedding": ("llama", lora(("embed_tokens", "q_proj"), use_dora=True)),
    "lora with a bias": ("llama", lora(lora_bias=True)),
    "lora with a bias in addition to the layer's": ("opt", lora(("q_proj",), lora_bias=True)),
    "all biases trained": ("opt", lora(("q_proj",), bias="all")),
    "biases of adapted layers trained": ("gpt2", lora(("c_attn",), bias="lora_only")),
    "biases trained of a model without": ("llama", lora(bias="all")),
    "embedding and head": ("llama", lora(("embed_tokens", "lm_head"))),
    "a scaled embedding": ("gemma2", lora(("embed_tokens", "q_proj"))),
    "an embedding tied to the head": ("tied_llama", lora(("embed_tokens",))),
    "embedding and head kept tied": ("tied_llama", lora(("embed_tokens",), ensure_weight_tying=True)),
    "a trained head": ("llama", lora(modules_to_save=["lm_head"])),
    "a trained embedding and all norms": ("llama", lora(modules_to_save=["embed_tokens", "norm"])),
    "a trained MLP": ("llama", lora(modules_to_save=["mlp"])),
    "a trained embedding tied to the head": ("tied_llama", lora(modules_to_save=["embed_tokens"])),
    "a trained embedding kept tied": ("tied_llama", lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "a trained head tied to the embedding": ("tied_llama", lora(modules_to_save=["lm_head"])),
    "trained tokens": ("llama", lora(trainable_token_indices=[3, 50, 7])),
    "trained tokens, tied": ("tied_llama", lora(trainable_token_indices=[3, 50])),
    "trained tokens by name, tied": ("gpt2", lora(("c_attn",), trainable_token_indices={"wte": [3, 50]})),
    "trained tokens of both, tied": ("tied_llama", lora(trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [5, 6]})),
    "different tokens of both, tied": ("tied_llama", lora(trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [7]})),
    "orthogonal start": ("llama", lora(init_lora_weights="orthogonal")),
    "mica start": ("llama", lora(init_lora_weights="mica")),
    "ia3": ("llama", ia3(("k_proj", "v_proj", "down_proj"), ["down_proj"])),
    "ia3 on Conv1D with biases": ("gpt2", ia3(("c_attn", "mlp.c_proj"), ["mlp.c_proj"])),
    "ia3 by a regular expression": ("opt", ia3(("k_proj", "fc2"), r".*\.fc[12]")),
    "prefix": ("llama", prefix(num_virtual_tokens=3)),
    "prefix with a projection": (
        "qwen3", prefix(num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=16),
    ),
    "prefix and sliding windows": ("gemma2", prefix(num_virtual_tokens=4)),
    "prefix without grouped heads": ("gpt2", prefix(num_virtual_tokens=4)),
    "prompt": ("llama", prompt(num_virtual_tokens=3)),
    "prompt and learned positions": ("gpt2", prompt(num_virtual_tokens=3)),
    "prompt and a trained head": ("llama", prompt(num_virtual_tokens=3, modules_to_save=["lm_head"])),
    "p-tuning": ("llama", PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16)),
    "p-tuning with an LSTM": (
        "qwen2",
        PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_method_computes_what_peft_computes(case, tmp_path):
    name, config = CASES[case]
    save(name, config, tmp_path)
    adapter = same_as_peft(name, tmp_path)
    assert adapter.bytes > 0


SPARSE: dict[str, tuple[str, PeftConfig, tuple[str, ...]]] = {
    "no alpha": ("llama", lora(lora_alpha=8), ("lora_alpha",)),
    "no alpha with rslora": ("llama", lora(lora_alpha=8, use_rslora=True), ("lora_alpha",)),
    "no alpha on Conv1D": ("gpt2", lora(("c_attn",), lora_alpha=8), ("lora_alpha", "fan_in_fan_out")),
    "neither rank nor alpha": ("llama", lora(r=8), ("r", "lora_alpha")),
    "neither, but patterns": (
        "llama",
        lora(r=8, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 5}),
        ("r", "lora_alpha"),
    ),
    "no width": ("llama", prompt(num_virtual_tokens=3), ("token_dim",)),
}
"""The last item is dropped from the config."""
MINIMAL: dict[str, tuple[str, PeftConfig, tuple[str, ...]]] = {
    "lora": ("llama", lora(r=8), ("target_modules",)),
    "ia3": ("llama", ia3(("k_proj", "down_proj"), ["down_proj"]), ("target_modules", "feedforward_modules")),
    "prefix": ("llama", prefix(num_virtual_tokens=3), ("num_virtual_tokens",)),
    "prompt": ("gpt2", prompt(num_virtual_tokens=3), ("num_virtual_tokens",)),
}
"""The last item stays in the config, with the method and the task."""


@pytest.mark.parametrize("case", SPARSE)
def test_absent_keys_have_the_defaults_of_peft(case, tmp_path):
    name, config, dropped = SPARSE[case]
    save(name, config, tmp_path)
    whole = read_adapter(tmp_path, ModelFacts.from_model(base(name)))
    drop_config(tmp_path, *dropped)
    assert same_as_peft(name, tmp_path).hash == whole.hash


@pytest.mark.parametrize("case", MINIMAL)
def test_a_minimal_config_is_read_as_by_peft(case, tmp_path):
    name, config, remaining = MINIMAL[case]
    save(name, config, tmp_path)
    whole = read_adapter(tmp_path, ModelFacts.from_model(base(name)))
    drop_config(tmp_path, *(config_of(tmp_path).keys() - {"peft_type", "task_type", *remaining}))
    assert same_as_peft(name, tmp_path).hash == whole.hash


def test_the_default_rank_is_compared_with_the_tensors(tmp_path):
    save("llama", lora(r=4), tmp_path)
    drop_config(tmp_path, "r")
    with pytest.raises(BadAdapter, match=r"\[4, 32\].*\[8, 32\]"):
        read_adapter(tmp_path, ModelFacts.from_model(base("llama")))


def test_parts_describe_the_method(tmp_path):
    save("llama", lora(("q_proj",), use_rslora=True, lora_alpha=6, modules_to_save=["lm_head"]), tmp_path / "lora")
    adapter = read_adapter(tmp_path / "lora", ModelFacts.from_model(base("llama")))
    (part,) = adapter.parts["model.layers.0.self_attn.q_proj"]
    assert isinstance(part, LoraPart)
    assert (part.a_RI.shape, part.b_OR.shape, part.scale) == ((4, 32), (32, 4), 3.0)
    (head,) = adapter.parts["lm_head"]
    assert isinstance(head, ReplacedPart)
    assert head.bias is None
    save("llama", ia3(("k_proj", "down_proj"), ["down_proj"]), tmp_path / "ia3")
    parts = read_adapter(tmp_path / "ia3", ModelFacts.from_model(base("llama"))).parts
    (keys,), (down,) = parts["model.layers.0.self_attn.k_proj"], parts["model.layers.0.mlp.down_proj"]
    assert isinstance(keys, Ia3Part)
    assert isinstance(down, Ia3Part)
    assert (keys.of_input, keys.vector.shape, down.of_input, down.vector.shape) == (False, (16,), True, (64,))


def test_an_embedding_stored_with_its_adapter_is_not_stored_again(tmp_path):
    save("llama", lora(("embed_tokens",)), tmp_path)
    adapter = read_adapter(tmp_path, ModelFacts.from_model(base("llama")))
    (part,) = adapter.parts["model.embed_tokens"]
    assert isinstance(part, LoraPart)
    assert adapter.bytes == 4 * (4 * 96 + 32 * 4)
    assert any("model's own" in warning for warning in adapter.warnings)


def test_an_embedding_that_is_not_the_models_own_is_served(tmp_path):
    save("llama", lora(("embed_tokens",)), tmp_path)
    model = base("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight += 1
    parts = read_adapter(tmp_path, ModelFacts.from_model(model)).parts["model.embed_tokens"]
    assert [type(part) for part in parts] == [ReplacedPart, LoraPart]


def test_an_embedding_stored_with_trained_tokens_is_served(tmp_path):
    from peft import get_peft_model

    model = get_peft_model(base("llama"), lora(trainable_token_indices=[3, 5]))
    model.save_pretrained(str(tmp_path), save_embedding_layers=True)
    adapter = read_adapter(tmp_path, ModelFacts.from_model(base("llama")))
    assert [type(part) for part in adapter.parts["model.embed_tokens"]] == [TrainableTokensPart]
    assert any("model's own" in warning for warning in adapter.warnings)


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_an_embedding_that_is_not_the_models_own_computes_what_peft_computes(name, tmp_path):
    save(name, lora(("embed_tokens",)), tmp_path)
    batch = NAMES["llama"].batch()

    def other() -> PreTrainedModel:
        model = base(name).double()
        with torch.no_grad():
            model.get_input_embeddings().weight += torch.linspace(-1, 1, 32)
        return model

    with torch.no_grad():
        expected = PeftModel.from_pretrained(other(), str(tmp_path)).double()(**batch).logits
    adapter = read_adapter(tmp_path, ModelFacts.from_model(other()))
    torch.testing.assert_close(logits(adapter, other(), batch), expected, atol=1e-5, rtol=1e-5)


def test_tied_tokens_are_one_tensor(tmp_path):
    save("tied_llama", lora(trainable_token_indices=[3, 50]), tmp_path)
    parts = read_adapter(tmp_path, ModelFacts.from_model(base("tied_llama"))).parts
    assert isinstance(parts["lm_head"][0], TrainableTokensPart)
    assert parts["lm_head"][0] is parts["model.embed_tokens"][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_are_preserved(dtype, tmp_path):
    from safetensors.torch import load_file, save_file

    save("llama", lora(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    (part,) = read_adapter(tmp_path, ModelFacts.from_model(base("llama"))).parts["model.layers.0.self_attn.q_proj"]
    assert isinstance(part, LoraPart)
    assert part.a_RI.dtype == dtype


def test_equal_content_has_one_hash_in_any_folder(tmp_path):
    facts = ModelFacts.from_model(base("llama"))
    for folder in ("one", "two", "other"):
        save("llama", lora(), tmp_path / folder)
    set_config(tmp_path / "two", base_model_name_or_path="another/model", lora_dropout=0.5, peft_version="0.7")
    set_config(tmp_path / "other", lora_alpha=9)
    one, two, other = (read_adapter(tmp_path / folder, facts) for folder in ("one", "two", "other"))
    assert one.hash == two.hash
    assert one.hash != other.hash
    assert not one.warnings
    assert "another/model" in two.warnings[0]


def test_a_classifier_under_both_names_is_a_warning_and_no_error(tmp_path):
    save("llama", lora(modules_to_save=["lm_head", "score"]), tmp_path)
    adapter = read_adapter(tmp_path, ModelFacts.from_model(base("llama")))
    assert any("'score'" in warning for warning in adapter.warnings)


def test_the_hash_of_given_content_never_changes():
    """Databases and clients store hashes of adapters."""
    vector, matrix = torch.arange(4.0), torch.arange(8.0).view(2, 4)
    parts = {
        "a": (LoraPart(matrix, matrix.T.contiguous(), 0.5, magnitude_O=vector), ReplacedPart(matrix, None)),
        "b": (Ia3Part(vector, of_input=True), TrainableTokensPart((1, 3), matrix)),
    }
    prefix, prompt = PrefixPart(vector.view(1, 1, 1, 4), vector.view(1, 1, 1, 4)), PromptPart(matrix)
    adapter = build_adapter("lora", parts, prefix=prefix, prompt=prompt)
    assert adapter.hash == "0b562e0e016a176afdd74c21efaecac35b5b33c1c73907c26bdf5a247041e4e6"
