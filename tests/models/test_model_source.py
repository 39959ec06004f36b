"""Names of models are recognized without torch; a hub that cannot be reached is reported as such."""

from __future__ import annotations

import pytest

from symbiosis.errors import UnknownModel
from symbiosis.models.default_model import HUB_ID, NAME
from symbiosis.models.model_source import check_found, is_default


@pytest.mark.parametrize("source", [None, NAME, NAME.lower(), HUB_ID, HUB_ID.upper()])
def test_the_default_model_has_its_name_and_its_hub_id(source):
    assert is_default(source)


def test_another_model_is_not_the_default(tmp_path, monkeypatch):
    assert not is_default("gpt2")
    assert not is_default(object())
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert not is_default(NAME), "a folder of the user"
    with pytest.raises(UnknownModel, match=r"has no config\.json"):
        check_found(NAME)


@pytest.mark.parametrize("name", ["no-such-model", "an-owner/no-such-model"])
def test_a_hub_that_cannot_be_reached_is_reported(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnknownModel, match=r"not a folder on this machine, and the hub http://127.0.0.1:1 cannot be reached"):
        check_found(name)


def test_what_is_no_hub_id_is_reported():
    with pytest.raises(UnknownModel, match="neither a folder on this machine nor a hub id"):
        check_found("two words")
