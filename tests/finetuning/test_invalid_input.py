"""Invalid input of a custom training loop raises a typed error with what was wrong and what was expected."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.errors import BadAdapter, NotStored, OutOfRange, SymbiosisError, UnknownModel
from symbiosis.finetuning.examples import Example
from symbiosis.finetuning.optimizer import StepSettings
from tests.finetuning.trainer_reference import base
from tests.lora import lora

IDS = (5, 6, 7)


@pytest.fixture(scope="module")
def studio():
    with symbiosis.Studio(copy.deepcopy(base())) as studio:
        yield studio


@pytest.fixture
def session(studio):
    session = studio.open("ann", lora(), seed=7)
    yield session
    loss = session.forward_backward([Example(IDS, IDS)])  # rejected calls leave the session intact
    assert loss.result(60).tokens == 2
    session.close()


MODELS = {
    "a number": (7, "type int"),
    "nothing in a text": ("", "'' is no model"),
    "a module": (torch.nn.Linear(2, 2), "type Linear"),
}


@pytest.mark.parametrize(("model", "said"), MODELS.values(), ids=MODELS)
def test_an_invalid_model_is_rejected(model, said):
    with pytest.raises(UnknownModel, match=f"{said}.*expected a transformers model"):
        symbiosis.Studio(model)


def test_a_model_with_an_adapter_is_rejected():
    model = copy.deepcopy(base())
    model.add_adapter(lora())
    with pytest.raises(UnknownModel, match="already carries adapters"):
        symbiosis.Studio(model)
    with pytest.raises(UnknownModel, match=r"PeftModel.*without adapters"):
        symbiosis.Studio(get_peft_model(copy.deepcopy(base()), lora()))


@pytest.mark.parametrize("settings", [{"device": "quantum"}, {"device": None}, {"dtype": "int8"}, {"dtype": 7}], ids=str)
def test_an_invalid_device_or_dtype_is_rejected_before_loading(settings):
    (name,) = settings
    with pytest.raises(SymbiosisError, match=f"{name}=.*expected"):
        symbiosis.Studio(**settings)


SETTINGS = (
    {"tokenizer": "gpt2"},
    {"training": 7},
    {"training_share": "half"},
    {"training_share": math.nan},
    {"pages": -1},
    {"pages": "7"},
    {"page_size": 0},
    {"cache_bytes": "1G"},
    {"residency": 3},
    {"vocabulary": 3},
    {"max_runing": 3},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_a_studio_are_checked(settings):
    (name,) = settings
    with pytest.raises(SymbiosisError, match=f"{name}.*expected"):
        symbiosis.Studio(base(), **settings)


@pytest.mark.parametrize("tenant", ["", None, 7, ["ann"], "a" * 257], ids=lambda tenant: repr(tenant)[:9])
def test_a_tenant_has_a_name(studio, tenant):
    with pytest.raises(OutOfRange, match=r"tenant is .*expected a name of 1 to 256 characters"):
        studio.open(tenant, lora())


@pytest.mark.parametrize("tenant", ["team/ann", "../..", "Ann B."])
def test_a_tenants_name_may_have_any_characters(studio, tenant):
    studio.open(tenant, lora()).close()


@pytest.mark.parametrize("adapter", ["lora", None, 7, LoraConfig, [("peft_type", "LORA")]], ids=str)
def test_an_adapter_must_be_a_config(studio, adapter):
    with pytest.raises(BadAdapter, match=r"adapter is .*expected a config of PEFT"):
        studio.open("ann", adapter)


@pytest.mark.parametrize(
    "settings", [{"weight": 0}, {"weight": math.nan}, {"weight": "1"}, {"seed": 1 << 63}, {"seed": "1"}], ids=str
)
def test_the_arguments_of_open_are_checked(studio, settings):
    (name,) = settings
    with pytest.raises(OutOfRange, match=f"{name} is .*expected an int") as error:
        studio.open("ann", lora(), **settings)
    assert error.value.field == name


@pytest.mark.parametrize(
    "value", [-1, math.nan, math.inf, "1e-3", None, True, torch.tensor(0.1), 10**400], ids=lambda v: repr(v)[:9]
)
@pytest.mark.parametrize("name", StepSettings.__slots__)
def test_every_setting_of_a_step_is_a_number_in_its_range(name, value):
    with pytest.raises(OutOfRange, match=f"{name} is .*expected an int or float from 0 to") as error:
        StepSettings(**{name: value})
    assert error.value.field == name
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("settings", [None, 1e-3, {"learning_rate": 1e-3}, StepSettings], ids=str)
def test_optim_step_requires_step_settings(session, settings):
    with pytest.raises(OutOfRange, match=r"settings is .*expected StepSettings"):
        session.optim_step(settings)


BATCHES = {
    "nothing": (None, "batch is None, expected a list of Example"),
    "one example": (Example(IDS, IDS), "batch is Example.*expected a list of Example"),
    "a text": ("text", "example 0 is 't', expected an Example"),
    "dicts": ([{"input_ids": [1], "labels": [1]}], "example 0 is .*expected an Example"),
    "a tensor": (torch.ones(2, 3, dtype=torch.long), "example 0 is tensor.*expected an Example"),
    "ids in a tensor": ([Example(torch.tensor(IDS), IDS)], "ids of example 0 are of type Tensor.*tolist"),
    "labels in an array": ([Example(IDS, np.array(IDS))], "labels of example 0 are of type ndarray.*tolist"),
    "ids in bytes": ([Example(b"abc", IDS)], "ids of example 0 are of type bytes"),
    "ids in a range": ([Example(range(3), IDS)], "ids of example 0 are of type range"),
    "no labels": ([Example(IDS, None)], "labels of example 0 are of type NoneType"),
    "a fraction": (
        [Example(IDS, IDS), Example((1.0, 2), (1, 2))],
        "example 1 has the token 1.0, expected an int from 0 to 127",
    ),
    "numpy's numbers": ([Example(tuple(np.array(IDS)), IDS)], "the token np.int64"),
    "a token that is none": ([Example((1, 128), (1, 2))], "the token 128, expected an int from 0 to 127"),
    "a label that is none": ([Example((1, 2), (1, -1))], "the label -1, expected an int from 0 to 127, or -100"),
    "-100 as a fraction": ([Example((1, 2), (-100.0, 2))], "the label -100.0, expected an int"),
    "fewer labels": ([Example(IDS, (1,))], "3 tokens and 1 labels, expected a label for each token"),
}


@pytest.mark.parametrize(("batch", "said"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_an_invalid_batch_is_rejected_at_once(session, call, batch, said):
    with pytest.raises(OutOfRange, match=said) as error:
        getattr(session, call)(batch)
    assert error.value.field == "batch"


@pytest.mark.parametrize("number", [0, -1, "1", 1.0, True], ids=repr)
def test_numbers_of_calls_are_positive_integers(session, number):
    with pytest.raises(OutOfRange, match=r"number is .*expected a whole number from 1 on"):
        session.forward([Example(IDS, IDS)], number=number)


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("folder", [None, 7, "", "/", "a\0b", b"folder"], ids=repr)
def test_an_invalid_folder_is_rejected(session, call, folder):
    with pytest.raises(OutOfRange, match=r"folder is .*expected the path of a folder"):
        getattr(session, call)(folder)


@pytest.mark.parametrize("settings", [{"optimizer": "yes"}, {"replace": "no"}, {"replace": 1}, {"keep": 7}], ids=str)
def test_the_arguments_of_save_are_checked(session, tmp_path, settings):
    (name,) = settings
    with pytest.raises(OutOfRange, match=f"{name} is .*expected"):
        session.save(tmp_path / "it", **settings)
    assert not list(tmp_path.iterdir())


def test_only_folders_are_replaced(session, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("file", "link", "nowhere"):
        for replace in (False, True):
            with pytest.raises(OutOfRange, match=f"{name}. is a file or a link, expected a new or an empty folder"):
                session.save(tmp_path / name, replace=replace).result(60)
    with pytest.raises(NotStored, match="Not a directory"):
        session.save(tmp_path / "file" / "below").result(60)
    with pytest.raises(NotStored, match="name too long"):
        session.save(tmp_path / ("a" * 300)).result(60)
    assert (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", "link", "nowhere"}
    session.save(tmp_path / "folder").result(60)  # it is empty
    with pytest.raises(OutOfRange, match="not empty, expected a new or an empty one, or replace=True"):
        session.save(tmp_path / "folder").result(60)
    session.save(tmp_path / "folder", replace=True).result(60)
    for name, why in (("file", "Not a directory"), ("gone", "No such file")):
        with pytest.raises(BadAdapter, match=f"{name}.*{why}"):
            session.load(tmp_path / name).result(60)


def test_a_relative_folder_is_resolved_when_save_is_called(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with session.gathering():
        saved = session.save("it")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    saved.result(60)
    assert (tmp_path / "it" / "adapter_config.json").is_file()


SAMPLES = {
    "nothing": ({"prompts": None}, "prompts is None, expected a list of prompts"),
    "one text": ({"prompts": "text"}, "prompts is 'text', expected a list of prompts"),
    "one prompt's tokens": ({"prompts": [1, 2]}, "a prompt is 1, expected a text, or a list of token ids"),
    "a tensor": ({"prompts": torch.ones(1, 2)}, "prompts is tensor.*expected a list"),
    "tensors": ({"prompts": [torch.tensor([1])]}, "a prompt is tensor.*expected a text, or a list"),
    "bytes": ({"prompts": [b"ab"]}, "a prompt is b'ab', expected a text, or a list"),
    "fractions": ({"prompts": [[1.0]]}, "prompt.*expected token ids"),
    "a wrong name": ({"tempreature": 1.0}, "'tempreature' is no setting, expected some of"),
    "stops that are one": ({"stop_ids": 7}, "stop_ids is 7, expected a list of token ids"),
    "stops that are a text": ({"stop_ids": "ab"}, "stop_ids is 'ab', expected a list of token ids"),
    "a bias without tokens": ({"logit_bias": [1]}, "logit_bias is .*expected numbers by token id"),
    "eos in words": ({"ignore_eos": "no"}, "ignore_eos is 'no', expected True or False"),
    "tokens in words": ({"max_tokens": "7"}, "max_tokens is '7', expected an integer from 1 to 1048576"),
}


@pytest.mark.parametrize(("settings", "said"), SAMPLES.values(), ids=SAMPLES)
def test_the_arguments_of_sample_are_checked(session, settings, said):
    with pytest.raises(OutOfRange, match=said):
        session.sample(**{"prompts": [[1, 2]], **settings})
