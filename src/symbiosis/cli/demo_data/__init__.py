"""Small data sets of the package, for the demo and a first fine-tuning run."""

from __future__ import annotations

import json
from pathlib import Path

from symbiosis.errors import SymbiosisError

DATA_SETS = ("pirate", "kettle", "gardener")
"""48 answers of a pirate, 16 of a kettle's manual, 16 of a gardener in verse."""


def find_data(data: Path) -> Path:
    """The file, or that of the data set of this name. Raises `SymbiosisError` if there is none."""
    if data.exists():
        return data
    if str(data) in DATA_SETS:
        return Path(__file__).parent / f"{data}.jsonl"
    raise SymbiosisError(
        f"there is no file {data}: expected a JSONL file, or a data set of the package ({', '.join(DATA_SETS)})"
    )


def read_demo_text() -> str:
    """All questions and answers as plain text: about 3,000 tokens of English."""
    lines = [line for name in DATA_SETS for line in find_data(Path(name)).read_text(encoding="utf-8").splitlines()]
    return "\n".join(message["content"] for line in lines for message in json.loads(line)["messages"])
