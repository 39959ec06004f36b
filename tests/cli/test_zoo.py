"""`symbiosis zoo …`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from symbiosis.cli.main import app
from tests.zoo.conftest import fine_tuned, make_model, make_text, save_tokenizer, train


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


def test_a_model_may_lose_a_share_of_its_gain(run, tmp_path):
    base = train(make_model(tie_word_embeddings=True), make_text(0, ["river", "stone"]), 30)
    for name, model in (("base", base), ("tuned", train(make_model(tie_word_embeddings=True), make_text(1, ["ship"]), 40))):
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    (tmp_path / "text.txt").write_text(make_text(2, ["ship"]))
    zoo = tmp_path / "zoo"
    run("add", zoo, tmp_path / "base")
    files = ("--text", tmp_path / "text.txt", "--json", tmp_path / "report.json", "--plot", tmp_path / "report.png")
    output = run("add", zoo, tmp_path / "tuned", "--may-lose", "0.3", *files)
    assert "gain kept" in output
    assert "of which a chain may lose 30.0%" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["candidates"]
    assert report["verdict"] in output
    assert (tmp_path / "report.png").stat().st_size > 1000
    shown = run("show", zoo, "tuned")
    assert f"verdict: {report['verdict']}" in shown
    assert "loss_of_model:" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--may-lose", "-1"), "expected a share of the loss gain"),
        (("--may-lose", "nan"), "expected a share of the loss gain"),
        (("--may-lose", "0.1", "--text", "none.txt"), "the text none.txt cannot be read"),
        (("--may-lose", "0.1", "--plot", "none/report.png"), "there is no folder"),
    ],
)
def test_absurd_options_of_admission_are_one_line(run, tmp_path, options, says):
    make_model().save_pretrained(tmp_path / "base")
    output = run("add", tmp_path / "zoo", tmp_path / "base", *options, status=1)
    assert says in " ".join(output.split())
    assert not (tmp_path / "zoo").exists()
