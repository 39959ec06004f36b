"""Which way of sharding is faster for a call, what does it send, and does the executor choose it?

A layer of a Llama model is divided among 2 and 4 processes of this machine. For 1 to 8,192 rows, forward and backward of an
attention projection and of the MLP run in both ways; then the executor chooses. Reported are seconds and bytes of each way,
and for how many cells the way that it takes for the faster one is so, or within a tenth of it. It tries the other now and then.

    python -m benchmarks.sharding                      # about 25 minutes on 2 cores
    python -m benchmarks.sharding --case 1024x4096:2   # one layer on so many shards; results of the others stay
    python -m benchmarks.sharding --tiny               # seconds, for the tests
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, save

QUESTION = str(__doc__).splitlines()[0]
SHAPES = {"576x1536": (576, 1536), "1024x4096": (1024, 4096)}
TINY = {"32x64": (32, 64)}
CLOSE = 1.1
_LEARNING = 20  # calls of each size before the choice counts; half of it beyond 1,024 rows


def shards_of(rank: int, size: int, master: str, hidden: int, inner: int) -> Any:
    """This process's part of a layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from symbiosis.distributed.mesh import ShardAddress, ShardMesh
    from symbiosis.models.split import split
    from symbiosis.split.executor.sharding.layers import Shards

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)).eval()
    mesh = ShardMesh.join(ShardAddress(rank, size, master), torch.device("cpu"))
    shards = Shards(split(model).layers, mesh)
    shards.start("the same", lambda: None)
    return shards


class Cell:
    """One size of call of one layer: its time in both ways, and the way that is chosen after a few calls."""

    def __init__(self, shards: Any, layer: Any, direction: Any, rows: int) -> None:
        import torch

        self.shards, self.layer, self.direction, self.rows = shards, layer, direction, rows
        self.x = tuple(torch.randn(rows, width) for width in layer.input_widths(direction))
        self.times: dict[str, list[float]] = {}
        self.moved: dict[str, int] = {}

    def call(self) -> float:
        import torch

        from symbiosis.split.executor.layers import run

        started = time.perf_counter()
        with torch.no_grad():
            run((self.layer,), self.direction, self.x)
        return time.perf_counter() - started

    def compare(self) -> None:
        """Both ways in turns, since the machine's speed varies."""
        from symbiosis.split.executor.sharding.ways import Way, WayChooser

        mesh = self.shards.mesh
        turns, calls = (2, 1) if self.rows > 1024 else (4, 3) if self.rows > 64 else (12, 3)
        for _ in range(turns):
            for way in Way:
                self.shards.chooser = WayChooser(way)
                for number in range(calls):
                    sent = mesh.sent_bytes + mesh.received_bytes
                    seconds = self.call()
                    if number or calls == 1:  # after the other way the caches are full of other data
                        self.times.setdefault(way, []).append(seconds)
                    self.moved[way] = mesh.sent_bytes + mesh.received_bytes - sent

    def measure(self, learning: Any) -> dict[str, Any]:
        from symbiosis.types import Direction

        self.compare()
        self.shards.chooser = learning
        for _ in range(_LEARNING if self.rows <= 1024 else _LEARNING // 2):
            self.call()
        self.compare()  # half before and half after: the speed of a machine drifts
        spec = self.layer.spec
        key = (self.direction is Direction.BACKWARD, (spec.kind, spec.in_width, spec.out_width))
        choice = learning.best(key, self.rows)
        ways = {way: self._figures(way) for way in self.times}
        is_right, by_median = (
            ways[choice][name] <= CLOSE * min(found[name] for found in ways.values()) for name in ("seconds", "median_s")
        )
        found = {"direction": self.direction.name.lower(), "rows": self.rows, **ways, "chosen": choice}
        return {**found, "is_right": is_right, "is_right_by_median": by_median}

    def _figures(self, way: str) -> dict[str, float]:
        """`seconds` is the lower quartile: other work on the machine delays some runs, and hastens none."""
        times = sorted(self.times[way])
        return {"seconds": times[len(times) // 4], "median_s": statistics.median(times), "bytes": self.moved[way]}


def measure(shards: Any, rows_of_calls: Sequence[int]) -> list[dict[str, Any]]:
    """Every cell."""
    from symbiosis.split.executor.sharding.ways import WayChooser
    from symbiosis.types import Direction

    cells = []
    for name in ("o_proj", "mlp"):
        layer = next(each for each in shards.layers if each.spec.paths[0].endswith(name))
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            learning = WayChooser()
            for rows in rows_of_calls:
                cells.append({"layer": name, **Cell(shards, layer, direction, rows).measure(learning)})
    return cells


def follow(rank: int, size: int, master: str, hidden: int, inner: int) -> None:
    """A shard that only takes part, until the first one has ended."""
    shards = shards_of(rank, size, master, hidden, inner)
    for thread in shards.coordinator._threads:
        thread.join()


def run_shape(name: str, hidden: int, inner: int, size: int, rows: Sequence[int]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.sharding", "--follow"]
    followers = [subprocess.Popen([*command, json.dumps([rank, size, master, hidden, inner])]) for rank in range(1, size)]
    try:
        shards = shards_of(0, size, master, hidden, inner)
        cells = measure(shards, rows)
        shards.coordinator.stop()
        for process in followers:
            process.wait(60)
    finally:
        for process in followers:
            process.kill()
    return {"shape": name, "shards": size, **_share(cells), "cells": cells}


def _share(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the cells with the right choice."""
    names = {"right": "is_right", "right_by_median": "is_right_by_median"}
    return {name: statistics.mean(cell[key] for cell in cells) for name, key in names.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny layer, for the tests")
    parser.add_argument("--case", metavar="LAYER:SHARDS")
    parser.add_argument("--follow", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    if chosen.follow:
        follow(*chosen.follow)
        return
    shapes, sizes = (TINY, (2,)) if chosen.tiny else (SHAPES, (2, 4))
    rows = (1, 8, 64) if chosen.tiny else tuple(2**power for power in range(14))
    console = Console(width=160)
    cases = [f"{name}:{size}" for name in shapes for size in sizes]
    if chosen.case is not None and chosen.case not in cases:
        parser.error(f"--case {chosen.case}: expected one of {', '.join(cases)}")
    results = [] if chosen.case is None else _others(chosen.out, chosen.case)
    for case in cases if chosen.case is None else [chosen.case]:
        name, size = case.split(":")
        with console.status(f"{name} on {size} shards"):
            results.append(run_shape(name, *shapes[name], int(size), rows))
        console.print(f"{name} on {size} shards: the choice is right in {results[-1]['right']:.0%} of the cells")
    share = _share([cell for result in results for cell in result["cells"]])
    console.print(save("sharding", QUESTION, {"script": "sharding", **share, "results": results}, chosen.out))


def _others(folder: Path, case: str) -> list[dict[str, Any]]:
    """Stored results of the other cases."""
    path = folder / "sharding.json"
    stored = json.loads(path.read_text())["results"] if path.exists() else []
    return [each for each in stored if f"{each['shape']}:{each['shards']}" != case]


if __name__ == "__main__":
    main()
