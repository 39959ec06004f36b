"""Traces: arrivals, lengths, adapters and prefixes of requests. Read from public formats, or synthetic.

The first line decides the format: Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens), Mooncake's JSON lines, and
ServeGen's rates (start_s and one column of requests per second for each client), which take lengths from another trace.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from symbiosis.errors import BadTrace

_BLOCK_TOKENS = 512  # of Mooncake's hashes
_MAX_TOKENS = 1 << 24
_NAMESPACE = 1 << 32  # hashes of another copy of the trace


@dataclass(slots=True, eq=False)
class Trace:
    """Requests by arrival, as columns."""

    name: str
    arrivals: list[float]
    """Seconds from the start."""
    prompts: list[int]
    outputs: list[int]
    adapters: list[str]
    """Of each request, also its tenant."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Hashes of full prompt blocks; empty if the trace has none."""
    copies: list[int] = field(default_factory=list)
    """Copy of the trace that a request's hashes belong to; empty if there is one."""
    block_tokens: int = _BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def duration(self) -> float:
        return self.arrivals[-1] if self.arrivals else 0.0

    def blocks_of(self, number: int) -> tuple[int, ...]:
        if not self.blocks:
            return ()
        blocks = self.blocks[number]
        copy = self.copies[number] * _NAMESPACE if self.copies else 0
        return tuple([copy + block for block in blocks]) if copy else blocks

    def with_adapters(self, count: int, zipf: float, seed: int) -> Trace:
        """Adapters by a Zipf distribution; without any, all requests are for the base model."""
        generator = np.random.default_rng(seed)
        weights = np.arange(1, max(1, count) + 1, dtype=float) ** -zipf
        chosen = generator.choice(len(weights), size=len(self), p=weights / weights.sum())
        names = [f"a{index}" if count else "" for index in range(max(1, count))]
        self.adapters = [names[index] for index in chosen.tolist()]
        return self

    def scaled(self, factor: float, seed: int) -> Trace:
        """Times as many requests in the same time: copies with their own prefixes, at most 30 s apart; or a random part."""
        if factor == 1:
            return self
        generator = np.random.default_rng(seed)
        times = np.floor(factor + generator.random(len(self))).astype(int)
        index = np.repeat(np.arange(len(self)), times)
        copy = np.concatenate([np.arange(count) for count in times.tolist()]) if len(index) else index
        arrivals = np.asarray(self.arrivals)[index] + np.where(copy > 0, generator.uniform(0, 30, len(index)), 0)
        order = np.argsort(arrivals, kind="stable")
        index, copy = index[order].tolist(), copy[order].tolist()
        return Trace(
            f"{self.name} x {factor:g}",
            arrivals[order].tolist(),
            [self.prompts[each] for each in index],
            [self.outputs[each] for each in index],
            [self.adapters[each] for each in index],
            [self.blocks[each] for each in index] if self.blocks else [],
            copy if self.blocks else [],
        )


def read_trace(
    path: str | Path,
    *,
    lengths: str | Path | None = None,
    rate_scale: float = 1.0,
    begin_s: float = 0.0,
    end_s: float = math.inf,
    seed: int = 0,
) -> Trace:
    """The requests of a file between `begin_s` and `end_s` of its time, at `rate_scale` times its rate. Raises `BadTrace`."""
    path = Path(path)
    lines = _read_lines(path)
    first = next(lines, (0, ""))[1]
    if first.startswith("start_s,"):
        if lengths is None:
            raise BadTrace(f"{path.name} has rates only: name a trace with lengths too (--lengths)")
        rates = _read_rates(path, lines, len(first.split(",")) - 1)
        return _generate(path.stem, rates, read_trace(lengths, seed=seed), rate_scale, begin_s, end_s, seed)
    if first.upper().startswith("TIMESTAMP,"):
        trace = _read_azure(path, lines)
    elif first.startswith("{"):
        trace = _read_mooncake(path, [(1, first), *lines])
    else:
        known = "a CSV that begins with TIMESTAMP, or with start_s, or JSON lines"
        raise BadTrace(f"{path.name}, line 1: unknown format {first!r:.40}; expected {known}")
    if begin_s > 0 or end_s < math.inf:
        kept = [index for index, at in enumerate(trace.arrivals) if begin_s <= at < end_s]
        trace = Trace(
            trace.name,
            [trace.arrivals[each] - begin_s for each in kept],
            [trace.prompts[each] for each in kept],
            [trace.outputs[each] for each in kept],
            [trace.adapters[each] for each in kept],
            [trace.blocks[each] for each in kept] if trace.blocks else [],
        )
    if not trace.arrivals:
        raise BadTrace(f"{path.name}: no requests in the chosen time")
    return trace.scaled(rate_scale, seed)


def poisson_trace(
    *, rate: float, duration: float, prompt: float = 1000, output: float = 200, seed: int = 0, ramp: bool = False
) -> Trace:
    """Poisson arrivals, geometric completion lengths, log-normal prompts. With `ramp`, up and down as in Punica's figure."""
    generator = np.random.default_rng(seed)
    count = int(generator.poisson(rate * duration))
    if ramp:
        arrivals = np.sort(generator.triangular(0, duration / 2, duration, count))
    else:
        arrivals = np.sort(generator.uniform(0, duration, count))
    prompts = np.clip(generator.lognormal(math.log(prompt) - 0.32, 0.8, count), 1, 64 * prompt).astype(int)
    outputs = generator.geometric(1 / max(1.0, output), count)
    return Trace("poisson", arrivals.tolist(), prompts.tolist(), outputs.tolist(), [""] * count)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without empty ones. Raises `BadTrace`."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is no text, or no gzip file"
        raise BadTrace(f"cannot read {str(path)!r}: {reason}") from None


def _count(text: object, path: Path, line: int, what: str, least: int) -> int:
    try:
        value = int(text)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        value = -1
    if not least <= value <= _MAX_TOKENS:
        raise BadTrace(f"{path.name}, line {line}: {what} is {text!r:.40}, expected a whole number from {least}")
    return int(value)


def _make_trace(path: Path, rows: list[tuple[float, int, int, tuple[int, ...]]]) -> Trace:
    if not rows:
        raise BadTrace(f"{path.name} has no requests")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    blocks = [row[3] for row in rows] if any(row[3] for row in rows) else []
    name = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    count = len(rows)
    return Trace(
        name, [row[0] - start for row in rows], [row[1] for row in rows], [row[2] for row in rows], [""] * count, blocks
    )


def _read_azure(path: Path, lines: Iterable[tuple[int, str]]) -> Trace:
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    for number, line in lines:
        fields = line.split(",")
        if len(fields) != 3:
            raise BadTrace(f"{path.name}, line {number}: {len(fields)} fields, expected a time and two lengths")
        try:
            at = datetime.fromisoformat(fields[0][:26]).timestamp()
        except ValueError:
            raise BadTrace(
                f"{path.name}, line {number}: {fields[0]!r:.40} is no time, expected 2023-11-16 18:17:03.97"
            ) from None
        prompt = _count(fields[1], path, number, "ContextTokens", 1)
        rows.append((at, prompt, max(1, _count(fields[2], path, number, "GeneratedTokens", 0)), ()))
    return _make_trace(path, rows)


def _read_mooncake(path: Path, lines: Iterable[tuple[int, str]]) -> Trace:
    rows = []
    for number, line in lines:
        try:
            record = json.loads(line)
            at, hashes = float(record["timestamp"]) / 1000, record["hash_ids"]
            blocks = tuple(map(int, hashes))
            prompt, output = record["input_length"], record["output_length"]
        except (ValueError, TypeError, KeyError):
            expected = "timestamp, input_length, output_length and hash_ids"
            raise BadTrace(f"{path.name}, line {number}: expected an object with {expected}") from None
        if not math.isfinite(at) or at < 0 or not all(0 <= block < _NAMESPACE for block in blocks):
            raise BadTrace(f"{path.name}, line {number}: a time or a hash is out of range")
        prompt = _count(prompt, path, number, "input_length", 1)
        rows.append((at, prompt, max(1, _count(output, path, number, "output_length", 0)), blocks[: prompt // _BLOCK_TOKENS]))
    return _make_trace(path, rows)


def _read_rates(path: Path, lines: Iterable[tuple[int, str]], clients: int) -> list[tuple[float, list[float]]]:
    rows: list[tuple[float, list[float]]] = []
    for number, line in lines:
        try:
            start, *rates = map(float, line.split(","))
        except ValueError:
            raise BadTrace(f"{path.name}, line {number}: a rate is no number") from None
        if len(rates) != clients:
            raise BadTrace(f"{path.name}, line {number}: {len(rates)} clients, expected {clients}")
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates) or (rows and start <= rows[-1][0]):
            raise BadTrace(f"{path.name}, line {number}: rates below zero, or a start before that of the line above")
        rows.append((start, rates))
    if len(rows) < 2:
        raise BadTrace(f"{path.name}: expected two windows at least")
    return rows


def _generate(
    name: str,
    rows: list[tuple[float, list[float]]],
    lengths: Trace,
    scale: float,
    begin: float,
    end: float,
    seed: int,
) -> Trace:
    """Poisson arrivals of each client in each window. A client is a tenant, and has an adapter.

    Lengths are drawn at random. If they have prefixes, they keep their order instead: as many copies of that trace as its rate
    goes into this one run next to each other, so that a conversation's turns are as far apart as they were.
    """
    generator = np.random.default_rng(seed)
    arrivals, clients = [], []
    width = rows[1][0] - rows[0][0]
    for start, rates in rows:
        left, right = max(start, begin), min(start + width, end)
        if left >= right:
            continue
        counts = generator.poisson(np.asarray(rates) * scale * (right - left))
        arrivals.append(generator.uniform(left - begin, right - begin, int(counts.sum())))
        clients.append(np.repeat(np.arange(len(rates)), counts))
    if not arrivals or not sum(map(len, arrivals)):
        raise BadTrace(f"{name}: no requests in the chosen time")
    at = np.concatenate(arrivals)
    order = np.argsort(at, kind="stable")
    names = [f"c{index}" for index in range(len(rows[0][1]))]
    adapters = [names[index] for index in np.concatenate(clients)[order].tolist()]
    at, count = at[order], len(at)
    copies: list[int] = []
    if lengths.blocks:
        parallel = max(1, round(count / float(at[-1]) / (len(lengths) / lengths.duration)))
        position = np.arange(count) // parallel
        drawn = (position % len(lengths)).tolist()
        copies = (np.arange(count) % parallel + parallel * (position // len(lengths))).tolist()
    else:
        drawn = generator.integers(0, len(lengths), count).tolist()
    return Trace(
        f"{name} x {lengths.name}",
        at.tolist(),
        [lengths.prompts[each] for each in drawn],
        [lengths.outputs[each] for each in drawn],
        adapters,
        [lengths.blocks[each] for each in drawn] if lengths.blocks else [],
        copies,
    )
