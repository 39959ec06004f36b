"""`symbiosis zoo surrogate`."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from symbiosis.cli.main import app
from tests.zoo.conftest import make_model


@pytest.fixture
def run():
    def run(*arguments, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["zoo", *map(str, arguments)])
        assert result.exit_code == status, result.output
        return " ".join(result.output.split())

    return run


@pytest.fixture
def zoo(run, tmp_path):
    """With one model, which has a tokenizer of letters; and a text."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{chr(97 + i): i + 1 for i in range(26)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    make_model().save_pretrained(tmp_path / "base")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "base")
    run("add", tmp_path / "zoo", tmp_path / "base")
    chance = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(chance.choice("abcdefghij") for _ in range(4000)))
    return tmp_path / "zoo"


def test_a_surrogate_is_made_shown_and_verified(run, zoo, tmp_path):
    made = run("surrogate", zoo, "base", "--block", "ffn 1", "--text", tmp_path / "text.txt", "--seconds", 1)
    assert "same token" in made
    assert "51%" in made  # half of the weights, and a bias
    shown = run("show", zoo, "base")
    assert "ffn 1" in shown.partition("surrogates")[2]
    assert "1 models are as they were added" in run("verify", zoo)
    assert "removed 0 files" in run("gc", zoo)


def test_what_is_wrong_is_one_line_and_changes_nothing(run, zoo, tmp_path):
    text, manifest = tmp_path / "text.txt", (zoo / "models" / "base.json").read_bytes()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("a b c")
    for options, says in (
        (("--block", "ffn 9", "--text", text), "no layer 9: expected 0 to 3"),
        (("--block", "head", "--text", text), "'head' is no block"),
        (("--block", "ffn 1", "--text", text, "--keep", "3"), "keep=3: expected a share"),
        (("--block", "ffn 1", "--text", tmp_path / "none.txt"), "none.txt cannot be read"),
        (("--block", "ffn 1", "--text", tmp_path / "bytes.txt"), "not UTF-8"),
        (("--block", "ffn 1", "--text", tmp_path / "short.txt"), "expected at least"),
    ):
        output = run("surrogate", zoo, "base", *options, status=1)
        assert says in output
        assert output.count("error:") == 1
        assert "Traceback" not in output
    assert (zoo / "models" / "base.json").read_bytes() == manifest
