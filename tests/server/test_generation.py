"""Deltas of text from events that arrive together."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.server.generation import Generation
from symbiosis.server.metrics.counts import Metrics
from symbiosis.serving.detokenizer import TextStream
from symbiosis.serving.engine_messages import Finished, GenerateRequest, Token
from symbiosis.serving.scheduling.sequence import FinishReason
from tests.tiny_chat import tiny_tokenizer


class Arrived:
    """Events in batches, as `ActiveRequests` has them."""

    def __init__(self, *batches):
        self.batches, self.stopped = batches, []

    async def events(self):
        for batch in self.batches:
            yield [(0, event) for event in batch]

    async def stop(self, event):
        self.stopped.append(event.number)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("split", [1, 2, 3, 4])
def test_a_stop_string_and_the_end_in_one_batch_finish_once(stream, split):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("hello there")["input_ids"]
    stop = tokenizer.decode(ids[-1:])
    events = [*(Token("1", 0, id) for id in ids), Token("1", 0, ids[0]), Finished("1", 0, FinishReason.LENGTH)]
    arrived = Arrived(*(events[start : start + split] for start in range(0, len(events), split)))
    request = GenerateRequest(prompt=[1])
    generation = Generation([request], lambda: TextStream(tokenizer, [stop]), Metrics(), stream=stream)

    async def run():
        return [delta async for batch in generation.deltas(arrived) for delta in batch]

    deltas = asyncio.run(run())
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids).split(stop)[0]
    assert arrived.stopped == [0]
