"""What does each shard of a model hold, and does it fall as one part in N?

Real processes divide a Llama of random weights: the executor's base layers, the hosted model with its KV cache, and an
adapter. Reported are the bytes of their tensors and the growth of each process's memory (RSS) since before the model, once
it is loaded.

    python -m benchmarks.shard_memory              # about 2 minutes on 2 cores
    python -m benchmarks.shard_memory --tiny       # seconds, for the tests
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import FOLDER, save

QUESTION = str(__doc__).splitlines()[0]
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32_000}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = 8
BLOCKS = 1024


def resident_bytes() -> int:
    """Of this process, after what was freed went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(rank: int, size: int, master: str, shape: dict[str, int]) -> dict[str, Any]:
    """What this shard holds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from symbiosis.distributed.mesh import ShardAddress, ShardMesh
    from symbiosis.distributed.operations import FirstShard, OperationFollower, OperationLeader
    from symbiosis.distributed.parallel_model import ParallelModel
    from symbiosis.models.split import split
    from symbiosis.serving.engine_core import EngineCore
    from symbiosis.serving.sharding.worker import EngineWorker
    from symbiosis.split.executor.sharding.layers import Shards

    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights in all processes
    before = resident_bytes()
    config = LlamaConfig(**shape, num_attention_heads=HEADS, num_key_value_heads=HEADS, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if size == 1:
        core = EngineCore(model, pages=BLOCKS)
        return {"tensors": weights + core.kv_cache_bytes, "kv": core.kv_cache_bytes, "rss": resident_bytes() - before}
    mesh = ShardMesh.join(ShardAddress(rank, size, master), torch.device("cpu"))
    hosting = mesh.sibling("hosting")
    with mesh.turn("load"):
        parallel = ParallelModel.of(model, hosting)
        shards = Shards(split(model).layers, mesh, None, parallel.parts)
        del model
    held = {t.data_ptr(): t.nbytes for t in parallel.model.parameters()}
    held |= {t.data_ptr(): t.nbytes for layer in shards.layers for t in layer.weights.values()}
    if rank == 0:
        leader = OperationLeader(hosting)
        core = EngineCore(FirstShard(parallel, leader), pages=BLOCKS)
        kv = core.kv_cache_bytes
    else:
        worker = EngineWorker(parallel)
        follower = OperationFollower(hosting)
        follower.add(worker.handlers)
        follower.start()
        mesh.wait_for_all("engine")
        kv = worker.runner.kv_cache.nbytes
    if rank == 0:
        mesh.wait_for_all("engine")
    found = {"tensors": sum(held.values()) + kv, "kv": kv, "rss": resident_bytes() - before}
    if rank == 0:  # the others leave when they have measured: its end ends them
        mesh.wait_for_all("measured")
        leader.stop()
    else:
        mesh.arrive("measured")
    return found


def run(size: int, shape: dict[str, int]) -> list[dict[str, Any]]:
    """By rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.shard_memory", "--rank"]
    processes = [
        subprocess.Popen([*command, json.dumps([rank, size, master, shape])], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    return [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for the tests")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    if chosen.rank:
        print(json.dumps(measure(*chosen.rank)), flush=True)
        os._exit(0)  # without waiting for the others
    shape, sizes = (TINY, (1, 2)) if chosen.tiny else (SHAPE, (1, 2, 4))
    console = Console(width=120)
    table = Table("shards", "tensors of the largest, MB", "of one", "memory of the largest, MB", "of one")
    results: list[dict[str, Any]] = []
    for size in sizes:
        with console.status(f"{size} shards"):
            ranks = run(size, shape)
        results.append({"shards": size, "ranks": ranks})
        first = results[0]["ranks"][0]
        largest = {key: max(rank[key] for rank in ranks) for key in ("tensors", "rss")}
        shares = {key: largest[key] / first[key] for key in largest}
        results[-1] |= {f"share_of_{key}": share for key, share in shares.items()}
        cells = [cell for key in largest for cell in (f"{largest[key] / 1e6:.0f}", f"{shares[key]:.2f}")]
        table.add_row(str(size), *cells)
    console.print(table)
    figures = {"script": "shard_memory", "shape": shape, "blocks": BLOCKS, "results": results}
    console.print(save("shard-memory", QUESTION, figures, chosen.out))


if __name__ == "__main__":
    main()
