"""How much of the memory bandwidth does decode attention over a KV cache in host memory reach?

The ceiling is a C loop that sums the same bytes with all cores. Compared are the kernel, its plain reference and torch's own
attention, for caches in bfloat16, float32 and int8, with and without groups of query heads.

    python -m benchmarks.decode_attention                  # Llama-2-7B and Llama-3-8B heads, 64K tokens: about a minute
    python -m benchmarks.decode_attention tiny --cpu       # seconds, for the tests
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import save

QUESTION = str(__doc__).splitlines()[0]
SHAPES = {"tiny": ((2, 1, 32, 1024), (1, 4, 32, 1024)), "llama": ((32, 1, 128, 65536), (8, 4, 128, 65536))}
"""Key heads, query heads of each, width, tokens."""


def median_s(action: Callable[[], object], repetitions: int) -> float:
    action()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(key_heads: int, group: int, width: int, tokens: int, dtype: Any, repetitions: int) -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    from symbiosis.kernels.cpu.flash_decoding import KVRange, attend, attend_reference, read_memory

    torch.manual_seed(0)
    memory = torch.empty(2, 1, key_heads, tokens, width, dtype=dtype)
    scales: list[Any] = []
    if dtype is torch.int8:
        memory.random_(-127, 128)
        scales = [torch.rand(1, key_heads, tokens) for _ in range(2)]
    else:
        memory.normal_()
    kv = KVRange(memory[0], memory[1], [0], [tokens], *scales)
    q = torch.randn(1, key_heads * group, width).to(torch.float32 if dtype is torch.float32 else torch.bfloat16)
    found = {
        "read": median_s(lambda: read_memory(memory), repetitions),
        "kernel": median_s(lambda: attend(q, kv, scale=width**-0.5), repetitions),
        "reference": median_s(lambda: attend_reference(q, kv, scale=width**-0.5), 1),
    }
    if dtype is not torch.int8:
        found["torch"] = median_s(
            lambda: F.scaled_dot_product_attention(q[:, :, None], memory[0], memory[1], enable_gqa=group > 1), repetitions
        )
    speeds = {name: memory.nbytes / seconds / 1e9 for name, seconds in found.items()}
    return {
        "heads": [key_heads, group, width],
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "gb_per_s": speeds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(SHAPES), shape="llama")
    parser.add_argument("--repetitions", type=int, default=9)
    chosen = parser.parse_args(arguments)
    import torch

    console = Console(width=160)
    cases = []
    for heads in SHAPES[chosen.shape]:
        for dtype in (torch.bfloat16, torch.float32, torch.int8):
            cases.append(measure(*heads, dtype, chosen.repetitions))
            speeds = cases[-1]["gb_per_s"]
            share = speeds["kernel"] / speeds["read"]
            console.print(f"{cases[-1]['heads']} {cases[-1]['dtype']}: {share:.0%} of the ceiling", speeds)
    figures = {"script": "decode_attention", "shape": chosen.shape, "threads": torch.get_num_threads(), "cases": cases}
    console.print(save(f"decode-attention-{chosen.shape}", QUESTION, figures, chosen.out))


if __name__ == "__main__":
    main()
