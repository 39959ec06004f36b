"""Training data from outside: what is taken, and what is said of everything else, with line numbers."""

from __future__ import annotations

import json

import pytest

from symbiosis.jobs.errors import BadTrainingFile
from symbiosis.jobs.jsonl import MAX_LINE, LineKind, read


def chat(*turns: tuple[str, str], **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": content, **more} for role, content in turns]})


GOOD = chat(("user", "hi"), ("assistant", "ho"))


def file(tmp_path, *lines: str | bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def found(tmp_path, *lines: str | bytes, **options):
    return read(file(tmp_path, *lines), **{"field": "training_file", "max_examples": 1000, **options})


def refusal(tmp_path, *lines: str | bytes, **options) -> str:
    with pytest.raises(BadTrainingFile) as caught:
        found(tmp_path, *lines, **options)
    assert caught.value.field == options.get("field", "training_file")
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def test_the_three_kinds_are_read(tmp_path):
    (one,) = found(tmp_path, chat(("system", "s"), ("user", "u"), ("assistant", "a")))
    assert (one.kind, [message.learnt for message in one.messages]) == (LineKind.CHAT, [False, False, True])
    assert [each.text for each in found(tmp_path, '{"text": "x"}', "", '{"text": "y"}', "")] == ["x", "y"]
    (pair,) = found(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "p", "completion": "c"}')
    assert (pair.kind, pair.prompt, pair.completion) == (LineKind.PAIR, "p", "c")
    assert [each.line for each in found(tmp_path, GOOD, "   ", GOOD)] == [1, 3]


def test_weights_say_which_answers_are_learnt(tmp_path):
    row = {"messages": [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]}
    (one,) = found(tmp_path, json.dumps(row))
    assert [message.learnt for message in one.messages] == [False, True]
    for weight in (0.5, 2, -1, True, "1", None):
        row["messages"][0]["weight"] = weight
        assert "it is 0 or 1" in refusal(tmp_path, json.dumps(row))
    assert "only the assistant's" in refusal(tmp_path, chat(("user", "u"), ("assistant", "a"), weight=1))
    assert "nothing to learn" in refusal(
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
    "no assistant": (chat(("user", "x")), "no message of the assistant"),
    "no messages": ('{"messages": []}', "not empty"),
    "messages is text": ('{"messages": "x"}', "must be a list"),
    "message is text": ('{"messages": ["x"]}', "message 1"),
    "name": ('{"messages": [{"role": "user", "content": "x", "name": "y"}]}', "'name'"),
    "empty content": (chat(("user", " "), ("assistant", "y")), "'content' of message 1"),
    "content is null": ('{"messages": [{"role": "assistant", "content": null}]}', "'content' of message 1"),
    "content is parts": ('{"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}', "'content' of message 1"),
    "empty text": ('{"text": ""}', "'text' must be"),
    "not UTF-8": (b'{"text": "\xff\xfe"}', "not UTF-8"),
    "UTF-16": ('{"text": "x"}'.encode("utf-16"), "not UTF-8"),
    "surrogate": ('{"text": "\\ud800"}', "half a character"),
    "key twice": ('{"text": "x", "text": "y"}', "key twice"),
    "inner key twice": ('{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}', "key twice"),
    "NaN": ('{"messages": [{"role": "assistant", "content": "x", "weight": NaN}]}', "NaN"),
    "Infinity": ('{"text": -Infinity}', "Infinity"),
    "deep": ("[" * 100_000, "not JSON|too deeply"),
    "huge number": ('{"text": ' + "9" * 5000 + "}", "not JSON|must be"),
    "too many messages": (chat(*[("assistant", "x")] * 257), "257 messages"),
    "huge line": ('{"text": "' + "x" * MAX_LINE + '"}', "more than"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_and_so_is_what_is_wrong(tmp_path, kind):
    import re

    line, what = BAD[kind]
    said = refusal(tmp_path, GOOD, line, GOOD)
    assert said.startswith("line 2: ")
    assert re.search(what, said), said


def test_several_bad_lines_are_named_and_the_rest_counted(tmp_path):
    said = refusal(tmp_path, *(["x", GOOD] * 9))
    assert [f"line {number}:" in said for number in (1, 3, 5, 7, 9, 11)] == [True] * 5 + [False]
    assert said.endswith("and 4 more")
    assert refusal(tmp_path, *["x"] * 5000).endswith("and 995 more")  # no more are looked for


def test_a_file_is_of_one_kind(tmp_path):
    assert "line 2: has 'text', lines before it have 'messages'" in refusal(tmp_path, GOOD, '{"text": "x"}')


def test_nothing_and_too_much(tmp_path):
    for lines in ((), ("", "  ", "\n")):
        assert "empty" in refusal(tmp_path, *lines, field="validation_file")
    assert "more than the 3 examples" in refusal(tmp_path, *[GOOD] * 4, max_examples=3)


def test_a_line_that_is_too_long_is_one_line(tmp_path):
    long = '{"text": "' + "x" * (3 * MAX_LINE) + '"}'
    said = refusal(tmp_path, long, "x")
    assert said.startswith("line 1: has more than")
    assert "line 2: is not JSON (" in said
    assert "column" not in said
