"""`symbiosis plan`: its tables, its JSON, and one line for each thing that cannot be planned."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.cli.test_main import fails, run_here
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: LlamaForCausalLM) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_pretrained(path)
    return path


def test_the_plan_has_every_process_and_the_commands_that_run_it(folder):
    tenants = ["2 x train,lora,r=4,batch=2x16", "serve,context=64,streams=4", "job,length=32"]
    options = [word for each in tenants for word in ("--tenants", each)]
    result = run_here("plan", folder, *options, "--devices", "cuda:80GB, cpu:64GB", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [(each["role"], each["device"], each["count"]) for each in plan["processes"]] == [
        ("server", "cuda:0", 1),
        ("HTTP", "cpu", 4),
        ("tenant", "cuda:0", 2),
    ]
    for process in plan["processes"]:
        assert process["bytes"] == sum(process["parts"].values())
    assert all(each["step_s"] > 0 for each in plan["tenants"])
    assert plan["tenants"][0]["calls"] > 0
    assert plan["commands"][0].startswith(f"symbiosis serve {folder} --device cuda:0")
    assert "--http" in plan["commands"][0]
    assert 'symbiosis.connect("shm://base", device="cuda:0")' in plan["commands"][1]


def test_tables_fit_80_columns(folder):
    result = run_here("plan", folder, "--tenants", "generate,context=64", "--devices", "cpu:64GB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.partition("Run it:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert "executor" in result.stdout
    assert "KV cache" in result.stdout


def test_shards_are_chosen_where_one_device_is_too_small(tmp_path):
    """Of a model of 1.1 GB, by its config alone."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "architectures": ["LlamaForCausalLM"]}
    tiny_config(**sizes).save_pretrained(tmp_path)
    options = ("--tenants", "generate,cpu,context=64", "--devices", "cuda:1.3GB x 3, cpu:64GB", "--json")
    result = run_here("plan", tmp_path, *options)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert len(plan["server"]) > 1
    assert f"--shards {len(plan['server'])}" in plan["commands"][0]


def test_unequal_devices_are_bounded_by_the_smallest(folder):
    devices = ("--devices", "cuda:80GB, cuda:24GB, cpu:64GB")
    result = run_here("plan", folder, "--tenants", "generate,cpu,context=64", *devices, "--shards", 2, "--json")
    assert result.exit_code == 0, result.output
    assert "the smallest device (24 GB) bounds all of them" in json.loads(result.stdout)["notes"][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--shards", 3, "--devices", "cuda:80GB x 2, cpu:9GB"), "--shards 3: --devices has 2 GPUs, each shard needs its own"),
        (("--shards", 1, "--devices", "cpu:9GB"), "--shards 1: expected 2 to 64"),
        (("--shards", 2, "--devices", "cpu:9GB", "--tenants", "serve"), "hosted serving and jobs need the whole model"),
        (("--shards", 48, "--devices", "cpu:99GB"), "the smallest layer has 32 rows"),
        (("--devices", "cpu:100MB"), "does not fit"),
        (("--devices", "cpu:4GB", "--tenants", "serve,context=128,streams=90000"), "streams of 128 would fit"),
        (("--devices", "tpu"), "unknown kind 'tpu'"),
        (("--tenants", "fly"), "'fly' is unknown"),
        (("--tenants", "train,targets=nowhere"), "PEFT rejects the adapter"),
        (("--tenants", "generate,context=1m"), "the model's longest sequence is"),
        (("--tenants", "generate,cuda", "--devices", "cpu:9GB"), "there is no GPU for it"),
        (("--link", "fast"), "expected a rate such as 10Gbit/s"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_what_cannot_be_planned_is_one_line(folder, options, said):
    given = list(options)
    given += [] if "--tenants" in given else ["--tenants", "generate,context=64"]
    assert said in fails("plan", folder, *given)


def test_heads_that_do_not_divide_are_one_line(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    assert "3 key-value heads do not divide 4 attention heads" in fails("plan", tmp_path)


def test_an_unknown_model_is_one_line(tmp_path):
    assert "there is no folder" in fails("plan", tmp_path / "missing")


@pytest.mark.real
def test_the_examples_of_the_documentation_run(real_cache):
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    commands = re.findall(r"^symbiosis (plan .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for line in commands:
        result = run_here(*shlex.split(line))
        assert result.exit_code == 0, result.output
        assert "symbiosis serve" in result.stdout
