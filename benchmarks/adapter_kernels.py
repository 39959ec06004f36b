"""How fast are the kernels of hosted serving, against plain torch?

LoRA deltas of a batch (1 to 64 decode rows with an adapter each, or all with
the same; and prefill): by shrink and expand, by a loop over adapters of two
products each, and by gathering the weights of each row for two batched products
(gathering is timed: each batch has other adapters). Decode attention over the
KV cache: by our kernel and by SDPA on gathered, padded keys and values. Each
method reads the weights of several layers one after the other, so that they
come from memory and not from the cache, as in a model. Methods alternate,
replayed as CUDA graphs and, for rank 16, launched one by one; results are
compared before anything is timed. TB/s counts the adapters' weights, or the
keys and values, once.

    python -m benchmarks.adapter_kernels           # under a minute on one H200
    python -m benchmarks.adapter_kernels --sweep   # other plans for the kernels, each compiled first
    python -m benchmarks.adapter_kernels --tiny    # seconds, to try the script; without a GPU by Triton's interpreter
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, compared, rotated, save

MIN_BYTES = 128 << 20  # that a round must read: more than twice the cache
Method = Callable[[], Any]


class Bench:
    """Device and repetitions of the measurements."""

    def __init__(self, *, tiny: bool, repetitions: int) -> None:
        import torch

        self.tiny, self.repetitions = tiny, repetitions
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def seconds(self, method: Method) -> float:
        import torch

        if not self.cuda:
            started = time.perf_counter()
            method()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        method()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def replayed(self, method: Method) -> Method:
        """The method as a CUDA graph; without a GPU the method itself."""
        import torch

        if not self.cuda:
            return method
        method()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            method()
        graph.replay()
        return graph.replay

    def compare(self, methods: dict[str, Method], *, calls: int, read_bytes: int, baseline: str) -> dict[str, Any]:
        """Seconds of one of the `calls` by each method, the ratio to the baseline, and TB/s."""
        runs: dict[str, list[float]] = {name: [] for name in methods}
        for repetition in range(self.repetitions):
            for name in rotated(list(methods), repetition):
                runs[name].append(self.seconds(methods[name]) / calls)
        found = compared(runs, baseline)
        for each in found.values():
            each["tb_per_s"] = read_bytes / each["median"] / 1e12
        return found


def same(found: Any, expected: Any, what: str) -> None:
    """Fail the run if a method computes something else."""
    error = (found.float() - expected.float()).abs().max().item() / expected.float().abs().max().item()
    if not error < 0.03:
        raise RuntimeError(f"{what}: results differ by {error:.3f} of the largest")


class Lora:
    """One batch of rows and the adapters of several layers."""

    def __init__(self, bench: Bench, *, adapters: int, rows: int, rank: int, width: int, widths: Sequence[int]) -> None:
        """`rows` of each adapter."""
        import torch

        from symbiosis.kernels.lora import shrink_expand
        from symbiosis.kernels.lora.fused_widths import FusedWidths
        from symbiosis.kernels.tiles import Segment, Tiles

        self.kernels, self.rank, self.widths, self.rows = shrink_expand, rank, widths, rows
        options = {"device": bench.device, "dtype": bench.dtype}
        self.bytes = adapters * rank * sum(width + out for out in widths) * torch.empty((), **options).element_size()
        self.layers = 2 if bench.tiny else max(4, min(32, -(-MIN_BYTES // self.bytes)))
        torch.manual_seed(0)
        # [layer, member] of all adapters
        self.a = [[torch.randn(adapters, rank, width, **options) / width**0.5 for _ in widths] for _ in range(self.layers)]
        self.b = [[torch.randn(adapters, out, rank, **options) / rank**0.5 for out in widths] for _ in range(self.layers)]
        self.x = torch.randn(adapters * rows, width, **options)
        self.y = torch.zeros(adapters * rows, sum(widths), **options)
        self.slots = torch.arange(adapters, device=bench.device)
        self.max_rank = -(-rank // 16) * 16
        self.members = FusedWidths(widths, bench.device)
        segments = [Segment(n, n * rows, rows) for n in range(adapters)]
        tile = shrink_expand.tile_rows(adapters * rows, adapters, self.max_rank)
        self.tiles = Tiles.of(segments, tile, bench.device)
        if rows * adapters <= 64:  # as in a CUDA graph: tiles for any batch of so many rows
            self.tiles = Tiles(shrink_expand.max_tiles(adapters * rows, tile), tile, bench.device)
            self.tiles.fill(segments)
        self.tables = [
            torch.tensor(
                [
                    [shrink_expand.LoraOperand(a[n], b[n]).entry() for a, b in zip(of_a, of_b, strict=True)]
                    for n in range(adapters)
                ],
                device=bench.device,
            )
            for of_a, of_b in zip(self.a, self.b, strict=True)
        ]
        self.use(shrink_expand.plan_launch(self.tiles, width, widths, self.max_rank))

    def use(self, plan: Any) -> None:
        self.plan = plan
        self.work = self.kernels.LoraBatch(self.tiles, *self.x.shape, self.members, self.max_rank, plan)

    def ours(self, layers: int | None = None) -> None:
        for table in self.tables[:layers]:
            self.kernels.add_lora(self.x, self.y, table, self.work)

    def _columns(self) -> list[slice]:
        ends = list(itertools.accumulate(self.widths))
        return [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]

    def loop(self, layers: int | None = None) -> None:
        for of_a, of_b in zip(self.a[:layers], self.b[:layers], strict=True):
            for columns, a, b in zip(self._columns(), of_a, of_b, strict=True):
                for n in range(len(a)):
                    rows = slice(n * self.rows, (n + 1) * self.rows)
                    self.y[rows, columns].addmm_(self.x[rows] @ a[n].T, b[n].T)

    def gathered(self, layers: int | None = None) -> None:
        batch = self.x.view(len(self.slots), self.rows, -1)
        for of_a, of_b in zip(self.a[:layers], self.b[:layers], strict=True):
            for columns, a, b in zip(self._columns(), of_a, of_b, strict=True):
                low = batch @ a[self.slots].transpose(1, 2)
                self.y[:, columns] += (low @ b[self.slots].transpose(1, 2)).flatten(0, 1)

    def check(self) -> None:
        results = []
        for method in (self.loop, self.gathered, self.ours):
            self.y.zero_()
            method(1)
            results.append(self.y.clone())
        same(results[1], results[0], "gathered")
        same(results[2], results[0], "ours")


def lora_cases(tiny: bool) -> Iterator[dict[str, Any]]:
    """`rows` of each adapter."""
    if tiny:
        shapes = {"one": (64, [64]), "qkv": (64, [64, 32, 32])}
        batches, ranks, prompts = [(2, 1), (1, 2)], [8], [(2, 20)]
    else:
        shapes = {"one": (4096, [4096]), "qkv": (4096, [4096, 4096, 4096])}
        sizes = (1, 2, 4, 8, 16, 32, 64)
        batches = [(size, 1) for size in sizes] + [(1, size) for size in sizes[1:]]
        ranks, prompts = [8, 16, 32, 64], [(1, 512), (4, 512)]
    for (shape, (width, widths)), rank, (adapters, rows) in itertools.product(shapes.items(), ranks, batches + prompts):
        yield {"shape": shape, "adapters": adapters, "rows": rows, "rank": rank, "width": width, "widths": widths}


def measure_lora(bench: Bench, console: Console) -> list[dict[str, Any]]:
    results = []
    for case in lora_cases(bench.tiny):
        sizes = {name: value for name, value in case.items() if name != "shape"}
        work = Lora(bench, **sizes)
        work.check()
        methods = {"loop": work.loop, "gathered": work.gathered, "ours": work.ours}
        given = {"calls": work.layers, "read_bytes": work.bytes, "baseline": "loop"}
        result = {
            **case,
            "layers": work.layers,
            "graph": bench.compare({n: bench.replayed(w) for n, w in methods.items()}, **given),
        }
        if case["rank"] == 16 or bench.tiny:
            few = min(4, work.layers)
            result["launched"] = bench.compare({n: partial(w, few) for n, w in methods.items()}, **{**given, "calls": few})
        results.append(result)
        report(
            console,
            f"{case['shape']:4s} rank {case['rank']:2d}, {case['adapters']:2d} x {case['rows']:3d} rows",
            result["graph"],
        )
    return results


def report(console: Console, what: str, found: dict[str, Any]) -> None:
    each = [f"{name} {1e6 * f['median']:7.1f} us ({f['ratio']:.2f}, {f['tb_per_s']:.2f} TB/s)" for name, f in found.items()]
    console.print(f"{what}: {', '.join(each)}")


class Attention:
    """A batch of decoding sequences, over the KV cache of several layers."""

    block_size = 16

    def __init__(self, bench: Bench, *, lengths: Sequence[int], heads: int, key_heads: int, width: int) -> None:
        import torch

        from symbiosis.kernels import paged_attention
        from symbiosis.kernels.attention_batch import AttentionBatch
        from symbiosis.kernels.block_tables import BlockTables
        from symbiosis.kernels.tiles import Span

        self.kernels, self.scale = paged_attention, width**-0.5
        options = {"device": bench.device, "dtype": bench.dtype}
        needed = [-(-length // self.block_size) for length in lengths]
        torch.manual_seed(0)
        free = torch.randperm(sum(needed)).tolist()
        spans = [
            Span(n, 1, length - 1, [free.pop() for _ in range(blocks)])
            for n, (length, blocks) in enumerate(zip(lengths, needed, strict=True))
        ]
        size = torch.empty((), **options).element_size()
        self.bytes = 2 * sum(lengths) * key_heads * width * size
        self.layers = 2 if bench.tiny else max(2, min(8, -(-MIN_BYTES // self.bytes)))
        self.memory = torch.randn(self.layers, 2, sum(needed) * self.block_size, key_heads, width, **options)
        self.q = torch.randn(len(lengths), heads, width, **options)
        tables = BlockTables(len(lengths), max(needed), self.block_size, bench.device)
        self.batch = AttentionBatch(rows=len(lengths), tables=tables)
        self.batch.fill([span.before for span in spans], [span.block_table for span in spans])
        self.use(paged_attention.plan_launch(len(lengths), key_heads, width, self.batch.longest, size))
        within = torch.arange(self.block_size)
        slots = [(torch.tensor(s.block_table)[:, None] * self.block_size + within).flatten()[: max(lengths)] for s in spans]
        padded = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, found in zip(padded, slots, strict=True):
            row[: len(found)] = found
        self.slots_BT = padded.to(bench.device)
        seen = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        self.bias = None if seen.all() else bias[:, None, None].to(**options)

    def use(self, plan: Any) -> None:
        self.plan = plan

    def ours(self, layers: int | None = None) -> Any:
        for keys, values in self.memory[:layers]:
            found = self.kernels.attend(self.q, keys, values, self.batch, scale=self.scale, chosen=self.plan)
        return found

    def gathered(self, layers: int | None = None) -> Any:
        from torch.nn import functional as F

        count, heads, width = self.q.shape
        q = self.q.view(count, self.memory.shape[3], -1, width)
        for both in self.memory[:layers]:
            k, v = (m.index_select(0, self.slots_BT.view(-1)).view(count, -1, *m.shape[1:]).transpose(1, 2) for m in both)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, scale=self.scale)
        return found.reshape(count, heads, width)


def attention_cases(tiny: bool) -> Iterator[dict[str, Any]]:
    if tiny:
        yield {"lengths": [20, 40], "heads": 4, "key_heads": 2, "width": 64}
        return
    for length, key_heads in itertools.product((128, 512, 2048), (32, 8)):
        yield {"lengths": [length] * 32, "heads": 32, "key_heads": key_heads, "width": 128}
    yield {"lengths": [64 * (n + 1) for n in range(32)], "heads": 32, "key_heads": 8, "width": 128}
    yield {"lengths": [2048], "heads": 32, "key_heads": 8, "width": 128}


def measure_attention(bench: Bench, console: Console) -> list[dict[str, Any]]:
    results = []
    for case in attention_cases(bench.tiny):
        work = Attention(bench, **case)
        same(work.ours(1), work.gathered(1), "attention")
        methods = {"gathered": bench.replayed(work.gathered), "ours": bench.replayed(work.ours)}
        found = bench.compare(methods, calls=work.layers, read_bytes=work.bytes, baseline="gathered")
        results.append({**case, "graph": found})
        lengths = case["lengths"]
        report(console, f"attention {len(lengths)} x {min(lengths)} to {max(lengths)}, {case['key_heads']} key heads", found)
    return results


def sweep(bench: Bench, console: Console) -> list[dict[str, Any]]:
    """Other launch plans than the selected ones, fastest last."""
    size = 2 if bench.tiny else 32
    low = {"width": 64, "widths": [64]} if bench.tiny else {"width": 4096, "widths": [4096, 4096, 4096]}
    one, long = next(attention_cases(True)), {"lengths": [1024] * 32, "heads": 32, "key_heads": 8, "width": 128}
    jobs: list[tuple[str, Any, list[dict[str, int]]]] = [
        (
            f"rank {rank}, {adapters} x {rows} rows",
            partial(Lora, bench, adapters=adapters, rows=rows, rank=rank, **low),
            [
                *({"block_n": block_n} for block_n in (64, 128, 256, 512)),
                *({"block_n": block_n, "expand_warps": 2} for block_n in (64, 128, 256)),
                *({"shrink_warps": warps} for warps in (2, 8)),
                {"expand_warps": 8},
            ],
        )
        for rank, adapters, rows in ((16, size, 1), (64, size, 1), (16, 2, 16), (16, 4, 256))[: 1 if bench.tiny else None]
    ]
    jobs.append(
        (
            "attention",
            partial(Attention, bench, **(one if bench.tiny else long)),
            [
                *({"splits": splits} for splits in (1, 2, 4, 8)),
                *({"decode_block": block, "stages": stages} for block in (32, 64, 128) for stages in (2, 3, 4)),
            ],
        )
    )
    results = []
    for what, make, changes in jobs:
        work = make()
        selected, times = work.plan, list[tuple[float, dict[str, int]]]()
        for change in [{}, *(changes[:2] if bench.tiny else changes)]:
            work.use(replace(selected, **change))
            method = bench.replayed(work.ours)
            times.append((statistics.median(bench.seconds(method) for _ in range(bench.repetitions)) / work.layers, change))
        for seconds, change in sorted(times, key=lambda each: -each[0]):
            results.append({"what": what, "change": change, "seconds": seconds, "tb_per_s": work.bytes / seconds / 1e12})
            console.print(f"{what}: {1e6 * seconds:7.1f} us, {results[-1]['tb_per_s']:.2f} TB/s: {change or 'as selected'}")
    return results


def run(*, tiny: bool, swept: bool, repetitions: int, folder: Path = FOLDER) -> dict[str, Any]:
    bench, console = Bench(tiny=tiny, repetitions=repetitions), Console(width=160)
    figures: dict[str, Any] = {"script": "adapter_kernels", "triton": version("triton")}
    if swept:
        figures["sweep"] = sweep(bench, console)
    else:
        figures |= {"low_rank": measure_lora(bench, console), "attention": measure_attention(bench, console)}
    name = f"adapter-kernels{'-sweep' if swept else ''}{'-tiny' if tiny else ''}"
    save(name, str(__doc__).splitlines()[0], figures, folder)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with torch.inference_mode():
        run(tiny=chosen.tiny, swept=chosen.sweep, repetitions=chosen.repetitions, folder=chosen.out)


if __name__ == "__main__":
    main()
