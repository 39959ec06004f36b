"""Traces: the public formats, and one clear line for each way in which they are broken."""

from __future__ import annotations

import gzip
import json

import pytest

from symbiosis.cluster.simulation.trace import read_trace
from symbiosis.errors import BadTrace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0319600,3180,8\n"
MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 * n, "input_length": 1100, "output_length": 5 + n, "hash_ids": [0, n, 99]}) + "\n"
    for n in range(4)
)
RATES = "start_s,c0,c1\n0,1,0\n600,.5,2\n1200,0,0\n"


@pytest.fixture
def write(tmp_path):
    def make(name: str, text: str):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path

    return make


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure(write, name):
    trace = read_trace(write(name, AZURE))
    assert trace.arrivals == pytest.approx([0.0, 1.052])
    assert (trace.prompts, trace.outputs, trace.name) == ([4808, 3180], [10, 8], "azure")


def test_mooncake_has_the_hashes_of_full_blocks(write):
    trace = read_trace(write("m.jsonl", MOONCAKE))
    assert trace.arrivals == [0, 1, 2, 3]
    assert trace.blocks_of(2) == (0, 2)


def test_rates_take_lengths_from_another_trace(write):
    rates = write("rates.csv", RATES)
    trace = read_trace(rates, lengths=write("azure.csv", AZURE), rate_scale=2.0)
    assert len(trace) == pytest.approx(2 * 600 * 3.5, rel=0.1)
    assert set(trace.prompts) == {4808, 3180}
    first = [adapter for at, adapter in zip(trace.arrivals, trace.adapters, strict=True) if at < 600]
    assert set(first) == {"c0"}
    assert trace.arrivals == sorted(trace.arrivals)
    assert read_trace(rates, lengths=write("azure.csv", AZURE), begin_s=600, end_s=900).duration <= 300


def test_rates_with_prefixes_keep_conversations_apart(write):
    trace = read_trace(write("rates.csv", RATES), lengths=write("m.jsonl", MOONCAKE))
    assert len({trace.blocks_of(number)[0] for number in range(len(trace))}) > 10
    assert len(set(map(trace.blocks_of, range(len(trace))))) == len(trace)


def test_a_scaled_trace_has_copies_with_prefixes_of_their_own(write):
    path = write("m.jsonl", MOONCAKE)
    trace = read_trace(path, rate_scale=3)
    assert len(trace) == 12
    assert len({trace.blocks_of(number) for number in range(12)}) == 12
    assert len(read_trace(path, rate_scale=0.5, seed=1)) < 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: unknown format"),
        ("a,b\n1,2\n", "line 1: unknown format 'a,b'"),
        ("TIMESTAMP,a,b\n", "has no requests"),
        (AZURE + "yesterday,1,2\n", "line 4: 'yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:06.0,1\n", "line 4: 2 fields"),
        (AZURE + "2023-11-16 18:17:06.0,-5,2\n", "line 4: ContextTokens is '-5'"),
        (AZURE + "2023-11-16 18:17:06.0,5,many\n", "line 4: GeneratedTokens is 'many'"),
        (MOONCAKE + "{broken\n", "line 5: expected an object with"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 5: expected an object with"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}\n', "line 5: a time or a hash"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}\n', "line 5: input_length"),
        (RATES + "1800,1\n", "line 5: 1 clients, expected 2"),
        (RATES + "1800,1,x\n", "line 5: a rate is no number"),
        (RATES + "1800,1,-1\n", "line 5: rates below zero"),
        (RATES + "600,1,1\n", "line 5: rates below zero, or a start before"),
        ("start_s,c0\n0,1\n", "expected two windows"),
        ("start_s,c0\n0,0\n600,0\n", "no requests in the chosen time"),
    ],
)
def test_a_broken_trace_is_one_clear_line(write, text, message):
    lengths = write("lengths.csv", AZURE)
    with pytest.raises(BadTrace, match=message) as error:
        read_trace(write("broken.txt", text), lengths=lengths)
    assert "\n" not in str(error.value)


def test_unreadable_files(write, tmp_path):
    with pytest.raises(BadTrace, match="No such file"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "no.csv.gz").write_text(AZURE)
    with pytest.raises(BadTrace, match="cannot read"):
        read_trace(tmp_path / "no.csv.gz")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress((AZURE + AZURE.split("\n")[1] + "\n").encode())[:-12])
    with pytest.raises(BadTrace, match="cannot read"):
        read_trace(tmp_path / "cut.csv.gz")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadTrace, match="cannot read"):
        read_trace(tmp_path / "bytes.csv")
    with pytest.raises(BadTrace, match="--lengths"):
        read_trace(write("rates.csv", RATES))
    with pytest.raises(BadTrace, match="no requests"):
        read_trace(write("azure.csv", AZURE), begin_s=100)
