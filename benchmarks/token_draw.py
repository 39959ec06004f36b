"""How long does it take to sample the tokens of a batch, against sorting?

Rows of random logits, peaked (deviation 3) and flat (0.1), whole and with top-p, top-k and both. Compared are the sampler with
its kernel and with the plain reference, from logits to tokens on the host. Greedy is the floor.

    python -m benchmarks.token_draw               # half a minute on a GPU
    python -m benchmarks.token_draw tiny --cpu    # seconds, for the tests: the reference against itself
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import compared, save

QUESTION = str(__doc__).splitlines()[0]
SHAPES = {"tiny": ((4, 300),), "gpu": ((32, 32_000), (256, 32_000), (32, 151_936), (256, 151_936))}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "all tokens": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 20, top-p 0.8": {"top_k": 20, "top_p": 0.8},
}
STEPS = 10


def measure(rows: int, vocabulary: int, spread: float, device: str, repetitions: int) -> dict[str, Any]:
    import torch

    from symbiosis import kernels
    from symbiosis.serving.model.sampler import sample_tokens
    from symbiosis.serving.scheduling.sequence import Sampling, Sequence

    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device=device) * spread).bfloat16()

    def seconds(sequences: Seq[Sequence]) -> float:
        sample_tokens(logits, sequences).tolist()
        started = time.perf_counter()
        for _ in range(STEPS):
            sample_tokens(logits, sequences).tolist()
        return (time.perf_counter() - started) / STEPS

    found = {}
    for name, sampling in SAMPLINGS.items():
        sequences = [
            Sequence(id=str(row), tenant="", prompt=[1], sampling=Sampling(seed=row, **sampling), arrival=0.0)
            for row in range(rows)
        ]
        runs: dict[str, list[float]] = {"kernel": [], "reference": []}
        for _ in range(repetitions):
            runs["kernel"].append(seconds(sequences))
            run_on, kernels.run_on = kernels.run_on, lambda _: False
            try:
                runs["reference"].append(seconds(sequences))
            finally:
                kernels.run_on = run_on
        found[name] = compared(runs, "reference")
    return found


def main(arguments: Seq[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(SHAPES), shape="gpu")
    parser.add_argument("--repetitions", type=int, default=5)
    chosen = parser.parse_args(arguments)
    console, results = Console(width=140), []
    for rows, vocabulary in SHAPES[chosen.shape]:
        for spread in (3.0, 0.1):
            found = measure(rows, vocabulary, spread, chosen.device, chosen.repetitions)
            results.append({"rows": rows, "vocabulary": vocabulary, "spread": spread, "samplings": found})
            for name, cases in found.items():
                kernel, reference = (cases[case]["median"] * 1e3 for case in ("kernel", "reference"))
                console.print(f"{rows} × {vocabulary}, {spread:g}, {name}: {kernel:.2f} ms, reference {reference:.2f}")
    figures = {"script": "token_draw", "shape": chosen.shape, "results": results}
    console.print(save("token-draw", QUESTION, figures, chosen.out))


if __name__ == "__main__":
    main()
