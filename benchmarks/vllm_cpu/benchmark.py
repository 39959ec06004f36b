"""Runs both engines in turns and writes the figures. The commands are in `__init__`."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

import benchmarks.vllm_cpu as package
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.serving import tiny_model, with_adapters

QUESTION = str(package.__doc__).splitlines()[0]
OURS, THEIRS = "symbiosis", "vllm"
ADAPTERS = (0, 1, 8)
RANK = 16


class EngineProcess:
    """A process that computes requests and says how long it took. A context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Between requests it is stopped: an idle engine may still spin for its threads' sake."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._read()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}: see the log above")
        return json.loads(line)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


def prepare(folder: Path, model_folder: Path | None, *, is_tiny: bool) -> Path:
    """The model's folder. Those of adapters with random weights are made in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    from symbiosis.models.default_model import default_model_folder

    if is_tiny:
        model, model_folder = tiny_model(), folder / "model"
        model.save_pretrained(model_folder)
    else:
        model_folder = model_folder or default_model_folder()
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with_adapters(model, max(ADAPTERS), RANK, folder)
    return model_folder


def commands(chosen: Any, model: Path) -> dict[tuple[str, int], list[str]]:
    """Of each engine and number of adapters. Ours is one process for all."""
    ours = [sys.executable, "-m", "benchmarks.vllm_cpu.ours", str(model), chosen.dtype]
    found = {(OURS, count): ours for count in chosen.adapters}
    if chosen.vllm is None:
        return found
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    longest = str(chosen.prompt + chosen.new)
    theirs = [chosen.vllm, str(Path(__file__).with_name("theirs.py")), str(model), chosen.dtype]
    return found | {(THEIRS, count): [*theirs, str(count), longest, cores] for count in chosen.adapters}


def measure(chosen: Any, folder: Path) -> dict[str, Any]:
    model = prepare(folder, chosen.model, is_tiny=chosen.tiny)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    console = Console()
    with ExitStack() as stack:
        processes: dict[tuple[str, ...], EngineProcess] = {}
        cases = commands(chosen, model)
        for command in cases.values():
            if tuple(command) not in processes:
                with console.status(f"Starting {' '.join(command[:3])}"):
                    processes[tuple(command)] = stack.enter_context(EngineProcess(command))
        engines = list(dict.fromkeys(engine for engine, _ in cases))
        speeds: dict[int, dict[str, list[float]]] = {count: {engine: [] for engine in engines} for count in chosen.adapters}
        agreed: dict[int, list[bool]] = {count: [] for count in chosen.adapters}
        for repetition in range(-1, chosen.repetitions):  # the first is to warm up
            random_ids = random.Random(f"repetition {repetition}")
            new = chosen.new if repetition >= 0 else min(chosen.new, 8)
            prompts = [[random_ids.randrange(vocabulary) for _ in range(chosen.prompt)] for _ in range(chosen.requests)]
            for count in chosen.adapters:
                paths = [str(folder / f"a{number}") for number in range(count)]
                firsts = []
                for engine in rotated(engines, repetition + 1):
                    process = processes[tuple(cases[engine, count])]
                    # Not timed: the other engine has run since, and idle memory may have been moved out.
                    process.ask({"prompts": [prompt[::-1] for prompt in prompts], "new": 4, "adapters": paths})
                    answer = process.ask({"prompts": prompts, "new": new, "adapters": paths})
                    assert answer["tokens"] == chosen.requests * new
                    firsts.append(answer["first"])
                    speed = answer["tokens"] / answer["seconds"]
                    console.print(f"{count} adapters, {engine:9s} {speed:8.1f} tok/s{' (warm-up)' * (repetition < 0)}")
                    if repetition >= 0:
                        speeds[count][engine].append(speed)
                agreed[count].append(all(first == firsts[0] for first in firsts))
    baseline = THEIRS if chosen.vllm else OURS
    return {
        "tokens_per_s": {str(count): compared(found, baseline) for count, found in speeds.items()},
        "same_first_answer": {str(count): sum(found) / len(found) for count, found in agreed.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="instead of the default model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--adapters", type=int, nargs="+", default=list(ADAPTERS), choices=ADAPTERS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for the tests")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen, Path(folder))
    shape = {name: getattr(chosen, name) for name in ("requests", "prompt", "new", "dtype")}
    which = f"{chosen.model.resolve().name}-" if chosen.model else ""
    name = f"vllm-cpu-{which}{os.uname().machine}-{chosen.requests}x{chosen.prompt}+{chosen.new}-{chosen.dtype}"
    path = save(name, QUESTION, {"script": "vllm_cpu", **shape, **found}, chosen.out)
    Console().print(path, highlight=False)
