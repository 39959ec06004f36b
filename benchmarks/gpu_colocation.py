"""What does hosted training cost those who are served, and serving those who train?

One engine and one host of training in one process, over the same weights (random, at the true shape, bf16): answers are
computed, half of them with LoRA adapters (rank 16 on all projections), and 4 jobs train (rank 8 on q, k, v, o; batch
2 × 512). In turn: serving alone, training alone, and both, in the ways to share a GPU: "priority" (kernels of serving come
first, and that is all), "part:0.5" (while answers are served training has so much of the multiprocessors) and "steered"
(as much as makes a token 1.3 times as long, found out by the way: what a server does). Two loads: "full" (16 sequences
decode without pause) and "chat" (questions of 128 tokens come at random, one in two seconds on average, and are answered
with 128). Ratios are medians of the ratio within one round of turns.

    python -m benchmarks.gpu_colocation 7b                                       # about a minute on one H200
    python -m benchmarks.gpu_colocation 7b --load chat --seconds 12 --rounds 3   # about 2.5 minutes
    python -m benchmarks.gpu_colocation 7b --ways part:0.5                     # one a run: graphs of two streams are kept
    python -m benchmarks.gpu_colocation tiny --cpu                               # seconds, for the tests
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.gpu_serving import prompts_of, write_adapters
from benchmarks.hosted_jobs import HostedJobs
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.shapes import SHAPES, random_model
from benchmarks.tenants import window_of

WAYS = ("steered",)
LOADS = ("full", "chat")
ROUNDS = 5
PARTS = (50, 95, 99)
"""In a hundred: so many gaps between tokens are shorter."""
TRIES, NEW = 5, 0.02
"""A way is measured after so many windows, or once it has kept its part of the GPU for one in which so few passes were new."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    sequences: int = 16
    adapters: int = 4
    rank: int = 16
    prompt: int = 128
    new: int = 1024
    jobs: int = 4
    chat_s: float = 2.0
    """Between two questions, on average."""
    chat_new: int = 128
    adapter_bytes: int = 1 << 30


PLANS = {
    "tiny": Plan(sequences=4, adapters=2, rank=4, prompt=6, new=400, jobs=2, chat_s=0.1, chat_new=8, adapter_bytes=1 << 26),
    "1b": Plan(),
    "7b": Plan(),
}


class Chosen:
    """Engine and host ask this one how they share; which way that is may be changed between windows."""

    def __init__(self, now: Any) -> None:
        self.now = now
        self._entered = self._training = now

    def __enter__(self) -> None:
        self._entered = self.now
        self._entered.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)

    def begin_pass(self, short_s: float, is_over: Callable[[], bool]) -> Any:
        self._training = self.now
        return self._training.begin_pass(short_s, is_over)

    def end_pass(self, *, is_new: bool = False) -> None:
        self._training.end_pass(is_new=is_new)


class Serving:
    """An engine that is stepped by a thread of its own while `with` lasts; knows when each token came."""

    def __init__(self, model: Any, plan: Plan, load: str, folder: Path, turns: Any) -> None:
        from symbiosis.serving.engine_core import EngineCore
        from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig

        pages = (plan.sequences + 2) * (-(-(plan.prompt + plan.new) // 16) + 1)
        memory = AdapterCacheConfig(device_bytes=plan.adapter_bytes, host_bytes=plan.adapter_bytes)
        self._plan, self.load, self._vocabulary = plan, load, model.config.vocab_size
        self._core = EngineCore(model, pages=pages, residency=memory, device_share=turns)
        for number in range(plan.adapters):
            self._core.add_adapter(f"a{number}", folder / f"a{number}")
        self._came: list[tuple[float, float]] = []
        """Of each token but an answer's first: when it came, and how long after the one before."""
        self._first: list[tuple[float, float]] = []
        """Of each answer: when its first token came, and how long after the question."""
        self._error: BaseException | None = None
        self._going = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Serving:
        self._ending, self._came, self._first = False, [], []
        self._going.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._going.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending = True
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds between two tokens of a sequence."""
        return [gap for at, gap in self._came if begin < at <= end]

    def first_between(self, begin: float, end: float) -> list[float]:
        """Seconds until an answer began."""
        return [delay for at, delay in self._first if begin < at <= end]

    def _run(self) -> None:
        try:
            self._answer()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._error = error
        finally:
            self._going.set()

    def _answer(self) -> None:
        from symbiosis.serving.scheduling.sequence import Sampling

        plan, core, full = self._plan, self._core, self.load == "full"
        wish = Sampling(temperature=0.0, max_tokens=plan.new if full else plan.chat_new, ignore_eos=True)
        names = [f"a{n // 2 % plan.adapters}" if n % 2 else None for n in range(plan.sequences)]
        last: dict[str, float] = {}
        since: dict[str, float] = {}
        running: dict[str, Any] = {}
        random, asked, started = Random(0), 0, time.monotonic()
        coming = 0.0

        def ask(name: str | None) -> None:
            (prompt,) = prompts_of(self._vocabulary, 1, plan.prompt)
            running.update({(request := core.add(prompt, wish, adapter=name)).id: (request, name)})
            since[request.id] = time.monotonic()

        while not self._ending:
            while len(running) < len(names) and (full or time.monotonic() - started >= coming):
                ask(names[asked % len(names)])
                asked, coming = asked + 1, coming + random.expovariate(1 / plan.chat_s)
            passes = core.num_steps
            made = core.step()
            now = time.monotonic()
            if core.num_steps == passes:
                core.wait(0.002)
            for request, _, _ in made:
                if request.id in last:
                    self._came.append((now, now - last[request.id]))
                else:
                    self._first.append((now, now - since[request.id]))
                last[request.id] = now
                if request.reason is not None:
                    running.pop(request.id)
            if len(last) >= (len(names) if full else 1):
                self._going.set()
        for request, _ in running.values():
            core.cancel(request)


def way_of(name: str, device: str) -> Any:
    """How engine and host share the device."""
    import torch

    from symbiosis.device_sharing.gpu_partition import GpuPartition

    kind, _, part = name.partition(":")
    if kind not in ("priority", "part", "steered") or bool(part) != (kind == "part"):
        raise SystemExit(f"{name!r} is no way to share a GPU: expected priority, steered, or a part, as in part:0.5")
    share = {"priority": 1.0, "part": float(part or 0), "steered": None}[kind]
    return GpuPartition(torch.device(device, 0) if device == "cuda" else torch.device(device), share)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def window(serving: Serving | None, training: HostedJobs | None, seconds: float) -> dict[str, float]:
    """What one window gave those who are there."""
    if training is None:
        assert serving is not None
        with serving:
            begin, end = window_of(seconds)
            time.sleep(end - time.monotonic())
            found: list[list[float]] = []
    elif serving is None:
        found = training.window(seconds)
    else:
        with serving:
            begin, end = window_of(seconds)
            found = training.window(seconds)
    figures: dict[str, float] = {}
    if serving is not None:
        gaps = serving.between(begin, end)
        if not gaps:
            raise RuntimeError("no token came in a window: it is too short")
        figures = {f"p{part}_s": quantile(gaps, part / 100) for part in PARTS}
        figures["served_per_s"] = len(gaps) / seconds
        if serving.load == "chat":
            first = serving.first_between(begin, end)
            if not first:
                raise RuntimeError("no answer began in a window: it is too short")
            figures["first_s"] = statistics.mean(first)
    if training is not None:
        figures["trained_per_s"] = sum(
            tokens / statistics.mean(each) for tokens, each in zip(training.tokens, found, strict=True)
        )
    return figures


def settle(way: Any, serving: Serving, training: HostedJobs, seconds: float, console: Console) -> None:
    """Kernels are compiled and graphs captured, and a way that looks for its part of the GPU has found it."""
    with serving:
        for _ in range(TRIES):
            share, before = way.share, training.host.stats
            training.window(2 * seconds)
            after = training.host.stats
            passes, new = after.passes - before.passes, after.new_passes - before.new_passes
            console.print(f"a part of {share} for training, {way.share} in the end; {new} of {passes} passes of a new kind")
            if way.share == share and new <= max(2, NEW * passes):
                break


def run(
    shape: str,
    device: str,
    seconds: float,
    names: Sequence[str],
    folder: Path = FOLDER,
    rounds: int = ROUNDS,
    load: str = "full",
) -> None:
    from symbiosis.models.fuse_projections import fuse_projections
    from symbiosis.models.loading import shared_copy

    console, plan = Console(width=160), PLANS[shape]
    model = random_model(shape, device)
    fuse_projections(model)
    ways = {name: way_of(name, device) for name in names}
    turns = Chosen(next(iter(ways.values())))
    size = (SHAPES[shape].batch, SHAPES[shape].tokens)
    runs: dict[str, list[dict[str, float]]] = {"serving": [], "training": [], **{name: [] for name in ways}}
    failed: dict[str, str] = {}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as place:
        write_adapters(model, plan.adapters, plan.rank, Path(place))
        training = HostedJobs(shared_copy(model), shape, "graphs", [size] * plan.jobs, device_share=turns)
        serving = Serving(model, plan, load, Path(place), turns)
        try:
            training.steps(5)
            for name, way in ways.items():  # graphs are captured
                turns.now = way
                started = time.monotonic()
                try:
                    settle(way, serving, training, seconds, console)
                except Exception:  # noqa: BLE001 - the others are still worth their figures; the run fails in the end
                    failed[name] = traceback.format_exc()
                    console.print(f"{name} failed:\n{failed[name]}", markup=False)
                console.print(f"{name}: {way.stats()}, first steps {time.monotonic() - started:.1f} s")
            cases = [case for case in runs if case not in failed]
            for number in range(rounds):
                for case in rotated(cases, number):
                    turns.now = ways.get(case) or way_of("priority", device)  # a new one without a history
                    runs[case].append(
                        window(None if case == "training" else serving, None if case == "serving" else training, seconds)
                    )
                    if case in ways:
                        shares[case].append(ways[case].share)
        finally:
            training.close()
    figures = {
        "script": "gpu_colocation",
        "shape": shape,
        "load": load,
        "plan": {"sequences": plan.sequences, "adapters": plan.adapters, "rank": plan.rank, "jobs": plan.jobs, "batch": size},
        "figures": {
            name: compared({case: [each[name] for each in runs[case]] for case in cases if case != other}, alone)
            for name, alone, other in (
                *((f"p{part}_s", "serving", "training") for part in PARTS),
                ("served_per_s", "serving", "training"),
                *((("first_s", "serving", "training"),) if load == "chat" else ()),
                ("trained_per_s", "training", "serving"),
            )
        },
        "measured": {name: {**way.stats(), "training_shares": shares[name]} for name, way in ways.items()},
        "failed": failed,
    }
    save(f"gpu-colocation-{shape}{'' if load == 'full' else '-chat'}", str(__doc__).splitlines()[0], figures, folder)
    for case in cases:
        console.print(f"{shape} {case:14s} {line(figures['figures'], case)}", highlight=False)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def line(figures: Any, case: str) -> str:
    shown = {
        **{f"p{part}_s": (1e3, f"ms p{part}") for part in PARTS},
        "served_per_s": (1, "tok/s served"),
        "first_s": (1e3, "ms to the first"),
        "trained_per_s": (1, "tok/s trained"),
    }
    there = [(figures[name][case], scale, unit) for name, (scale, unit) in shown.items() if case in figures.get(name, ())]
    return ", ".join(f"{scale * found['median']:9.2f} {unit} ({found['ratio']:.2f})" for found, scale, unit in there)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(PLANS), shape="7b", seconds=2.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="to share the GPU, with both at once")
    parser.add_argument("--load", choices=LOADS, default=LOADS[0], help="what is served")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args(arguments)
    run(chosen.shape, chosen.device, chosen.seconds, chosen.ways, chosen.out, chosen.rounds, chosen.load)


if __name__ == "__main__":
    main()
