"""Lengths of prompts and answers, fixed or as in public traces.

`lengths.json` has a table of each trace: its requests in order of their input length, in 20 groups of the same size; of
each group the mean input length and ten quantiles of the output length. So it keeps both distributions and how they depend
on each other, and no request of the trace.

    python -m benchmarks.http_load.lengths ../shared/traces    # write the tables again
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path
from random import Random

TABLES = Path(__file__).with_name("lengths.json")
SOURCES = {
    "azure_conv": "Azure LLM inference trace 2023, conversation (Azure Public Dataset, CC-BY 4.0)",
    "azure_code": "Azure LLM inference trace 2023, code (Azure Public Dataset, CC-BY 4.0)",
    "mooncake_conversation": "Mooncake conversation trace (Apache-2.0)",
}
FIXED = "fixed"
NAMES = (FIXED, *SOURCES)
_GROUPS, _QUANTILES = 20, 10
_LONG = 0.95
"""Lengths are scaled so that this share of the requests fits, and the others are clipped."""

Lengths = tuple[int, int]
"""Tokens of the prompt and of the answer."""


def sample(name: str, count: int, longest: int, random: Random) -> list[Lengths]:
    """Random lengths as in the trace, scaled to `longest` tokens in all."""
    table = json.loads(TABLES.read_text())[name]["groups"]
    pairs = [(group["input"], output) for group in table for output in group["outputs"]]
    totals = sorted(prompt + new for prompt, new in pairs)
    scale = min(1.0, longest / totals[int(_LONG * len(totals))])
    return [_fit(*random.choice(pairs), scale, longest) for _ in range(count)]


def _fit(prompt: int, new: int, scale: float, longest: int) -> Lengths:
    new = min(max(1, round(scale * new)), longest - 1)
    return min(max(1, round(scale * prompt)), longest - new), new


def read_trace(folder: Path, name: str) -> list[Lengths]:
    if name.startswith("azure"):
        with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
            return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    return [(row["input_length"], row["output_length"]) for row in rows]


def summarise(requests: list[Lengths]) -> list[dict[str, object]]:
    ordered, groups = sorted(requests), []
    for number in range(_GROUPS):
        group = ordered[number * len(ordered) // _GROUPS : (number + 1) * len(ordered) // _GROUPS]
        outputs = sorted(new for _, new in group)
        quantiles = [outputs[(2 * place + 1) * len(outputs) // (2 * _QUANTILES)] for place in range(_QUANTILES)]
        groups.append({"input": round(sum(prompt for prompt, _ in group) / len(group)), "outputs": quantiles})
    return groups


def main(folder: Path) -> None:
    entries = []
    for name, source in SOURCES.items():
        requests = read_trace(folder, name)
        rows = ",\n".join(f"   {json.dumps(group)}" for group in summarise(requests))
        head = f'  "source": {json.dumps(source)},\n  "requests": {len(requests)},\n  "groups": [\n'
        entries.append(f' "{name}": {{\n{head}{rows}\n  ]\n }}')
    TABLES.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
