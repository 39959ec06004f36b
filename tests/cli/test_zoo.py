"""`symbiosis zoo …`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from symbiosis.cli.main import app
from tests.zoo.conftest import fine_tuned, make_model


@pytest.fixture
def run():
    def run(*arguments, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["zoo", *map(str, arguments)])
        assert result.exit_code == status, result.output
        return result.output

    return run


def test_models_are_added_listed_shown_removed_and_verified(run, tmp_path):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    fine_tuned(base, range(3, 4)).save_pretrained(tmp_path / "tuned")
    zoo = tmp_path / "zoo"
    assert "base: 10 of 10 blocks are new" in run("add", zoo, tmp_path / "base")
    assert "2 of 10 blocks are new" in run("add", zoo, tmp_path / "tuned", "--name", "mine")
    listed = run("list", zoo)
    assert "2 models in 12 blocks" in listed
    assert "% less than copies" in listed
    shown = run("show", zoo, "mine")
    assert shown.count("base") == 8
    assert "attention 3" in shown
    assert "source: tuned" in shown
    assert "2 models are as they were added" in run("verify", zoo)
    run("remove", zoo, "mine")
    assert "removed 2 files" in run("gc", zoo)
    block = next(each for each in (zoo / "objects").rglob("*") if each.is_file())
    block.write_bytes(b"changed")
    assert "was changed" in run("verify", zoo, status=1)


def test_what_is_wrong_is_one_line(run, tmp_path):
    assert "error:" in run("list", tmp_path / "none", status=1)
    make_model().save_pretrained(tmp_path / "base")
    run("add", tmp_path / "zoo", tmp_path / "base")
    output = run("show", tmp_path / "zoo", "other", status=1)
    assert "no model 'other': there are base" in " ".join(output.split())
