"""How fast are prompts read on a GPU, with CUDA graphs of prefill and without?

32 requests at once, of one new token each (random weights at the true shape,
bf16, greedy): without adapters, all with the same LoRA adapter (rank 16 on all
projections), and each with its own; prompts of 128 and of 512 tokens; each by
graphs and launched kernel by kernel ("eager"). A prompt's first token of its
own keeps the prefix cache out. The cases take turns; ratios are medians of the
ratio to the base model within one round of turns. Also: the time to the first
token of each request, and what the graphs take of the GPU's memory.

Graphs are captured before anything is timed: the first rounds are left out.

    python -m benchmarks.gpu_prefill qwen4b      # under a minute on one H200
    python -m benchmarks.gpu_prefill tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import options, used_bytes
from benchmarks.gpu_serving import Plan, Serving, wait_for, write_adapters
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.shapes import SHAPES, random_model

REPETITIONS = 5
WARM_UP = 3  # rounds: a graph is captured at its second use
MODES = ("graph", "eager")
PLANS = {
    "tiny": Plan(requests=4, prompt=6, long_prompt=12, rank=4, device_bytes=1 << 26, host_bytes=1 << 26),
    "1b": Plan(),
    "qwen4b": Plan(device_bytes=4 << 30, host_bytes=4 << 30),
    "7b": Plan(),
}


class Prefill(Serving):
    """An engine that reads prompts, with and without graphs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._graphs = self.core._runner._prefill_graphs

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs._graphs)

    def time(self, names: Sequence[str | None], prompt: int, mode: str) -> tuple[float, list[float]]:
        """Prompt tokens a second, and the time to each request's first token; the adapters are on the GPU before."""
        self.core._runner._prefill_graphs = None
        self.ask(names, 1, 1)
        self.finish()
        self.core._runner._prefill_graphs = self._graphs if mode == "graph" else None
        wait_for(self.device)
        first: dict[str, float] = {}
        started = time.perf_counter()
        self.ask(names, prompt, 1)
        while not self.core.is_idle():
            made = self.step()
            now = time.perf_counter() - started
            first.update({sequence.id: now for sequence, _, _ in made})
        wait_for(self.device)
        assert len(first) == len(names), f"{len(first)} of {len(names)} requests have a token"
        return len(names) * prompt / (time.perf_counter() - started), list(first.values())


def run(shape: str, device: str, folder: Path = FOLDER, repetitions: int = REPETITIONS) -> dict[str, Any]:
    console, plan = Console(width=140), PLANS[shape]
    asked: dict[str, list[str | None]] = {
        "base": [None] * plan.requests,
        "one adapter": ["a0"] * plan.requests,
        "distinct": [f"a{number}" for number in range(plan.requests)],
    }
    prompts = (plan.prompt, plan.long_prompt)
    cases = list(itertools.product(asked, prompts, MODES))
    rates: dict[tuple[str, int, str], list[float]] = {case: [] for case in cases}
    firsts: dict[tuple[str, int, str], list[float]] = {case: [] for case in cases}
    model = random_model(shape, device)
    with tempfile.TemporaryDirectory() as place:
        write_adapters(model, plan.requests, plan.rank, Path(place))
        engine = Prefill(model, plan, device, Path(place))
        engine.learn()
        for name, prompt in itertools.product(asked, prompts):
            engine.time(asked[name], prompt, "eager")
        before = used_bytes(device)
        for repetition in range(WARM_UP + repetitions):
            for index in rotated([str(n) for n in range(len(cases))], repetition):
                case = cases[int(index)]
                name, prompt, mode = case
                rate, first = engine.time(asked[name], prompt, mode)
                if repetition >= WARM_UP:
                    rates[case].append(rate)
                    firsts[case] += first
        graphs = {"count": engine.num_graphs, "bytes": used_bytes(device) - before}
    found: dict[str, Any] = {}
    for prompt, mode in itertools.product(prompts, MODES):
        of_case = compared({name: rates[name, prompt, mode] for name in asked}, "base")
        for name, each in of_case.items():
            each["median_first_token_s"] = statistics.median(firsts[name, prompt, mode])
            each["of_eager"] = statistics.median(
                one / other for one, other in zip(rates[name, prompt, mode], rates[name, prompt, "eager"], strict=True)
            )
        found.setdefault(str(prompt), {})[mode] = of_case
    figures = {
        "script": "gpu_prefill",
        "shape": shape,
        "plan": {"requests": plan.requests, "prompts": prompts, "rank": plan.rank, "repetitions": repetitions},
        "prefill_tokens_per_s": found,
        "graphs": graphs,
    }
    save(f"gpu-prefill-{shape}", str(__doc__).splitlines()[0], figures, folder)
    for prompt, modes in found.items():
        for mode, each in modes.items():
            for name, of in each.items():
                console.print(
                    f"{prompt:>4s} tokens  {mode:5s}  {name:11s} {of['median']:8.0f} tok/s ({of['ratio']:.3f} of base, "
                    f"{of['of_eager']:.2f} of eager), first token {1e3 * of['median_first_token_s']:.1f} ms"
                )
    console.print(f"graphs: {graphs['count']}, {graphs['bytes'] / 2**20:.0f} MiB")
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=[shape for shape in PLANS if shape in SHAPES], shape="qwen4b")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    chosen = parser.parse_args(arguments)
    run(chosen.shape, chosen.device, chosen.out, chosen.repetitions)


if __name__ == "__main__":
    main()
