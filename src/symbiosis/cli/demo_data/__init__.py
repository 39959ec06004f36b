"""Small data sets of the package, for the demo and a first fine-tuning run."""

from __future__ import annotations

from pathlib import Path

DATA_SETS = ("pirate", "kettle", "gardener")
"""48 answers of a pirate, 16 of a kettle's manual, 16 of a gardener in verse."""


def find_data(data: Path) -> Path:
    """The file of a data set by its name. Any other path, and a file of that name, is returned as it is."""
    return Path(__file__).parent / f"{data}.jsonl" if str(data) in DATA_SETS and not data.is_file() else data
