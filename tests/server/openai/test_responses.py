"""Chunks from a template equal chunks encoded one by one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.server.generation import Logprob, TextDelta
from symbiosis.server.openai.responses import ChatFormatter, ChunkTemplate, CompletionFormatter

FORMATTERS = [kind("m", str, include_usage=usage) for kind in (ChatFormatter, CompletionFormatter) for usage in (False, True)]


@pytest.mark.parametrize("formatter", FORMATTERS)
@given(st.text(min_size=1), st.integers(0, 127))
def test_a_chunk_of_the_template_is_the_formatters(formatter, text, index):
    delta = TextDelta(index, text)
    frame = ChunkTemplate(formatter, index).encode(delta)
    head, _, rest = frame.partition(b" ")
    assert head == b"data:"
    assert frame.endswith(b"\n\n")
    assert b"\n" not in frame[:-2]
    assert json.loads(rest) == formatter.chunk(delta)


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize("delta", [TextDelta(0, "", finish="stop"), TextDelta(0, "a", (Logprob(1, -0.5, ()),))])
def test_other_chunks_are_the_formatters_too(formatter, delta):
    frame = ChunkTemplate(formatter, 0).encode(delta)
    formatter._text_offsets.clear()
    assert json.loads(frame.removeprefix(b"data: ")) == formatter.chunk(delta)
    formatter._text_offsets.clear()
