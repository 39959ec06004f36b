"""What does sharing cost a tenant on the GPU, and what does it save?

Fine-tuning tenants (LoRA rank 8 on q, k, v, o; batch 2 × 512; AdamW; bf16;
random weights at the true shapes), each a process of its own: with a private
copy of the model (plain transformers + PEFT), through the executor, and in
direct mode. Then one tenant's `generate()` the same three ways.

    python -m benchmarks.sharing 1b 7b           # about 6 minutes on one H200
    python -m benchmarks.sharing 1b --mps        # the same under CUDA MPS
    python -m benchmarks.sharing tiny --cpu      # seconds, for the tests
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing as mp
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, save

BATCH, TOKENS, NEW_TOKENS = 2, 512, 32
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256},
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip
TENANTS: dict[str, tuple[int, ...]] = {"tiny": (1, 2), "1b": (1, 4, 8), "7b": (1, 4)}
MODES = ("plain", "direct", "executor")


def random_model(shape: str, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**SHAPES[shape])).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def serve(shape: str, device: str, pipe: Any) -> None:
    import symbiosis

    with symbiosis.Executor(random_model(shape, device), device=device) as executor:
        pipe.send(executor.listen("shm://"))
        pipe.recv()  # until it is told to stop


class Worker:
    """One tenant's process, told what to do by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model: Any = None

    def build(self, mode: str, shape: str, address: str) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        import symbiosis

        if mode == "plain":
            self.base = random_model(shape, self.device)
        else:
            where = mode if self.device != "cpu" else "auto"
            self.base = symbiosis.connect(address, device=self.device, mode=where)
        lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model = get_peft_model(self.base, lora)
        self.model.train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.ids = torch.randint(0, SHAPES[shape]["vocab_size"], (BATCH, TOKENS), device=self.device)
        for _ in range(4):
            self.step()

    def step(self) -> float:
        started = time.perf_counter()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        float(loss.detach())  # as a training loop that shows its loss does; it also waits for the GPU
        return time.perf_counter() - started

    def train(self, seconds: float) -> list[float]:
        steps, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            steps.append(self.step())
        return steps

    def generate(self) -> list[float]:
        """Seconds per new token."""
        import torch

        self.model.eval()
        prompt, times = self.ids[:1, :128], []
        for _ in range(4):
            started = time.perf_counter()
            with torch.no_grad():
                self.model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
            times.append((time.perf_counter() - started) / NEW_TOKENS)
        return times[1:]

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() if self.device != "cpu" else 0

    def drop(self) -> None:
        import torch

        session = getattr(self.base, "symbiosis", None)
        self.model = self.base = self.optimizer = None
        gc.collect()
        if session is not None:
            session.close()
        if self.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def context(self) -> None:
        """So that every process has its GPU context before memory is counted."""
        import torch

        if self.device != "cpu":
            torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")


def work(device: str, pipe: Any) -> None:
    import traceback

    worker = Worker(device)
    while True:
        name, args = pipe.recv()
        if name == "stop":
            return
        try:
            pipe.send((True, getattr(worker, name)(*args)))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))


class Workers:
    def __init__(self, count: int, device: str) -> None:
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=work, args=(device, theirs)))
            self.processes[-1].start()
            self.pipes.append(ours)

    def all(self, count: int, name: str, *args: Any) -> list[Any]:
        for pipe in self.pipes[:count]:
            pipe.send((name, args))
        results = [pipe.recv() for pipe in self.pipes[:count]]
        for fine, result in results:
            if not fine:
                raise RuntimeError(result)
        return [result for _, result in results]

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(("stop", ()))
            process.join(20)
            process.kill()


def used_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


@contextlib.contextmanager
def executor_of(shape: str, device: str) -> Iterator[str]:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(shape, device, theirs))
    process.start()
    try:
        if not pipe.poll(300):
            raise RuntimeError("the executor did not start")
        yield pipe.recv()
        pipe.send("stop")
        process.join(30)
    finally:
        process.kill()


def measure(workers: Workers, mode: str, shape: str, count: int, device: str, seconds: float, address: str) -> dict[str, Any]:
    """One case, once: `count` tenants of one mode."""
    workers.all(count, "build", mode, shape, address)
    windows = [workers.all(count, "train", seconds / 5) for _ in range(5)]
    found = {
        "rates": [sum(BATCH * TOKENS * len(steps) / sum(steps) for steps in window) for window in windows],
        "steps": [step for window in windows for steps in window for step in steps],
        "bytes_in_all": used_bytes(device),
        "peak_per_tenant": max(workers.all(count, "peak")),
        "per_token": workers.all(1, "generate")[0] if count == 1 else [],
    }
    workers.all(count, "drop")
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    def values(key: str) -> list[float]:
        return [value for each in found for value in each[key]]

    return {
        "tokens_per_s": statistics.median(values("rates")),
        "step_s": statistics.median(values("steps")),
        "seconds_per_token": statistics.median(values("per_token")) if values("per_token") else None,
        "bytes_in_all": max(each["bytes_in_all"] for each in found),
        "peak_per_tenant": max(each["peak_per_tenant"] for each in found),
        "windows": values("rates"),
    }


def line(name: str, figures: dict[str, Any], plain: dict[str, Any]) -> str:
    step, rate = figures["step_s"] / plain["step_s"], figures["tokens_per_s"] / plain["tokens_per_s"]
    text = f"{name}: {figures['tokens_per_s']:8.0f} tok/s ({rate:.3f})  step {1e3 * figures['step_s']:7.1f} ms ({step:.3f})"
    text += (
        f"  memory {figures['bytes_in_all'] / 2**30:6.2f} GiB ({figures['bytes_in_all'] / (plain['bytes_in_all'] or 1):.3f})"
    )
    if figures["seconds_per_token"]:
        per_token = figures["seconds_per_token"]
        text += f"  {1e3 * per_token:.2f} ms/token ({per_token / plain['seconds_per_token']:.3f})"
    return text


def run(shapes: list[str], device: str, seconds: float, mps: bool, modes: list[str], folder: Path) -> dict[str, Any]:
    console, results = Console(width=160), {}
    workers = Workers(max(max(TENANTS[shape]) for shape in shapes), device)
    workers.all(len(workers.pipes), "context")
    try:
        for shape in shapes:
            table = results[shape] = {mode: {} for mode in modes}
            empty = used_bytes(device)
            with executor_of(shape, device) as address:
                shared = used_bytes(device) - empty
                for count in TENANTS[shape]:
                    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
                    # One tenant is bound by the host, whose speed drifts; several are bound by the GPU, and "auto" is direct.
                    for _ in range(2 if count == 1 else 1):
                        for mode in modes if count == 1 else modes[:2]:
                            once = measure(workers, mode, shape, count, device, seconds, address)
                            once["bytes_in_all"] -= empty + (shared if mode == "plain" else 0)
                            found[mode].append(once)
                    for mode in [mode for mode in modes if found[mode]]:
                        table[mode][count] = summary(found[mode])
                        console.print(line(f"{shape} {mode:9s} × {count}", table[mode][count], table[modes[0]][count]))
    finally:
        workers.stop()
        name = f"sharing-{'-'.join(shapes)}{'-mps' if mps else ''}"
        save(name, str(__doc__).splitlines()[0], {"mps": mps, "results": results}, folder)
    return results


@contextlib.contextmanager
def mps_daemon(wanted: bool) -> Iterator[None]:
    """CUDA MPS for the processes started from here."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=f"{folder}/pipe", CUDA_MPS_LOG_DIRECTORY=f"{folder}/log")
        for name in ("pipe", "log"):
            Path(folder, name).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring each case")
    parser.add_argument("--tenants", type=int, nargs="+", help="how many at a time")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    for shape in options.shapes if options.tenants else []:
        TENANTS[shape] = tuple(options.tenants)
    with mps_daemon(options.mps):
        run(options.shapes, "cpu" if options.cpu else "cuda", options.seconds, options.mps, options.modes, options.out)
