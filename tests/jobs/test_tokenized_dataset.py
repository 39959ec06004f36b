"""Tokens and labels: equal to what `symbiosis finetune` trains on, and in the file that the engine reads."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from symbiosis.cli import local_finetune
from symbiosis.errors import BadData
from symbiosis.jobs import jsonl, tokenized_dataset
from symbiosis.jobs.errors import BadTrainingFile, StorageFull
from symbiosis.models.default_model import default_model_folder
from tests.tiny_chat import TEMPLATE, tiny_tokenizer

CHATS = [
    [("user", "hi"), ("assistant", "ho")],
    [("system", "be kind"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
    [("user", "a longer question, with more words"), ("assistant", "and an answer that is longer still, to be cut off")],
]


def written(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(turns=CHATS):
    return [{"messages": [{"role": role, "content": content} for role, content in each]} for each in turns]


def encoded(path, tokenizer, *, max_length=512, truncate=True, max_tokens=10**6):
    samples = jsonl.read(path, field="training_file", max_examples=100)
    return tokenized_dataset.encode(
        samples, tokenizer, max_length=max_length, truncate=truncate, max_tokens=max_tokens, field="training_file"
    )


def real_tokenizer():
    return AutoTokenizer.from_pretrained(default_model_folder())


TOKENIZERS = {
    "tiny": tiny_tokenizer,
    # whose answers cannot be told apart: the end of a chat looks different
    "odd": lambda: tiny_tokenizer(TEMPLATE + "<system>{{ messages | length }}"),
    "real": real_tokenizer,
}


@pytest.mark.parametrize("kind", ["tiny", "odd", pytest.param("real", marks=pytest.mark.real)])
@pytest.mark.parametrize("max_length", [512, 24])
@pytest.mark.parametrize("rows", [chats(), [{"text": "once"}, {"text": "upon a time"}]], ids=["chats", "texts"])
def test_equal_to_finetune(tmp_path, request, kind, max_length, rows):
    if kind == "real":
        request.getfixturevalue("real_cache")
    tokenizer = TOKENIZERS[kind]()
    path = written(tmp_path, rows)
    try:
        expected, _ = local_finetune.encode(local_finetune.read_samples(path), tokenizer, max_length)
    except BadData:
        with pytest.raises(BadTrainingFile, match="nothing to learn within its first 24 tokens"):
            encoded(path, tokenizer, max_length=max_length)
        return
    found, _ = encoded(path, tokenizer, max_length=max_length)
    assert [(each.ids, each.labels) for each in found] == [(each.ids, each.labels) for each in expected]


def test_labels_are_the_answers_and_weights_take_some_out(tmp_path):
    tokenizer = tiny_tokenizer()
    (row,) = chats(CHATS[1:2])
    row["messages"][2]["weight"] = 0
    ((example,), cut) = encoded(written(tmp_path, [row]), tokenizer)
    learnt = [token for token in example.labels if token != tokenized_dataset.IGNORED]
    assert (tokenizer.decode(learnt), cut) == ("four<end>", 0)


def test_of_a_pair_the_completion_is_learnt(tmp_path):
    tokenizer = tiny_tokenizer()
    ((example,), _) = encoded(written(tmp_path, [{"prompt": "2+2=", "completion": "4"}]), tokenizer)
    assert tokenizer.decode(example.ids) == "2+2=4<end>"
    assert tokenizer.decode([token for token in example.labels if token != tokenized_dataset.IGNORED]) == "4<end>"


def test_too_long_is_cut_off_or_refused_as_asked(tmp_path):
    path, tokenizer = written(tmp_path, [{"text": "x"}, {"text": "y" * 40}, {"text": "z" * 50}]), tiny_tokenizer()
    found, cut = encoded(path, tokenizer, max_length=30)
    assert ([len(each.ids) for each in found], cut) == ([2, 30, 30], 2)
    with pytest.raises(BadTrainingFile, match=r"line 2: has 41 tokens, at most 30 .*line 3: has 51"):
        encoded(path, tokenizer, max_length=30, truncate=False)
    with pytest.raises(BadTrainingFile, match="more than the 40 tokens"):
        encoded(path, tokenizer, max_length=30, max_tokens=40)


def test_a_template_that_does_not_take_a_chat_names_its_line(tmp_path):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}" + TEMPLATE
    rows = chats([CHATS[0], CHATS[1]])
    with pytest.raises(BadTrainingFile, match="line 2: the model's chat template does not take it: users first"):
        encoded(written(tmp_path, rows), tiny_tokenizer(strict))
    with pytest.raises(BadTrainingFile, match="no chat template"):
        encoded(written(tmp_path, rows), tiny_tokenizer(None))


def test_weights_need_answers_that_can_be_told_apart(tmp_path):
    (row,) = chats(CHATS[1:2])
    row["messages"][2]["weight"] = 0
    with pytest.raises(BadTrainingFile, match="line 1: has a weight"):
        encoded(written(tmp_path, [row]), TOKENIZERS["odd"]())


def test_the_file_for_the_engine(tmp_path):
    examples = [tokenized_dataset.TokenizedExample([1, 2, 3], [-100, 2, 3]), tokenized_dataset.TokenizedExample([4], [4])]
    made = tokenized_dataset.write(tmp_path / "x.safetensors", examples)
    found = load_file(tmp_path / "x.safetensors")
    assert (made.examples, made.tokens) == (2, 4)
    assert {name: value.tolist() for name, value in found.items()} == {
        "ids": [1, 2, 3, 4],
        "labels": [-100, 2, 3, 4],
        "ends": [3, 4],
    }


def test_a_full_disk_leaves_nothing_and_is_said(tmp_path, monkeypatch):
    import errno
    import os

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="full") as caught:
        tokenized_dataset.write(tmp_path / "x.safetensors", [tokenized_dataset.TokenizedExample([1], [1])])
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.iterdir())
