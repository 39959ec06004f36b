"""What the load client notes of one request, and the check of its answer."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.http_load.vocabulary import TOKEN_BYTES, streamed_text

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_FINISH = re.compile(rb'"finish_reason": ?"(\w+)"')
_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass(slots=True)
class Answer:
    """Times are of `time.monotonic`, which all processes of a machine share."""

    request: int
    """Its place in the workload."""
    due: float
    """When it was to be sent."""
    new: int
    """Tokens that it should have."""
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """When its frames were read. Frames that were read together have one time."""
    done: float = 0.0
    status: int = 0
    tokens: int = 0
    """As the server counts them."""
    error: str = ""
    text: bytes = b""
    """Of an answer that was kept whole."""
    is_cut: bool = False
    """The client closed the connection on purpose."""
    is_stalled: bool = False
    """The client stopped reading for a while."""

    def gaps(self) -> array[float]:
        """Seconds between tokens. Tokens that were read together have gaps of 0."""
        if not self.tokens:  # unknown: the answer is not complete
            return array("d")
        times = self.arrivals[: self.tokens]  # the frames after the last token have none
        found = array("d", np.diff(np.frombuffer(times)).tobytes())
        found.extend([0.0] * (self.tokens - len(times)))
        return found

    def check(self, body: bytes, *, stream: bool) -> None:
        """Note what is wrong with the end of an answer."""
        tokens, finish = _TOKENS.search(body), _FINISH.search(body)
        self.tokens = int(tokens[1]) if tokens else 0
        if self.status != 200:
            self.error = f"status {self.status}: {body[-200:].decode(errors='replace')}"
        elif self.tokens != self.new:
            self.error = f"{self.tokens} tokens, expected {self.new}: {body[-200:].decode(errors='replace')}"
        elif finish is None or finish[1] != b"length":
            self.error = f"finish_reason {finish and finish[1].decode()}, expected length"
        elif stream and _DONE not in body:
            self.error = "the stream ended without [DONE]"

    def check_words(self, body: bytes) -> None:
        """Of an answer in words of `vocabulary`: there are as many as the server counts tokens."""
        self.text = streamed_text(body)
        if not self.error and len(self.text) != TOKEN_BYTES * self.tokens:
            self.error = f"{len(self.text)} bytes of text, expected {TOKEN_BYTES} for each of {self.tokens} tokens"

    def check_frames(self, body: bytes) -> None:
        """Parse every frame: texts, the last with a finish_reason, then the usage, then [DONE]."""
        kinds, texts = "", []
        for frame in frames_of(body):
            if frame == b"[DONE]":
                kinds += "d"
                continue
            parsed = json.loads(frame)
            kinds += "u" if parsed.get("usage") else ""
            for choice in parsed["choices"]:
                texts.append(choice["text"])
                kinds += "t" if choice["finish_reason"] is None else "f"
        self.text = "".join(texts).encode()
        if not self.error and not re.fullmatch("t*fud", kinds):
            self.error = f"frames end with {kinds[-8:]}, expected texts (t), finish_reason (f), usage (u), [DONE] (d)"


def frames_of(stream: bytes) -> Iterator[bytes]:
    for frame in stream.split(b"\n\n")[:-1]:
        if not frame.startswith(_DATA):
            raise ValueError(f"a frame begins with {frame[:40]!r}, expected {_DATA!r}")
        yield frame.removeprefix(_DATA)


def join_chunks(raw: bytes) -> bytes:
    """The body of a chunked transfer."""
    parts, place = [], 0
    while True:
        end = raw.index(b"\r\n", place)
        size = int(raw[place:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(raw[end + 2 : end + 2 + size])
        place = end + 4 + size
