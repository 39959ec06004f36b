"""What does one engine gain by serving many fine-tunes together, next to an engine for each of them?

Clients send requests without a pause, each to one of several fine-tunes of one base model, spread evenly. Two mixes: the
fine-tunes share all but their last layers, or nothing. Four systems, on the same device, with all cores:

- `zoo`: one engine with all models. Each shared block is in memory once, and computes the rows of all its models at once.
- `sharing`: the same memory, but a step has the rows of one model only; models take turns.
- `provisioned`: an engine for each model. As many are loaded as fit into the memory of `zoo`'s weights (on a GPU: into its
  memory), and take turns. A waiting model replaces the one loaded first, when that has run four times as long as a load takes,
  and is idle.
- `differences`: one engine with the base model and a LoRA adapter for each fine-tune. The same for both mixes.

On a CPU a load reads a checkpoint from the page cache; on a GPU it copies all weights from pinned host memory. Prompts and
lengths are equal for all systems; on a CPU the tokens of `zoo` and `sharing` are compared. A run that was cut goes on where it
was, if the plan is the same but for its repetitions. Time in which the process was stopped does not count.

    python -m benchmarks.zoo_serving                    # the default model, 4 fine-tunes, 2 cores: about 20 minutes
    python -m benchmarks.zoo_serving 7b --device cuda   # 12 fine-tunes on one H200
    python -m benchmarks.zoo_serving tiny               # seconds, for the tests
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import plots
from benchmarks.closed_loop import CLOCK, Clients, Slots, run_one_engine, run_provisioned, run_turns
from benchmarks.gpu_serving import write_adapters
from benchmarks.results import FOLDER, rotated, save
from benchmarks.shapes import random_model

SYSTEMS = ("zoo", "sharing", "provisioned", "differences")
MIXES = ("shared", "nothing shared")


@dataclass(frozen=True, kw_only=True)
class Plan:
    shape: str
    device: str = "cpu"
    models: int = 4
    tuned_layers: int = 8
    clients: int = 16
    requests: int = 4
    """Of each client."""
    prompt: int = 64
    new: int = 32
    rank: int = 16
    repetitions: int = 3
    threads: int = 2
    mixes: tuple[str, ...] = MIXES
    """Those that fit: 12 models of 7B that share nothing do not."""
    adapter_bytes: int = 1 << 28
    """Of each engine's pools."""

    @property
    def clients_each(self) -> int:
        """Of one model."""
        return -(-self.clients // self.models)


PLANS = {
    "tiny": Plan(shape="tiny", models=3, tuned_layers=1, clients=6, requests=2, prompt=8, new=4, rank=2, repetitions=1),
    "default": Plan(shape="default"),
    "7b": Plan(
        shape="7b", models=12, clients=96, requests=6, prompt=256, new=128, rank=32, mixes=("shared",), adapter_bytes=4 << 30
    ),
}


def perturbed(base: Any, layers: range | None, seed: int) -> Any:
    """Another model: other weights in these layers, or everywhere. It shares the memory of all others."""
    import torch

    from symbiosis.models.fuse_projections import fuse_projections
    from symbiosis.models.loading import shared_copy

    made = shared_copy(base)
    generator = torch.Generator(base.device).manual_seed(seed)
    new: dict[int, Any] = {}  # ties stay
    roots = [made] if layers is None else [made.get_submodule(f"model.layers.{number}") for number in layers]
    with torch.no_grad():
        for module in (module for root in roots for module in root.modules()):
            for name, old in module._parameters.items():
                if old is not None:
                    if id(old) not in new:
                        noise = torch.empty_like(old).normal_(0, 0.02 * float(old.std().nan_to_num()), generator=generator)
                        new[id(old)] = torch.nn.Parameter(old + noise, requires_grad=False)
                    module._parameters[name] = new[id(old)]
    fuse_projections(made)
    return made


def weight_bytes(models: Sequence[Any]) -> int:
    """Each tensor once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for model in models
        for tensor in model.parameters()
    }
    return sum(storages.values())


def num_pages(plan: Plan, clients: int) -> int:
    """Blocks of a KV cache for so many clients."""
    return (clients + 2) * (-(-(plan.prompt + plan.new + 1) // 16) + 1)


def engine(model: Any, plan: Plan, clients: int, **more: Any) -> Any:
    from symbiosis.serving.engine_core import EngineCore
    from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig

    sizes = AdapterCacheConfig(device_bytes=plan.adapter_bytes, host_bytes=plan.adapter_bytes)
    return EngineCore(model, pages=num_pages(plan, clients), residency=sizes, max_running=clients, **more)


class Bench:
    """The models of one mix."""

    def __init__(self, plan: Plan, mix: str, folder: Path) -> None:
        import torch

        from symbiosis.models.fuse_projections import fuse_projections
        from symbiosis.models.loading import load_model_and_tokenizer

        self.plan, self.folder = plan, folder
        if plan.shape == "default":
            base, _ = load_model_and_tokenizer(None, device=torch.device(plan.device), dtype=torch.float32)
        else:
            base = random_model(plan.shape, plan.device)
        base.requires_grad_(False)
        fuse_projections(base)
        self.base = base
        layers = base.config.num_hidden_layers
        tuned = range(layers - plan.tuned_layers, layers) if mix == "shared" else None
        self.models = [perturbed(base, tuned, seed) for seed in range(plan.models)]
        self.bytes, self.model_bytes = weight_bytes(self.models), weight_bytes([base])
        self.vocabulary = base.config.vocab_size

    def copies(self) -> list[Any]:
        from symbiosis.models.loading import shared_copy

        return [shared_copy(model) for model in self.models]

    @contextmanager
    def system(self, name: str) -> Iterator[Callable[[Clients], dict[str, Any]]]:
        """Runs a load."""
        plan = self.plan
        if name == "zoo":
            from symbiosis.serving.chains.chain import Chain

            chains = {f"m{number}": Chain(f"{number:064d}", model) for number, model in enumerate(self.copies())}
            core = engine(chains["m0"].model, plan, plan.clients, chains=chains)
            yield lambda clients: run_one_engine(core, clients, lambda client: {"model": f"m{client.model}"}) or {}
        elif name == "sharing":
            small = replace(plan, adapter_bytes=1 << 20)
            cores = [engine(model, small, plan.clients_each) for model in self.copies()]
            yield lambda clients: run_turns(cores, clients) or {}
        elif name == "differences":
            from symbiosis.models.loading import shared_copy

            core = engine(shared_copy(self.base), plan, plan.clients)
            with tempfile.TemporaryDirectory() as place:
                write_adapters(self.base, plan.models, plan.rank, Path(place))
                for number in range(plan.models):
                    core.add_adapter(f"a{number}", Path(place) / f"a{number}")
                yield lambda clients: run_one_engine(core, clients, lambda client: {"adapter": f"a{client.model}"}) or {}
        else:
            load = self.load_on_cpu() if plan.device == "cpu" else self.load_on_gpu()
            slots = Slots(self.num_slots(), load)
            yield lambda clients: run_provisioned(slots, clients) or {"slots": len(slots.loaded), "load_s": list(slots.load_s)}

    def num_slots(self) -> int:
        """Models that fit."""
        if self.plan.device == "cpu":
            return max(1, min(self.plan.models, self.bytes // self.model_bytes))
        import torch

        free, _ = torch.cuda.mem_get_info()
        config = self.base.config
        width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        cache = num_pages(self.plan, self.plan.clients_each) * 16 * 4 * config.num_hidden_layers * width
        each = self.model_bytes + cache + (1 << 30)  # and graphs
        return max(1, min(self.plan.models, (free + self.model_bytes) // each))

    def load_on_cpu(self) -> Callable[[int, int], Any]:
        """From checkpoints, as an engine of each model would start."""
        import torch

        from symbiosis.models.fuse_projections import fuse_projections
        from symbiosis.models.loading import load_model_and_tokenizer

        folders = []
        for number, model in enumerate(self.models):
            folders.append(self.folder / f"m{number}")
            if not folders[-1].is_dir():
                model.save_pretrained(folders[-1])

        def load(model: int, slot: int) -> Any:
            gc.collect()
            loaded, _ = load_model_and_tokenizer(folders[model], device=torch.device("cpu"), dtype=torch.float32)
            fuse_projections(loaded)
            return engine(loaded, replace(self.plan, adapter_bytes=1 << 20), self.plan.clients_each)

        return load

    def load_on_gpu(self) -> Callable[[int, int], Any]:
        """One copy of weights in pinned memory stands for all models: a load copies as many bytes."""
        import torch

        from symbiosis.models.loading import shared_copy

        self.models.clear()
        gc.collect()
        torch.cuda.empty_cache()
        pinned = [tensor.detach().cpu().pin_memory() for tensor in self.base.parameters()]
        slots: dict[int, tuple[Any, Any]] = {}

        def load(model: int, slot: int) -> Any:
            if slot not in slots:
                made = perturbed(self.base, None, slot) if slot else shared_copy(self.base)
                small = replace(self.plan, adapter_bytes=1 << 20)
                slots[slot] = made, engine(made, small, self.plan.clients_each)
            made, core = slots[slot]
            for target, source in zip(made.parameters(), pinned, strict=True):
                target.data.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            core.scheduler.block_manager.reset_cache()
            return core

        return load


def measure(
    bench: Bench, run: Callable[[Clients], dict[str, Any]], *, repetition: int | None
) -> tuple[dict[str, Any], Clients]:
    plan = bench.plan
    clients = Clients(
        count=plan.clients,
        models=plan.models,
        requests=1 if repetition is None else plan.requests,
        prompt=plan.prompt,
        new=plan.new,
        vocabulary=bench.vocabulary,
        seed=0 if repetition is None else 1 + repetition,  # no prompt is in a prefix cache
    )
    started, stopped_s = CLOCK.now(), CLOCK.stopped_s
    more = run(clients)
    seconds = CLOCK.now() - started
    latencies = sorted(latency for client in clients.all for latency in client.latencies)
    figures = {
        "tokens_per_s": clients.tokens / seconds,
        "p50_s": statistics.median(latencies),
        "p95_s": latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))],
        "stopped_s": CLOCK.stopped_s - stopped_s,
        **more,
    }
    return figures, clients


def run(plan: Plan, mixes: Sequence[str], systems: Sequence[str], folder: Path = FOLDER) -> dict[str, Any]:
    import torch

    CLOCK.start()
    if plan.device == "cpu":
        torch.set_num_threads(plan.threads)
    name, console = f"zoo-serving-{plan.shape}", Console(width=160)
    path = folder / f"{name}.json"
    figures: dict[str, Any] = {"script": "zoo_serving", "shape": plan.shape, "plan": asdict(plan), "runs": {}, "bytes": {}}
    if path.is_file() and is_same((found := json.loads(path.read_text()))["plan"], figures["plan"]):
        figures |= {key: found[key] for key in ("runs", "bytes", "equal_answers") if key in found}
    for mix in mixes:
        runs = figures["runs"].setdefault(mix, {})
        todo = [each for each in systems if len(runs.get(each, ())) < plan.repetitions]
        if not todo:
            continue
        with tempfile.TemporaryDirectory() as place:
            bench = Bench(plan, mix, Path(place))
            figures["bytes"][mix] = {"zoo": bench.bytes, "copies": plan.models * bench.model_bytes, "model": bench.model_bytes}
            said: dict[str, list[Any]] = {}
            # on a CPU all systems take turns; on a GPU they do not fit next to each other
            for together in [todo] if plan.device == "cpu" else [[system] for system in todo]:
                with ExitStack() as stack:
                    loads = {system: stack.enter_context(bench.system(system)) for system in together}
                    for load in loads.values():
                        measure(bench, load, repetition=None)
                    for repetition in range(plan.repetitions):
                        for system in rotated(together, repetition):
                            if len(runs.setdefault(system, [])) > repetition:
                                continue
                            figure, clients = measure(bench, loads[system], repetition=repetition)
                            runs[system].append(figure)
                            said[system] = [client.outputs for client in clients.all]
                            console.print(f"{mix} {system}: {figure}")
                            if plan.device == "cpu" and {"zoo", "sharing"} <= said.keys():
                                figures.setdefault("equal_answers", {})[mix] = count_equal(said["zoo"], said["sharing"])
                            save(name, str(__doc__).splitlines()[0], summarize(figures), folder)
                    loads.clear()
                gc.collect()
            del bench
            gc.collect()
    save(name, str(__doc__).splitlines()[0], summarize(figures), folder)
    show(console, figures)
    plots.draw(path)
    return figures


def count_equal(said: Sequence[Any], other: Sequence[Any]) -> list[int]:
    """Equal answers, and all."""
    pairs = [pair for each in zip(said, other, strict=True) for pair in zip(*each, strict=True)]
    return [sum(one == two for one, two in pairs), len(pairs)]


def is_same(plan: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether their runs can be compared: the number of repetitions does not matter."""
    compared = [{**json.loads(json.dumps(each)), "repetitions": 0} for each in (plan, other)]
    return compared[0] == compared[1]


def summarize(figures: dict[str, Any]) -> dict[str, Any]:
    """With medians, and their ratios to `zoo`'s."""
    medians: dict[str, Any] = {}
    for mix, runs in figures["runs"].items():
        medians[mix] = {
            system: {key: statistics.median(each[key] for each in found) for key in ("tokens_per_s", "p50_s", "p95_s")}
            for system, found in runs.items()
            if found
        }
    figures["medians"] = medians
    figures["zoo_against"] = {
        mix: {
            system: {key: found["zoo"][key] / each[key] for key in ("tokens_per_s", "p95_s")}
            for system, each in found.items()
            if "zoo" in found and system != "zoo"
        }
        for mix, found in medians.items()
    }
    return figures


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['shape']}, {figures['plan']['models']} fine-tunes, {figures['plan']['clients']} clients")
    for header in ("mix", "system", "tokens/s", "median s", "p95 s", "zoo is faster by"):
        table.add_column(header, justify="left" if header in ("mix", "system") else "right")
    for mix, found in figures["medians"].items():
        for system, each in found.items():
            ratio = figures["zoo_against"][mix].get(system, {}).get("tokens_per_s")
            cells = (f"{each['tokens_per_s']:.1f}", f"{each['p50_s']:.2f}", f"{each['p95_s']:.2f}")
            table.add_row(mix, system, *cells, "" if ratio is None else f"{ratio:.2f} ×")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=list(PLANS), default="default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mixes", nargs="+", choices=MIXES)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON")
    chosen = parser.parse_args(arguments)
    plan = asdict(PLANS[chosen.shape]) | {"device": chosen.device}
    if chosen.repetitions is not None:
        plan["repetitions"] = chosen.repetitions
    run(Plan(**plan), chosen.mixes or PLANS[chosen.shape].mixes, chosen.systems, chosen.out)


if __name__ == "__main__":
    main()
