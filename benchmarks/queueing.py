"""Does the cost of a request grow with the number of requests that wait?

32, 64, 128, 256 and 512 requests at once (prompts of 8 tokens, 8 new ones,
greedy, over 8 LoRA adapters of rank 16 and 16 tenants), of which 32 are
computed at a time, on the embedded default model: seconds per request until
all are answered, which should be the same for all. Then the host's own time
per pass at the same lengths: the scheduler over a model that takes no time.

    python -m benchmarks.queueing           # about 6 minutes on 2 cores
    python -m benchmarks.queueing --tiny    # seconds, for the tests
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, rotated, save
from benchmarks.serving import default_model, tiny_model, with_adapters

TENANTS = 16
PROMPT = NEW = 8


def served(core: Any, count: int, names: Sequence[str], generator: Any) -> float:
    """Seconds per request until all of `count` are answered."""
    import torch

    from symbiosis.serving.scheduling.sequence import Sampling

    wish = Sampling(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    prompts = torch.randint(1, core.facts.vocab, (count, PROMPT), generator=generator).tolist()
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        core.add(prompt, wish, adapter=names[number % len(names)], tenant=f"t{number % TENANTS}")
    answered = 0
    while not core.is_idle():
        answered += len(core.step())
    if answered != count * NEW:
        raise RuntimeError(f"{answered} tokens for {count} requests")
    return (time.perf_counter() - started) / count


def host(count: int, names: Sequence[str], running: int) -> float:
    """Mean seconds of the scheduler per pass, while that many requests are answered."""
    from symbiosis.serving.scheduling.block_manager import BlockManager
    from symbiosis.serving.scheduling.scheduler import Scheduler, SchedulerConfig
    from symbiosis.serving.scheduling.sequence import Sampling
    from symbiosis.serving.scheduling.sequence import Sequence as Request

    config = SchedulerConfig(vocab_size=1000, max_length=1000, max_running=running)
    scheduler = Scheduler(config, BlockManager(4 * running, PROMPT))
    wish = Sampling(temperature=0.0, max_tokens=NEW)
    for number in range(count):
        prompt = [number % 997, number // 997, *range(PROMPT - 2)]
        who = {"tenant": f"t{number % TENANTS}", "adapter": names[number % len(names)]}
        scheduler.add(Request(id=str(number), prompt=prompt, sampling=wish, arrival=0.0, **who))
    seconds: list[float] = []
    while scheduler.num_running or scheduler.num_waiting:
        started = time.perf_counter()
        made = scheduler.schedule(0.0)
        scheduler.update(made, [1] * len(made.sampled))
        seconds.append(time.perf_counter() - started)
    return statistics.mean(seconds)


def run(*, tiny: bool, repetitions: int, folder: Path = FOLDER) -> dict[str, Any]:
    import torch

    from symbiosis.models.fuse_projections import fuse_projections
    from symbiosis.serving.engine_core import EngineCore

    console = Console(width=120)
    counts, adapters, rank, running = ((4, 8, 16), 2, 4, 4) if tiny else ((32, 64, 128, 256, 512), 8, 16, 32)
    model, generator = tiny_model() if tiny else default_model(), torch.Generator().manual_seed(2)
    with tempfile.TemporaryDirectory() as place:
        with_adapters(copy.deepcopy(model), adapters, rank, Path(place))
        fuse_projections(model)
        core = EngineCore(model, pages=4 * running, page_size=16, max_running=running)
        names = [f"a{number}" for number in range(adapters)]
        for name in names:
            core.add_adapter(name, Path(place) / name)
        served(core, counts[0], names, generator)  # to warm up
        requests: dict[str, list[float]] = {str(count): [] for count in counts}
        passes: dict[str, list[float]] = {str(count): [] for count in counts}
        for repetition in range(repetitions):
            for count in rotated([*requests], repetition):
                requests[count].append(served(core, int(count), names, generator))
                passes[count].append(host(int(count), names, running))
    request_s = {count: min(found) for count, found in requests.items()}
    host_s = {count: min(found) for count, found in passes.items()}
    for count in requests:
        console.print(
            f"{count:>4s} requests: {request_s[count] * 1e3:7.1f} ms each, scheduler {host_s[count] * 1e6:6.0f} µs a pass"
        )
    plan = {"adapters": adapters, "rank": rank, "running": running, "prompt": PROMPT, "new": NEW, "tenants": TENANTS}
    figures = {
        "plan": plan,
        "request_s": request_s,
        "host_pass_s": host_s,
        "runs": {"request_s": requests, "host_pass_s": passes},
    }
    save("queueing-tiny" if tiny else "queueing", str(__doc__).splitlines()[0], figures, folder)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    run(tiny=chosen.tiny, repetitions=chosen.repetitions, folder=chosen.out)


if __name__ == "__main__":
    main()
