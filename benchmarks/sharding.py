"""Which way of sharding is faster for a call, what does it send, and does the executor choose it?

A layer of a Llama model is divided among 2 and 4 processes of this machine. For 1 to 8,192 rows, forward and backward of an
attention projection and of the MLP run in both ways; then the executor chooses. Reported are seconds and bytes of each way,
and for how many cells the way that it takes for the faster one is so, or within a tenth of it. It tries the other now and then.

    python -m benchmarks.sharding              # about 10 minutes on 2 cores
    python -m benchmarks.sharding --tiny       # seconds, for the tests
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
_LEARNING = 16  # calls of each size before the choice counts


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


def measure(shards: Any, rows_of_calls: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds and bytes of every cell in both ways, and the way that is chosen after a few calls."""
    import torch

    from symbiosis.split.executor.layers import run
    from symbiosis.split.executor.sharding.ways import Way, WayChooser
    from symbiosis.types import Direction

    layers = {name: next(each for each in shards.layers if each.spec.paths[0].endswith(name)) for name in ("o_proj", "mlp")}
    cells, mesh = [], shards.mesh
    for name, layer in layers.items():
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            learning = WayChooser()
            for rows in rows_of_calls:
                x = tuple(torch.randn(rows, width) for width in layer.input_widths(direction))
                times: dict[Way, list[float]] = {way: [] for way in Way}
                moved: dict[Way, int] = {}
                for _ in range(2 if rows > 1024 else 4 if rows > 64 else 16):
                    for way in Way:  # in turns, since the machine's speed varies
                        shards.chooser = WayChooser(way)
                        for number in range(3):
                            sent = mesh.sent_bytes + mesh.received_bytes
                            started = time.perf_counter()
                            with torch.no_grad():
                                run((layer,), direction, x)
                            if number:  # the first run after the other way finds the caches full of other data
                                times[way].append(time.perf_counter() - started)
                            moved[way] = mesh.sent_bytes + mesh.received_bytes - sent
                ways = {way: {"seconds": statistics.median(times[way]), "bytes": moved[way]} for way in Way}
                shards.chooser = learning
                for _ in range(_LEARNING):
                    with torch.no_grad():
                        run((layer,), direction, x)
                key = (direction is Direction.BACKWARD, (layer.spec.kind, layer.spec.in_width, layer.spec.out_width))
                choice = learning.best(key, rows)
                fastest = min(found["seconds"] for found in ways.values())
                is_right = ways[choice]["seconds"] <= CLOSE * fastest
                cells.append(
                    {
                        "layer": name,
                        "direction": direction.name.lower(),
                        "rows": rows,
                        **ways,
                        "chosen": choice,
                        "is_right": is_right,
                    }
                )
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
    return {"shape": name, "shards": size, "right": sum(cell["is_right"] for cell in cells) / len(cells), "cells": cells}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny layer, for the tests")
    parser.add_argument("--follow", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    if chosen.follow:
        follow(*chosen.follow)
        return
    shapes, sizes = (TINY, (2,)) if chosen.tiny else (SHAPES, (2, 4))
    rows = (1, 8, 64) if chosen.tiny else tuple(2**power for power in range(14))
    console = Console(width=160)
    results = []
    for name, (hidden, inner) in shapes.items():
        for size in sizes:
            with console.status(f"{name} on {size} shards"):
                results.append(run_shape(name, hidden, inner, size, rows))
            console.print(f"{name} on {size} shards: the choice is right in {results[-1]['right']:.0%} of the cells")
    right = statistics.mean(cell["is_right"] for result in results for cell in result["cells"])
    console.print(save("sharding", QUESTION, {"script": "sharding", "right": right, "results": results}, chosen.out))


if __name__ == "__main__":
    main()
