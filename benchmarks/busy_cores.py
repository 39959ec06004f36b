"""How much slower does a CPU engine decode while other processes keep cores busy?

32 sequences of the embedded default model decode, greedy, next to none, one and two processes that compute without pause:
with as many threads as cores are free (`common.free_cores`), and with a thread on each core whatever the others do.

    python -m benchmarks.busy_cores           # about 3 minutes on 2 cores
    python -m benchmarks.busy_cores --tiny    # seconds, for the tests
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, compared, save
from benchmarks.serving import default_model, tiny_model

QUESTION = str(__doc__).splitlines()[0]
FREE, ALL = "threads on free cores", "a thread on each core"
_SETTLE_S = 1.5  # until the engine has measured the other processes


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(*, tiny: bool, repetitions: int) -> dict[str, Any]:
    from symbiosis.common.free_cores import FreeCores
    from symbiosis.serving.engine import Engine
    from symbiosis.serving.scheduling.sequence import Sampling

    requests, new = (4, 8) if tiny else (32, 64)
    engine = Engine(tiny_model() if tiny else default_model(), pages=requests * (new // 16 + 2))
    sampling = Sampling(temperature=0.0, max_tokens=new, ignore_eos=True)
    cores = sorted(os.sched_getaffinity(0))
    counts = range(len(cores) + 1)
    ways: dict[str, AbstractContextManager[object]] = {FREE: FreeCores(), ALL: nullcontext()}
    speeds: dict[str, dict[str, list[float]]] = {way: {str(count): [] for count in counts} for way in ways}
    for repetition in range(-1, repetitions):  # the first is to warm up
        for count in counts:
            with busy_processes(count):
                for way, threads in ways.items():
                    engine._core._free_cores = threads
                    begun = time.monotonic()
                    while time.monotonic() < begun + (0 if tiny else _SETTLE_S):
                        engine.generate([[1, 2]], None, Sampling(temperature=0.0, max_tokens=2))
                    prompts = [[1 + number, 2 + repetition + 1] for number in range(requests)]
                    begun = time.monotonic()
                    answers = engine.generate(prompts, None, sampling)
                    seconds = time.monotonic() - begun
                    if repetition >= 0:
                        speeds[way][str(count)].append(sum(len(each.tokens) for each in answers) / seconds)
    return {
        "requests": requests,
        "new": new,
        "tokens_per_s_by_busy_processes": {way: compared(found, "0") for way, found in speeds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    found = measure(tiny=chosen.tiny, repetitions=chosen.repetitions)
    console = Console(highlight=False)
    for way, cases in found["tokens_per_s_by_busy_processes"].items():
        for count, case in cases.items():
            console.print(f"{way:22s} {count} busy: {case['median']:8.1f} tok/s ({case['ratio']:.2f})")
    save("busy-cores", QUESTION, {"script": "busy_cores", **found}, chosen.out)


if __name__ == "__main__":
    main()
