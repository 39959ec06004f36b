"""Any folder gives a sound adapter, or a clear error that names the file and the field."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig
from safetensors.torch import load_file, save_file

from symbiosis.adapters.files import FileLimits
from symbiosis.adapters.model_facts import ModelFacts
from symbiosis.adapters.reader import read_adapter
from symbiosis.errors import BadAdapter, SymbiosisError, UnsupportedAdapter, from_code
from tests.adapters.peft_adapters import base, config_of, drop_config, save, set_config, split_file, write_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return ModelFacts.from_model(base("llama"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """One sound adapter of each kind."""
    root = tmp_path_factory.mktemp("saved")
    kinds: dict[str, PeftConfig] = {
        "lora": LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=4, target_modules=["q_proj", "v_proj"]),
        "tokens": LoraConfig(init_lora_weights=False, r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
        "head": LoraConfig(init_lora_weights=False, r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    for name, config in kinds.items():
        save("llama", config, root / name)
    return {name: root / name for name in kinds}


def copy_adapter(source: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, TENSORS):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def raw_config(text: str | bytes) -> Change:
    raw = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / CONFIG).write_bytes(raw)


def setting(**changes: Any) -> Change:
    return lambda folder: set_config(folder, **changes)


def without(*keys: str) -> Change:
    return lambda folder: drop_config(folder, *keys)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / TENSORS)
        change(found)
        save_file(found, folder / TENSORS)

    return apply


def header(change: Callable[[dict[str, Any]], Any], data: Callable[[bytes], bytes] = lambda data: data) -> Change:
    def apply(folder: Path) -> None:
        found, rest = split_file(folder)
        change(found)
        write_file(folder, found, data(rest))

    return apply


def replaced(name: str, by: Callable[[Path], Any]) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"{name}.away")
        by(folder)

    return apply


def poisoned(found: dict[str, torch.Tensor], name: str, value: float) -> None:
    found[name].view(-1)[1] = value


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found[f"{Q}.lora_A.weight"].update(changes)


BAD: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    # the folder
    "no config": ("lora", lambda f: (f / CONFIG).unlink(), (CONFIG, "missing")),
    "no tensors": ("lora", lambda f: (f / TENSORS).unlink(), (TENSORS, "missing")),
    "tensors link out of the folder": (
        "lora", replaced(TENSORS, lambda f: (f / TENSORS).symlink_to(f.parent / f"{TENSORS}.away")), (TENSORS, "link"),
    ),
    "config links to a secret": ("lora", replaced(CONFIG, lambda f: (f / CONFIG).symlink_to("/etc/passwd")), (CONFIG, "link")),
    "tensors are a pipe": ("lora", replaced(TENSORS, lambda f: os.mkfifo(f / TENSORS)), (TENSORS, "plain file")),
    "config is a pipe": ("lora", replaced(CONFIG, lambda f: os.mkfifo(f / CONFIG)), (CONFIG, "plain file")),
    "config is a folder": ("lora", replaced(CONFIG, lambda f: (f / CONFIG).mkdir()), (CONFIG, "plain file")),
    "a huge sparse file": ("lora", lambda f: os.truncate(f / TENSORS, 1 << 40), (TENSORS, "bytes")),
    "a huge config": ("lora", lambda f: os.truncate(f / CONFIG, 1 << 30), (CONFIG, "bytes")),
    # the config as text
    "empty config": ("lora", raw_config(""), (CONFIG, "JSON")),
    "config is a list": ("lora", raw_config("[]"), (CONFIG, "object")),
    "not JSON": ("lora", raw_config("{'r': 4}"), (CONFIG, "JSON")),
    "not UTF-8": ("lora", raw_config(b'{"peft_type": "LORA\xff"}'), (CONFIG, "UTF-8")),
    "a key twice": ("lora", raw_config('{"peft_type": "LORA", "r": 4, "r": 8}'), (CONFIG, "'r'", "twice")),
    "a key twice further in": ("lora", raw_config('{"rank_pattern": {"a": 4, "a": 8}}'), (CONFIG, "'a'", "twice")),
    "NaN": ("lora", raw_config('{"peft_type": "LORA", "lora_alpha": NaN}'), (CONFIG, "NaN")),
    "Infinity": ("lora", raw_config('{"peft_type": "LORA", "lora_alpha": -Infinity}'), (CONFIG, "Infinity")),
    "nested deeply": ("lora", raw_config('{"peft_type": ' + "[" * 200_000 + "]" * 200_000 + "}"), (CONFIG, "deep")),
    "a number of a million digits": ("lora", raw_config('{"r": ' + "9" * 900_000 + "}"), (CONFIG, "JSON")),
    # the config's fields
    "no method": ("lora", setting(peft_type=None), (CONFIG, "peft_type")),
    "method is a number": ("lora", setting(peft_type=3), (CONFIG, "peft_type")),
    "rank 0": ("lora", setting(r=0), (CONFIG, "'r'")),
    "rank too large": ("lora", setting(r=513), (CONFIG, "'r'", "512")),
    "rank is true": ("lora", setting(r=True), (CONFIG, "'r'")),
    "rank is a text": ("lora", setting(r="4"), (CONFIG, "'r'")),
    "rank is null": ("lora", setting(r=None), (CONFIG, "'r'")),
    "alpha is null": ("lora", setting(lora_alpha=None), (CONFIG, "lora_alpha", "a number")),
    "alpha overflows": ("lora", raw_config('{"peft_type":"LORA","r":4,"target_modules":["q"],"lora_alpha":1e999}'), ("lora_alpha",)),
    "alpha is absurd": ("lora", setting(lora_alpha=1e300), (CONFIG, "lora_alpha")),
    "dora is a text": ("lora", setting(use_dora="yes"), (CONFIG, "use_dora")),
    "bias of another kind": ("lora", setting(bias="some"), (CONFIG, "bias")),
    "targets are a number": ("lora", setting(target_modules=7), (CONFIG, "target_modules")),
    "targets have a number": ("lora", setting(target_modules=["q_proj", 7]), (CONFIG, "target_modules")),
    "targets are null": ("lora", setting(target_modules=None), (CONFIG, "no target_modules", "save_pretrained")),
    "targets are missing": ("lora", without("target_modules"), (CONFIG, "no target_modules", "save_pretrained")),
    "targets are a broken expression": ("lora", setting(target_modules="(q_proj"), (CONFIG, "target_modules")),
    "targets are nested deeply": ("lora", setting(target_modules="(" * 5000 + ")" * 5000), (CONFIG, "target_modules")),
    "a rank pattern that is a list": ("lora", setting(rank_pattern=["q_proj"]), (CONFIG, "rank_pattern")),
    "a rank pattern with a text": ("lora", setting(rank_pattern={"q_proj": "4"}), (CONFIG, "rank_pattern[q_proj]")),
    "an alpha pattern with null": ("lora", setting(alpha_pattern={"q_proj": None}), (CONFIG, "alpha_pattern[q_proj]")),
    "layers that are no numbers": ("lora", setting(layers_to_transform=["1"]), (CONFIG, "layers_to_transform")),
    "modules to save that are no names": ("lora", setting(modules_to_save=[[]]), (CONFIG, "modules_to_save")),
    "a token twice": ("tokens", setting(trainable_token_indices=[3, 3]), (CONFIG, "trainable_token_indices")),
    "a negative token": ("tokens", setting(trainable_token_indices=[3, -1]), (CONFIG, "trainable_token_indices")),
    "virtual tokens are not said": ("prompt", without("num_virtual_tokens"), (CONFIG, "no num_virtual_tokens", "whole number")),
    "no virtual tokens": ("prompt", setting(num_virtual_tokens=0), (CONFIG, "num_virtual_tokens")),
    "too many virtual tokens": ("prefix", setting(num_virtual_tokens=1 << 30), (CONFIG, "num_virtual_tokens")),
    "IA3 without feedforward": ("ia3", setting(feedforward_modules=None), (CONFIG, "feedforward_modules")),
    # the config and the tensors disagree
    "another rank than stored": ("lora", setting(r=8), (TENSORS, "lora_A", "[4, 32]", "[8, 32]", CONFIG)),
    "a rank pattern that is not stored": ("lora", setting(rank_pattern={"v_proj": 2}), (TENSORS, "v_proj", "[4, 32]", "[2, 32]")),
    "targets without tensors": ("lora", setting(target_modules=["q_proj", "v_proj", "o_proj"]), (TENSORS, "o_proj", "target_modules")),
    "tensors without a target": ("lora", setting(target_modules=["q_proj"]), (TENSORS, "v_proj", "target_modules")),
    "an excluded module with tensors": ("lora", setting(exclude_modules=["v_proj"]), (TENSORS, "v_proj", "target_modules")),
    "a layer left out with tensors": ("lora", setting(layers_to_transform=[1]), (TENSORS, "layers.0", "target_modules")),
    "dora without magnitudes": ("lora", setting(use_dora=True), (TENSORS, "lora_magnitude_vector")),
    "magnitudes without dora": (
        "lora", tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(32)})), (TENSORS, "magnitude", "use_dora"),
    ),
    "a lora bias without tensors": ("lora", setting(lora_bias=True), (TENSORS, "lora_B.bias")),
    "a saved module without tensors": ("lora", setting(modules_to_save=["lm_head"]), (TENSORS, "weight of lm_head")),
    "a saved module not named": ("head", setting(modules_to_save=None, target_modules=["q_proj", "lm_head"]), (TENSORS, "lm_head")),
    "a base weight smuggled in": (
        "lora", tensors(lambda t: t.update({f"{Q}.weight": torch.ones(32, 32)})), (TENSORS, "q_proj.weight", "modules_to_save"),
    ),
    "a base weight under an adapter": (
        "lora", tensors(lambda t: t.update({f"{Q}.base_layer.weight": torch.ones(32, 32)})), (TENSORS, "base_layer.weight"),
    ),
    "one half of a pair": ("lora", tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), (TENSORS, "lora_B.weight", "q_proj")),
    "tokens without tensors": ("lora", setting(trainable_token_indices=[3]), (TENSORS, "trainable_tokens_delta")),
    "fewer tokens than rows": ("tokens", setting(trainable_token_indices=[3]), (TENSORS, "embed_tokens", "[1, 32]")),
    "IA3 on the other side": ("ia3", setting(feedforward_modules=["k_proj"]), (TENSORS, "ia3_l", "feedforward_modules")),
    "another number of virtual tokens": ("prompt", setting(num_virtual_tokens=4), (TENSORS, "prompt_embeddings", "[4, 32]")),
    "a prompt with LoRA": ("lora", tensors(lambda t: t.update(prompt_embeddings=torch.ones(3, 32))), (TENSORS, "prompt_embeddings")),
    "no prompt": ("prompt", tensors(lambda t: (t.clear(), t.update({"base_model.lm_head.weight": torch.ones(96, 32)}))), (TENSORS,)),
    "a stranger's name": ("lora", tensors(lambda t: t.update(stranger=torch.ones(1))), (TENSORS, "'stranger'")),
    "no base_model prefix": (
        "lora", tensors(lambda t: t.update({"model.layers.0.self_attn.o_proj.lora_A.weight": torch.ones(4, 32)})), (TENSORS, "o_proj"),
    ),
    "nested adapters": (
        "lora", tensors(lambda t: t.update({f"{Q}.lora_A.default.weight": torch.ones(4, 32)})), (TENSORS, "lora_A.default.weight"),
    ),
    # the numbers
    "NaN among the numbers": ("lora", tensors(lambda t: poisoned(t, f"{Q}.lora_A.weight", float("nan"))), (TENSORS, f"{Q}.lora_A")),
    "infinity among the numbers": ("ia3", tensors(lambda t: poisoned(t, next(iter(t)), float("inf"))), (TENSORS, "finite")),
    "NaN in a prompt": ("prompt", tensors(lambda t: poisoned(t, "prompt_embeddings", float("nan"))), (TENSORS, "prompt_embeddings")),
    "a flat matrix": ("lora", tensors(lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(128)})), (TENSORS, "lora_B", "[128]")),
    # the safetensors file
    "an empty file": ("lora", lambda f: (f / TENSORS).write_bytes(b""), (TENSORS,)),
    "a header larger than the file": ("lora", lambda f: (f / TENSORS).write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), (TENSORS,)),
    "a header beyond the cap": ("lora", lambda f: write_file(f, b"{" + b" " * (9 << 20) + b"}", b""), (TENSORS, "header")),
    "a header that is not JSON": ("lora", lambda f: write_file(f, b"\x80\x04pickle", b""), (TENSORS, "header")),
    "a header nested deeply": ("lora", lambda f: write_file(f, b'{"a":' * 200_000, b""), (TENSORS, "header")),
    "a header with a name twice": ("lora", lambda f: write_file(f, b'{"a": {}, "a": {}}', b""), (TENSORS, "'a'", "twice")),
    "no tensors in the file": ("lora", lambda f: write_file(f, {}, b""), (TENSORS, "no tensors")),
    "a cut file": ("lora", header(lambda h: None, lambda data: data[:-1]), (TENSORS, "complete")),
    "undeclared bytes": ("lora", header(lambda h: None, lambda data: data + b"\0"), (TENSORS, "complete")),
    "metadata that are no texts": ("lora", header(lambda h: h.update(__metadata__={"a": 1})), (TENSORS, "metadata")),
    "an entry without a shape": ("lora", header(lambda h: h[f"{Q}.lora_A.weight"].pop("shape")), (TENSORS, "shape")),
    "an entry with more": ("lora", header(entry(strides=[1])), (TENSORS, "described")),
    "a negative size": ("lora", header(entry(shape=[-4, 32])), (TENSORS, "shape")),
    "a size that overflows": ("lora", header(entry(shape=[1 << 62, 4])), (TENSORS, "shape")),
    "sizes whose product overflows": ("lora", header(entry(shape=[1 << 31, 1 << 31, 1 << 31])), (TENSORS, "bytes")),
    "a size that is true": ("lora", header(entry(shape=[True, 128])), (TENSORS, "shape")),
    "an empty tensor": ("lora", header(entry(shape=[0, 32])), (TENSORS, "gather")),
    "offsets that overlap": ("lora", header(entry(data_offsets=[4, 516])), (TENSORS,)),
    "offsets the wrong way": ("lora", header(entry(data_offsets=[512, 0])), (TENSORS,)),
    "offsets beyond the file": ("lora", header(entry(data_offsets=[1 << 40, (1 << 40) + 512])), (TENSORS,)),
    "an unknown dtype": ("lora", header(entry(dtype="F33")), (TENSORS, "'F33'")),
    "a name with escapes": ("lora", header(lambda h: h.update({"\x1b[31m": h.pop(f"{Q}.lora_A.weight")})), (TENSORS, "named")),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    **{
        f"{name} is set": ("lora", setting(**{name: value}), (CONFIG, f"'{name}'"))
        for name, value in {
            "layer_replication": [[0, 2], [1, 2]],
            "megatron_config": {"hidden_size": 32},
            "target_parameters": ["experts.down_proj"],
            "alora_invocation_tokens": [1, 2],
            "arrow_config": {"top_k": 2},
            "use_bdlora": {"nblocks": 2},
            "kasa_config": {"beta": 1e-4},
            "monteclora_config": {"num_samples": 8},
            "velora_config": {"num_groups": 4},
            "use_qalora": True,
            "enable_lora": [True, False],
            "a_setting_of_a_newer_peft": 0,
        }.items()
    },
    **{
        f"started from {name}": ("lora", setting(init_lora_weights=name), (CONFIG, "init_lora_weights", name))
        for name in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "something_new")
    },
    **{
        f"the method {name}": ("lora", setting(peft_type=name), (CONFIG, name, "LORA, IA3, PREFIX_TUNING, PROMPT_TUNING, P_TUNING"))
        for name in ("ADALORA", "VERA", "LOHA", "OFT", "XLORA", "MULTITASK_PROMPT_TUNING", "lora", "__class__")
    },
    "a pickle": ("lora", lambda f: (f / TENSORS).rename(f / "adapter_model.bin"), ("adapter_model.bin", "save_pretrained")),
    "a back reference": ("lora", setting(target_modules=r"(.)\1.*"), (CONFIG, "target_modules")),
    "a look behind": ("lora", setting(target_modules=r".*(?<=q)_proj"), (CONFIG, "target_modules")),
    "an expression that takes for ever": ("lora", setting(target_modules=r"(?:(?:.{0,40}){0,40}){0,40}" * 400 + "!"), (CONFIG, "too long")),
    "integers for numbers": ("lora", header(entry(dtype="I32")), (TENSORS, "'I32'", "F32")),
    "a module the model lacks": (
        "lora", tensors(lambda t: t.update({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)})),
        (TENSORS, "layers.9"),
    ),
    "a classifier the model lacks": ("head", tensors(lambda t: t.update({"base_model.model.score.weight": torch.ones(2, 32)})), (TENSORS, "score")),
    "another width": ("lora", tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64)})), (TENSORS, "[4, 64]", "[4, 32]")),
    "a norm as a target": ("lora", setting(target_modules=["q_proj", "v_proj", "input_layernorm"]), (CONFIG, "input_layernorm")),
    "a larger vocabulary": (
        "lora", tensors(lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(100, 32)})), (TENSORS, "vocabulary"),
    ),
    "a token the model lacks": ("tokens", setting(trainable_token_indices=[3, 96]), (CONFIG, "trainable_token_indices", "96")),
    "tokens of a module the model lacks": ("tokens", setting(trainable_token_indices={"wte": [3, 5]}), (CONFIG, "'wte'")),
    "a prompt for two models": ("prompt", setting(num_transformer_submodules=2), (CONFIG, "num_transformer_submodules")),
    "a prompt of another width": ("prompt", setting(token_dim=64), (CONFIG, "token_dim")),
    "a prefix for other heads": ("prefix", setting(num_attention_heads=4), (CONFIG, "num_attention_heads")),
    "a prefix for more layers": ("prefix", setting(num_layers=3), (CONFIG, "num_layers")),
    "IA3 of an embedding": ("ia3", setting(target_modules=["embed_tokens"]), (CONFIG, "embed_tokens")),
}  # fmt: skip


def assert_rejected(kind: type[SymbiosisError], folder: Path, facts: ModelFacts, words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        read_adapter(folder, facts)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 600
    assert str(folder) not in message, "the server's paths are not the tenant's business"


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_is_rejected_with_the_reason(case, saved, facts, tmp_path):
    kind, change, words = BAD[case]
    folder = copy_adapter(saved[kind], tmp_path / "adapter")
    change(folder)
    assert_rejected(BadAdapter, folder, facts, words)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_adapter_is_rejected_with_the_reason(case, saved, facts, tmp_path):
    kind, change, words = UNSUPPORTED[case]
    folder = copy_adapter(saved[kind], tmp_path / "adapter")
    change(folder)
    assert_rejected(UnsupportedAdapter, folder, facts, words)


def test_a_missing_folder_is_rejected(facts, tmp_path):
    assert_rejected(BadAdapter, tmp_path / "nowhere", facts, ("'nowhere'",))


def test_stacked_experts_are_rejected(tmp_path):
    save("mixtral", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"]), tmp_path / "a")
    assert_rejected(UnsupportedAdapter, tmp_path / "a", ModelFacts.from_model(base("mixtral")), (CONFIG, "target_parameters"))
    save("mixtral", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["experts"]), tmp_path / "b")
    assert_rejected(UnsupportedAdapter, tmp_path / "b", ModelFacts.from_model(base("mixtral")), ())


def test_bias_of_all_layers_needs_their_tensors(saved, tmp_path):
    model = ModelFacts.from_model(base("qwen2"))  # the same shapes, and biases
    folder = copy_adapter(saved["lora"], tmp_path / "adapter")
    assert read_adapter(folder, model).parts
    set_config(folder, bias="all")
    assert_rejected(BadAdapter, folder, model, (TENSORS, "bias='all'"))


def test_a_prompt_is_rejected_for_a_model_that_does_not_generate(saved):
    assert_rejected(UnsupportedAdapter, saved["prompt"], ModelFacts.from_model(base("bart")), (CONFIG, "PROMPT_TUNING"))
    assert_rejected(UnsupportedAdapter, saved["prefix"], ModelFacts.from_model(base("deepseek_v3")), (CONFIG, "PREFIX_TUNING"))


def test_an_adapter_of_another_model_is_rejected(saved):
    assert_rejected(UnsupportedAdapter, saved["lora"], ModelFacts.from_model(base("gpt2")), (TENSORS, "another model"))


def test_limits_are_configurable(saved, facts):
    with pytest.raises(BadAdapter, match="from 1 to 2"):
        read_adapter(saved["lora"], facts, FileLimits(max_rank=2))
    with pytest.raises(BadAdapter, match="more than the 1000 allowed"):
        read_adapter(saved["lora"], facts, FileLimits(max_bytes=1000))


def test_settings_that_are_off_or_only_for_training_have_no_effect(saved, facts, tmp_path):
    folder = copy_adapter(saved["lora"], tmp_path / "adapter")
    plain = read_adapter(folder, facts)
    set_config(
        folder, lora_dropout=0.3, fan_in_fan_out=True, megatron_core="evil.module", eva_config={"rho": 2.0}, inference_mode=False,
        auto_mapping={"parent_library": "os", "base_model_class": "system"}, use_dora=False, layer_replication=None, newer=None,
        task_type="SEQ_CLS", init_lora_weights="eva",
    )  # fmt: skip
    assert read_adapter(folder, facts).hash == plain.hash


@pytest.mark.parametrize("kind", ["lora", "ia3", "prefix", "prompt"])
def test_every_field_of_peft_is_served_harmless_or_rejected(kind, saved, facts, tmp_path):
    for field in config_of(saved[kind]):
        folder = copy_adapter(saved[kind], tmp_path / field)
        set_config(folder, **{field: [{"surprise": 1}]})
        try:
            read_adapter(folder, facts)
        except (BadAdapter, UnsupportedAdapter) as error:
            assert field in str(error)  # noqa: PT017 - harmless fields raise nothing
            assert "not a setting known here" not in str(error)  # noqa: PT017


def test_the_error_codes_map_to_their_classes():
    assert type(from_code("bad_adapter", "")) is BadAdapter
    assert type(from_code("unsupported_adapter", "")) is UnsupportedAdapter


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted(
    {field.name for kind in (LoraConfig, IA3Config, PrefixTuningConfig, PromptTuningConfig) for field in fields(kind)}
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_reject(folder: Path, facts: ModelFacts) -> None:
    """Read the folder: an adapter or one of the two errors."""
    began = time.monotonic()
    message = CONFIG
    try:
        read_adapter(folder, facts)
    except (BadAdapter, UnsupportedAdapter) as error:
        message = str(error)
    assert CONFIG in message or TENSORS in message
    assert time.monotonic() - began < 20


@FUZZ
@given(st.sampled_from(["lora", "tokens", "ia3", "prefix"]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_config_gives_an_adapter_or_a_clear_error(saved, facts, tmp_path, kind, changes):
    folder = copy_adapter(saved[kind], tmp_path / "adapter")
    (folder / CONFIG).write_text(json.dumps(config_of(folder) | changes))
    read_or_reject(folder, facts)


@FUZZ
@given(st.data())
def test_any_bytes_give_an_adapter_or_a_clear_error(saved, facts, tmp_path, data):
    folder = copy_adapter(saved[data.draw(st.sampled_from(["lora", "prompt"]))], tmp_path / "adapter")
    file = folder / data.draw(st.sampled_from([CONFIG, TENSORS]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(raw), 900) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file.write_bytes(raw)
    read_or_reject(folder, facts)


@FUZZ
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "more"]), JSON, min_size=1), st.text(max_size=30))
def test_any_header_gives_an_adapter_or_a_clear_error(saved, facts, tmp_path, changes, name):
    folder = copy_adapter(saved["lora"], tmp_path / "adapter")
    found, rest = split_file(folder)
    found[f"{Q}.lora_A.weight"] |= changes
    if len(name) % 2:
        found[name] = found.pop(f"{Q}.lora_A.weight")
    write_file(folder, found, rest)
    read_or_reject(folder, facts)
