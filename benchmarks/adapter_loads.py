"""How many adapters are loaded to the devices of a cluster, next to Ray Serve's multiplexing?

200 LoRA adapters of Zipf popularity, four engines with 16 adapter slots each, eight requests at a time on an engine. The same
sequence of requests goes over HTTP to a Symbiosis cluster, and to a Ray Serve deployment with `@serve.multiplexed`, whose
replicas run the same engine. Loads are counted on the engines: every adapter that enters a slot, or calls of the load function.
`--ray-python` is a Python with `ray[serve]` and this package's requirements; without one, Ray Serve is left out, and the record
says so.

    python -m benchmarks.adapter_loads --ray-python /tmp/serve/bin/python  # 12 minutes on 2 cores
    python -m benchmarks.adapter_loads --tiny                              # to try it
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx2
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.http_load.vocabulary import save_tokenizer
from benchmarks.results import FOLDER, save

MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 256,
}  # fmt: skip
RANK = 8
HOTTEST = 5
"""Adapters whose engines are counted."""
_TARGETS = ["q_proj", "v_proj"]
_SAMPLE_S = 0.5
_SETTLE_S = 3.0  # the director asks engines for their statistics once a second


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: its load and its engines."""

    adapters: int = 200
    engines: int = 4
    slots: int = 16
    running: int = 8
    """Most requests of an engine at a time: `max_running`, and Ray Serve's `max_ongoing_requests`."""
    exponents: tuple[float, ...] = (1.0, 1.5)
    streams: tuple[int, ...] = (16, 28, 48)
    """Clients that ask again as soon as they have an answer."""
    seeds: int = 2
    warm_up: int = 250
    requests: int = 700
    prompt: int = 16
    new: int = 16


TINY = Plan(adapters=12, engines=2, slots=4, exponents=(1.0,), streams=(4,), seeds=1, warm_up=10, requests=30, new=4)


def zipf_sequence(plan: Plan, exponent: float, seed: int) -> tuple[list[int], list[int]]:
    """The adapter of each request, and adapters by popularity: another order with each seed."""
    chosen = random.Random(f"{exponent} {seed}")
    order = list(range(plan.adapters))
    chosen.shuffle(order)
    weights = [1 / rank**exponent for rank in range(1, plan.adapters + 1)]
    return chosen.choices(order, weights, k=plan.warm_up + plan.requests), order


def write_base(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    save_tokenizer(MODEL["vocab_size"], folder)


def write_adapters(count: int, model: Path, folder: Path) -> dict[str, Path]:
    """The first with PEFT; the others have its names and shapes, and other numbers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    config = LoraConfig(r=RANK, target_modules=_TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    first = folder / "a0"
    get_peft_model(LlamaForCausalLM.from_pretrained(model), config).save_pretrained(first)
    tensors = load_file(first / "adapter_model.safetensors")
    for number in range(count):
        torch.manual_seed(number)
        path = folder / f"a{number}"
        path.mkdir(exist_ok=True)
        if number:
            shutil.copy(first / "adapter_config.json", path)
        save_file({name: 0.05 * torch.randn_like(each) for name, each in tensors.items()}, path / "adapter_model.safetensors")
    return {f"a{number}": folder / f"a{number}" for number in range(count)}


class System(Protocol):
    """A running cluster."""

    url: str

    def request(self, adapter: str, prompt: list[int]) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Path, body and headers."""

    def tokens(self, body: Mapping[str, Any]) -> int:
        """Completion tokens of an answer."""

    def count(self) -> dict[str, int]:
        """Loads and evictions since the start."""

    def on_engines(self) -> list[set[str]]:
        """The adapters on each engine's device."""


class SymbiosisCluster:
    def __init__(self, host: Any, plan: Plan) -> None:
        self._host, self._plan, self.url = host, plan, host.url

    def request(self, adapter: str, prompt: list[int]) -> tuple[str, dict[str, Any], dict[str, str]]:
        body = {"model": adapter, "prompt": prompt, "max_tokens": self._plan.new, "temperature": 0, "ignore_eos": True}
        return "/v1/completions", body, {}

    def tokens(self, body: Mapping[str, Any]) -> int:
        return int(body["usage"]["completion_tokens"])

    def count(self) -> dict[str, int]:
        """Each adapter that has entered a slot is there now, or was evicted."""
        time.sleep(_SETTLE_S)
        cache = self._host.ask("stats")["adapter_cache"]
        return {"loads": cache["device_evictions"] + cache["device"], "evictions": cache["device_evictions"]}

    def on_engines(self) -> list[set[str]]:
        return [set(engine["adapters_on_device"]) for engine in self._host.ask("statistics")["engines"].values()]


class RayServeDeployment:
    def __init__(self, url: str, events: Path, plan: Plan) -> None:
        self.url, self._events, self._plan = url, events, plan

    def request(self, adapter: str, prompt: list[int]) -> tuple[str, dict[str, Any], dict[str, str]]:
        return "/", {"prompt": prompt, "max_tokens": self._plan.new}, {"serve_multiplexed_model_id": adapter}

    def tokens(self, body: Mapping[str, Any]) -> int:
        return len(body["tokens"])

    def _read(self) -> list[list[dict[str, str]]]:
        return [
            [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for path in self._events.glob("*.jsonl")
        ]

    def count(self) -> dict[str, int]:
        events = [event for replica in self._read() for event in replica]
        loads = sum("load" in event for event in events)
        return {"loads": loads, "evictions": len(events) - loads}

    def on_engines(self) -> list[set[str]]:
        found = []
        for replica in self._read():
            held: set[str] = set()
            for event in replica:
                held.add(event["load"]) if "load" in event else held.discard(event["evict"])
            found.append(held)
        return found


@contextmanager
def symbiosis_cluster(plan: Plan, model: Path, adapters: Mapping[str, Path], folder: Path) -> Iterator[System]:
    from symbiosis.app.cluster.cluster_host import ClusterHost

    engine = {
        "model": str(model),
        "threads": 1,
        "adapter_gb": 0.5,
        "adapter_slots": plan.slots,
        "max_running": plan.running,
        "training": False,
    }
    with ClusterHost(
        "127.0.0.1:0", engine=engine, engines=plan.engines, state=folder / "state", workers=1, adapters=adapters
    ) as host:
        closing = threading.Event()

        def check() -> None:
            while not closing.wait(0.1):
                host.check()

        checker = threading.Thread(target=check)
        checker.start()
        try:
            while len(host.ask("statistics")["engines"]) < plan.engines:
                time.sleep(0.2)
            yield SymbiosisCluster(host, plan)
        finally:
            closing.set()
            checker.join()


@contextmanager
def ray_serve_deployment(python: str, plan: Plan, model: Path, adapters: Mapping[str, Path], folder: Path) -> Iterator[System]:
    events = folder / "events"
    events.mkdir()
    config = {
        "model": str(model),
        "adapters": str(next(iter(adapters.values())).parent),
        "events": str(events),
        "engines": plan.engines,
        "slots": plan.slots,
        "running": plan.running,
    }
    process = subprocess.Popen(
        [python, "-m", "benchmarks.adapter_loads_ray_serve", json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = next((line.split()[1] for line in process.stdout if line.startswith("url ")), "")
        if not url:
            raise RuntimeError(f"Ray Serve has ended with status {process.wait()}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield RayServeDeployment(url, events, plan)
    finally:
        process.stdin.close()
        process.wait(60)


def why_no_ray_serve(python: str) -> str | None:
    done = subprocess.run([python, "-c", "import ray.serve"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


async def ask(system: System, plan: Plan, sequence: Sequence[int], streams: int) -> tuple[list[float], float]:
    """Latency of each request, and the seconds of all."""
    prompts, numbers = random.Random(0), iter(sequence)
    latencies: list[float] = []
    limits = httpx2.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx2.AsyncClient(base_url=system.url, timeout=120, limits=limits) as client:

        async def stream() -> None:
            for number in numbers:
                prompt = [prompts.randrange(1, MODEL["vocab_size"]) for _ in range(plan.prompt)]
                path, body, headers = system.request(f"a{number}", prompt)
                started = time.monotonic()
                reply = await client.post(path, json=body, headers=headers)
                reply.raise_for_status()
                latencies.append(time.monotonic() - started)
                assert system.tokens(reply.json()) == plan.new

        started = time.monotonic()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return latencies, time.monotonic() - started


@contextmanager
def sampled(system: System) -> Iterator[list[list[set[str]]]]:
    """The adapters on engines, sampled all the time."""
    found: list[list[set[str]]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            found.append(system.on_engines())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(system.on_engines())


def measure(system: System, plan: Plan, exponent: float, streams: int, seed: int) -> dict[str, Any]:
    sequence, order = zipf_sequence(plan, exponent, seed)
    asyncio.run(ask(system, plan, sequence[: plan.warm_up], streams))
    before = system.count()
    with sampled(system) as samples:
        latencies, seconds = asyncio.run(ask(system, plan, sequence[plan.warm_up :], streams))
    after = system.count()
    latencies.sort()
    engines = [[sum(f"a{number}" in held for held in sample) for number in order[:HOTTEST]] for sample in samples]
    return {
        "loads": after["loads"] - before["loads"],
        "evictions": after["evictions"] - before["evictions"],
        "loads_per_request": (after["loads"] - before["loads"]) / plan.requests,
        "requests_per_s": plan.requests / seconds,
        "latency_s": {"p50": statistics.median(latencies), "p99": latencies[int(0.99 * (len(latencies) - 1))]},
        "engines_of_hottest": [statistics.fmean(each) for each in zip(*engines, strict=True)],
    }


def run_cells(start: Callable[[], Any], plan: Plan, name: str, console: Console) -> dict[str, dict[str, Any]]:
    """All cases on one running cluster."""
    cells: dict[str, dict[str, Any]] = {}
    with start() as system:
        for exponent, streams, seed in itertools.product(plan.exponents, plan.streams, range(plan.seeds)):
            cells[f"{exponent:g} {streams} {seed}"] = found = measure(system, plan, exponent, streams, seed)
            console.print(f"{name}, Zipf {exponent:g}, {streams} streams, seed {seed}: {found['loads']} loads")
    return cells


def summarize(plan: Plan, cells: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each exponent and number of streams, means over the seeds."""
    rows = []
    for exponent, streams in itertools.product(plan.exponents, plan.streams):
        row: dict[str, Any] = {"exponent": exponent, "streams": streams}
        for name, found in cells.items():
            runs = [found[f"{exponent:g} {streams} {seed}"] for seed in range(plan.seeds)]
            row[name] = {
                "loads_per_request": statistics.fmean(run["loads_per_request"] for run in runs),
                "evictions": statistics.fmean(run["evictions"] for run in runs),
                "requests_per_s": statistics.fmean(run["requests_per_s"] for run in runs),
                "p50_s": statistics.fmean(run["latency_s"]["p50"] for run in runs),
                "p99_s": statistics.fmean(run["latency_s"]["p99"] for run in runs),
                "engines_of_hottest": [
                    statistics.fmean(each) for each in zip(*(run["engines_of_hottest"] for run in runs), strict=True)
                ],
            }
        if len(cells) > 1:
            ratio = row["symbiosis"]["loads_per_request"] / max(1e-9, row["ray_serve"]["loads_per_request"])
            row["loads_against_ray_serve"] = ratio
        rows.append(row)
    return rows


def print_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="Adapter loads", box=box.SIMPLE, title_justify="left", pad_edge=False)
    for column in ("Zipf", "streams", "system"):
        table.add_column(column)
    for column in ("loads a request", "against", "requests/s", "p50 ms", "p99 ms", "engines of the hottest"):
        table.add_column(column, justify="right")
    for row in rows:
        for name in ("symbiosis", "ray_serve"):
            if name in row:
                found, ratio = row[name], row.get("loads_against_ray_serve")
                table.add_row(
                    f"{row['exponent']:g}",
                    str(row["streams"]),
                    name,
                    f"{found['loads_per_request']:.3f}",
                    f"{ratio:.0%}" if name == "symbiosis" and ratio is not None else "",
                    f"{found['requests_per_s']:.1f}",
                    f"{1e3 * found['p50_s']:.0f}",
                    f"{1e3 * found['p99_s']:.0f}",
                    " ".join(f"{each:.1f}" for each in found["engines_of_hottest"]),
                )
    console.print(table)


def run(plan: Plan, ray_python: str, out: Path, *, name: str, systems: Sequence[str] = ("symbiosis", "ray_serve")) -> Any:
    console = Console(width=120)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    missing = why_no_ray_serve(ray_python) if "ray_serve" in systems else "not asked for"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "model"
        write_base(model)
        adapters = write_adapters(plan.adapters, model, folder / "adapters")
        starts: dict[str, Callable[[], Any]] = {}
        if "symbiosis" in systems:
            starts["symbiosis"] = lambda: symbiosis_cluster(plan, model, adapters, folder)
        if missing is None:
            starts["ray_serve"] = lambda: ray_serve_deployment(ray_python, plan, model, adapters, folder)
        else:
            console.print(f"Ray Serve is not measured: {missing}")
        for system, start in starts.items():
            cells[system] = run_cells(start, plan, system, console)
    rows = summarize(plan, cells)
    print_rows(rows, console)
    figures = {"script": "adapter_loads", "plan": asdict(plan), "ray_serve_missing": missing, "rows": rows, "runs": cells}
    save(name, str(__doc__).splitlines()[0], figures, out)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", default=sys.executable, help="a Python with ray[serve]")
    parser.add_argument("--systems", nargs="+", choices=("symbiosis", "ray_serve"), default=("symbiosis", "ray_serve"))
    parser.add_argument("--streams", type=int, nargs="+")
    parser.add_argument("--exponents", type=float, nargs="+")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    plan = TINY if chosen.tiny else Plan()
    given = {name: getattr(chosen, name) for name in ("streams", "exponents", "seeds", "requests")}
    plan = replace(
        plan, **{name: tuple(each) if isinstance(each, list) else each for name, each in given.items() if each is not None}
    )
    name = f"adapter-loads{'-tiny' if chosen.tiny else ''}"
    run(plan, chosen.ray_python, chosen.out, name=name, systems=chosen.systems)


if __name__ == "__main__":
    main()
