"""JSONL training data: what is accepted, and errors with line numbers."""

from __future__ import annotations

import json

import pytest

from symbiosis.jobs.errors import BadTrainingFile
from symbiosis.jobs.jsonl import MAX_LINE_BYTES, LineKind, read_samples


def chat(*turns: tuple[str, str], **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": content, **more} for role, content in turns]})


GOOD = chat(("user", "hi"), ("assistant", "ho"))


def file(tmp_path, *lines: str | bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def read_lines(tmp_path, *lines: str | bytes, **options):
    return read_samples(file(tmp_path, *lines), **{"field": "training_file", "max_examples": 1000, **options})


def read_error(tmp_path, *lines: str | bytes, **options) -> str:
    with pytest.raises(BadTrainingFile) as caught:
        read_lines(tmp_path, *lines, **options)
    assert caught.value.field == options.get("field", "training_file")
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def test_all_three_kinds_are_read(tmp_path):
    (one,) = read_lines(tmp_path, chat(("system", "s"), ("user", "u"), ("assistant", "a")))
    assert (one.kind, [message.is_label for message in one.messages]) == (LineKind.CHAT, [False, False, True])
    assert [each.text for each in read_lines(tmp_path, '{"text": "x"}', "", '{"text": "y"}', "")] == ["x", "y"]
    (pair,) = read_lines(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "p", "completion": "c"}')
    assert (pair.kind, pair.prompt, pair.completion) == (LineKind.PAIR, "p", "c")
    assert [each.line for each in read_lines(tmp_path, GOOD, "   ", GOOD)] == [1, 3]


def test_weights_select_the_labels(tmp_path):
    row = {"messages": [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]}
    (one,) = read_lines(tmp_path, json.dumps(row))
    assert [message.is_label for message in one.messages] == [False, True]
    for weight in (0.5, 2, -1, True, "1", None):
        row["messages"][0]["weight"] = weight
        assert "expected 0 or 1" in read_error(tmp_path, json.dumps(row))
    assert "assistant messages only" in read_error(tmp_path, chat(("user", "u"), ("assistant", "a"), weight=1))
    assert "nothing to learn" in read_error(
        tmp_path, json.dumps({"messages": [{"role": "assistant", "content": "a", "weight": 0}]})
    )


BAD = {
    "broken": ('{"messages": [', "is not JSON"),
    "a list": ("[1]", "got list"),
    "null": ("null", "got NoneType"),
    "empty": ("{}", "got an empty one"),
    "unknown key": ('{"text": "x", "y": 1}', "'y'"),
    "prompt alone": ('{"prompt": "x"}', "'prompt' and 'completion'"),
    "wrong role": (chat(("tool", "x"), ("assistant", "y")), "the role 'tool'"),
    "role is a list": ('{"messages": [{"role": ["user"], "content": "x"}]}', "the role"),
    "no assistant": (chat(("user", "x")), "no assistant message"),
    "no messages": ('{"messages": []}', "non-empty"),
    "messages is text": ('{"messages": "x"}', "must be a non-empty list"),
    "message is text": ('{"messages": ["x"]}', "message 1"),
    "name": ('{"messages": [{"role": "user", "content": "x", "name": "y"}]}', "'name'"),
    "empty content": (chat(("user", " "), ("assistant", "y")), "'content' of message 1"),
    "content is null": ('{"messages": [{"role": "assistant", "content": null}]}', "'content' of message 1"),
    "content is parts": ('{"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}', "'content' of message 1"),
    "empty text": ('{"text": ""}', "'text' must be"),
    "not UTF-8": (b'{"text": "\xff\xfe"}', "not UTF-8"),
    "UTF-16": ('{"text": "x"}'.encode("utf-16"), "not UTF-8"),
    "surrogate": ('{"text": "\\ud800"}', "lone surrogate"),
    "key twice": ('{"text": "x", "text": "y"}', "duplicate key"),
    "inner key twice": ('{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}', "duplicate key"),
    "NaN": ('{"messages": [{"role": "assistant", "content": "x", "weight": NaN}]}', "NaN"),
    "Infinity": ('{"text": -Infinity}', "Infinity"),
    "deep": ("[" * 100_000, "not JSON|too deeply"),
    "huge number": ('{"text": ' + "9" * 5000 + "}", "not JSON|must be"),
    "too many messages": (chat(*[("assistant", "x")] * 257), "257 messages"),
    "huge line": ('{"text": "' + "x" * MAX_LINE_BYTES + '"}', "more than"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_error_names_the_line_and_the_reason(tmp_path, kind):
    import re

    line, what = BAD[kind]
    said = read_error(tmp_path, GOOD, line, GOOD)
    assert said.startswith("line 2: ")
    assert re.search(what, said), said


def test_an_error_names_several_lines_and_counts_the_rest(tmp_path):
    said = read_error(tmp_path, *(["x", GOOD] * 9))
    assert [f"line {number}:" in said for number in (1, 3, 5, 7, 9, 11)] == [True] * 5 + [False]
    assert said.endswith("and 4 more")
    assert read_error(tmp_path, *["x"] * 5000).endswith("and 995 more")  # reading stops at 1000


def test_a_file_is_of_one_kind(tmp_path):
    assert "line 2: has 'text', earlier lines have 'messages'" in read_error(tmp_path, GOOD, '{"text": "x"}')


def test_empty_and_oversized_files_are_rejected(tmp_path):
    for lines in ((), ("", "  ", "\n")):
        assert "empty" in read_error(tmp_path, *lines, field="validation_file")
    assert "more than the 3 examples allowed" in read_error(tmp_path, *[GOOD] * 4, max_examples=3)


def test_an_oversized_line_counts_as_one_line(tmp_path):
    long = '{"text": "' + "x" * (3 * MAX_LINE_BYTES) + '"}'
    said = read_error(tmp_path, long, "x")
    assert said.startswith("line 1: has more than")
    assert "line 2: is not JSON (" in said
    assert "column" not in said
