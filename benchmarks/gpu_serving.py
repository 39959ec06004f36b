"""How fast are many adapters served on a GPU, against the base model alone, transformers and the hardware?

Requests of 128 tokens (random weights at the true shape, bf16, greedy) to one
engine, 32 at a time: without adapters (before the engine knows of any, and
after), and with LoRA adapters (rank 16 on all projections) as popular as in Punica's four patterns: each request its own
("distinct"), a few equally popular ("uniform"), some much more than others
("skewed"), all the same ("identical"). Decoding is timed from the first token
of the last request on; prompts (512 tokens) by themselves. Before that, by the
same model: all its linear layers in one CUDA graph (the floor of a step), and
whole answers by transformers' `generate` (batch 32) and `generate_batch` (64
requests). The cases take turns; ratios are medians of the ratio within one round of turns.

An adapter that lies in host memory is asked for while others decode: how long
until it is on the GPU, and how long the others' longest step is meanwhile. The
first time is left out: a batch of that size is captured as a CUDA graph then.

    python -m benchmarks.gpu_serving 7b          # about 2.5 minutes on one H200
    python -m benchmarks.gpu_serving tiny --cpu  # seconds, for the tests
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import FOLDER, compared, rotated, save
from benchmarks.shapes import SHAPES, random_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REPETITIONS = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    requests: int = 32
    prompt: int = 128
    new: int = 96
    long_prompt: int = 512
    rank: int = 16
    device_bytes: int = 5 << 30
    host_bytes: int = 5 << 30


PLANS = {
    "tiny": Plan(requests=4, prompt=6, new=6, long_prompt=12, rank=4, device_bytes=1 << 26, host_bytes=1 << 26),
    "1b": Plan(),
    "7b": Plan(),
}


def patterns(count: int) -> dict[str, list[str | None]]:
    """Which adapter each request asks for."""
    few = max(1, round(count**0.5))
    skewed: list[str | None] = []
    for rank in range(count):  # a Zipf law of exponent 1.5, as Punica has it
        skewed += [f"a{rank}"] * max(1, round(count * (rank + 1) ** -1.5 / 2.61))
    return {
        "base": [None] * count,
        "distinct": [f"a{n}" for n in range(count)],
        "uniform": [f"a{n % few}" for n in range(count)],
        "skewed": skewed[:count],
        "identical": ["a0"] * count,
    }


def write_adapters(model: Any, count: int, rank: int, folder: Path) -> None:
    """PEFT folders with random weights, written as PEFT writes them."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    config = LoraConfig(r=rank, target_modules=TARGETS, task_type="CAUSAL_LM", base_model_name_or_path="base")
    weights = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in TARGETS:
            name = f"base_model.model.{path}"
            weights[f"{name}.lora_A.weight"] = 0.01 * torch.randn(rank, module.in_features, dtype=torch.bfloat16)
            weights[f"{name}.lora_B.weight"] = 0.01 * torch.randn(module.out_features, rank, dtype=torch.bfloat16)
    first = next(iter(weights))
    for number in range(count):
        target = folder / f"a{number}"
        target.mkdir()
        weights[first] = 0.01 * torch.randn_like(weights[first])  # enough to be another adapter
        save_file(weights, target / "adapter_model.safetensors")
        config.save_pretrained(str(target))


def wait_for(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def floor_s(model: Any, rows: int, device: str) -> float:
    """Seconds of all linear layers, one after the other, in one CUDA graph."""
    import torch

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {layer.in_features: torch.randn(rows, layer.in_features, device=device, dtype=model.dtype) for layer in layers}

    def sweep() -> None:
        for layer in layers:
            torch.nn.functional.linear(inputs[layer.in_features], layer.weight)

    with torch.no_grad():
        sweep()
        wait_for(device)
        replay: Callable[[], Any] = sweep
        if device != "cpu":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                sweep()
            replay = graph.replay
        seconds = []
        for _ in range(10):
            started = time.perf_counter()
            replay()
            wait_for(device)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def prompts_of(vocabulary: int, count: int, length: int) -> list[list[int]]:
    import torch

    return torch.randint(1, vocabulary, (count, length)).tolist()  # type: ignore[no-any-return]


def transformers_rates(model: Any, plan: Plan, device: str, new: int) -> dict[str, float]:
    """Tokens a second of whole answers."""
    import torch
    from transformers import GenerationConfig

    ids = torch.tensor(prompts_of(model.config.vocab_size, plan.requests, plan.prompt), device=device)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    found: dict[str, float] = {}
    with torch.no_grad():
        for warm_up in (True, False):
            started = time.perf_counter()
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
            wait_for(device)
            if not warm_up:
                found["generate"] = plan.requests * new / (time.perf_counter() - started)
        if device != "cpu":
            try:
                many = prompts_of(model.config.vocab_size, 2 * plan.requests, plan.prompt)
                config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
                started = time.perf_counter()
                answers = model.generate_batch(inputs=many, generation_config=config)
                made = sum(len(answer.generated_tokens) for answer in answers.values())
                found["generate_batch"] = made / (time.perf_counter() - started)
            except Exception as error:  # noqa: BLE001 - not every version has it, or has it work with every model
                Console().print(f"generate_batch failed, there is no figure of it: {error!r}")
    return found


class Serving:
    """An engine, asked step by step."""

    def __init__(self, model: Any, plan: Plan, device: str, folder: Path) -> None:
        from symbiosis.models.fuse_projections import fuse_projections
        from symbiosis.serving.engine_core import EngineCore
        from symbiosis.serving.lora.adapter_cache import AdapterCacheConfig
        from symbiosis.serving.scheduling.sequence import Sampling

        fuse_projections(model)
        longest = max(plan.prompt + 2 * plan.new, plan.long_prompt + 1)
        self.plan, self.device, self.vocabulary = plan, device, model.config.vocab_size
        self.core = EngineCore(
            model,
            pages=(plan.requests + 2) * (-(-longest // 16) + 1),
            residency=AdapterCacheConfig(device_bytes=plan.device_bytes, host_bytes=plan.host_bytes),
        )
        self._sampling, self._folder = Sampling, folder

    def learn(self) -> None:
        """The adapters."""
        with ThreadPoolExecutor(8) as pool:
            folders = [self._folder / f"a{number}" for number in range(self.plan.requests)]
            for number, prepared in enumerate(pool.map(self.core.prepare, folders)):
                self.core.put_adapter(f"a{number}", prepared)

    def ask(self, names: Sequence[str | None], prompt: int, new: int) -> list[Any]:
        wish = self._sampling(temperature=0.0, max_tokens=new, ignore_eos=True)
        prompts = prompts_of(self.vocabulary, len(names), prompt)
        return [self.core.add(ids, wish, adapter=name) for ids, name in zip(prompts, names, strict=True)]

    def step(self) -> list[Any]:
        passes = self.core.num_steps
        made = self.core.step()
        if self.core.num_steps == passes and not self.core.is_idle():
            self.core.wait(1.0)
        return made

    def decode(self, names: Sequence[str | None]) -> float:
        """Tokens a second from when all have their first token until the first has ended."""
        requests = self.ask(names, self.plan.prompt, self.plan.new)
        while not all(request.outputs for request in requests):
            self.step()
        started, tokens = time.perf_counter(), 0
        while all(request.reason is None for request in requests):
            tokens += len(self.step())
        seconds = time.perf_counter() - started
        self.finish()
        return tokens / seconds

    def whole(self, count: int) -> float:
        """Tokens a second of whole answers without adapters."""
        started = time.perf_counter()
        self.ask([None] * count, self.plan.prompt, self.plan.new)
        self.finish()
        return count * self.plan.new / (time.perf_counter() - started)

    def prefill(self, names: Sequence[str | None]) -> float:
        """Prompt tokens a second; the adapters are on the GPU before."""
        self.ask(names, 1, 1)
        self.finish()
        started = time.perf_counter()
        self.ask(names, self.plan.long_prompt, 1)
        self.finish()
        return len(names) * self.plan.long_prompt / (time.perf_counter() - started)

    def finish(self) -> None:
        while not self.core.is_idle():
            self.step()
        wait_for(self.device)

    def arrival(self, name: str, names: Sequence[str | None]) -> dict[str, float]:
        """One adapter comes from host memory while others decode."""
        figures = self.core.adapter_stats()
        requests = self.ask(names, self.plan.prompt, self.plan.new)
        while not all(request.outputs for request in requests):
            self.step()
        steps: list[float] = []
        self.core._adapter_cache._evict(self.core.adapters[name])  # to host memory, where it is too
        for number in range(self.plan.new // 2):
            if number == self.plan.new // 8:
                self.ask([name], 1, 1)
            started = time.perf_counter()
            self.step()
            steps.append(time.perf_counter() - started)
        self.finish()
        after = self.core.adapter_stats()
        loads = max(1, after.loads - figures.loads)
        return {
            "load_s": (after.load_s - figures.load_s) / loads,
            "median_step_s": statistics.median(steps),
            "longest_step_s": max(steps),
        }


def run(shape: str, device: str, folder: Path = FOLDER, repetitions: int = REPETITIONS) -> dict[str, Any]:
    console, plan = Console(width=140), PLANS[shape]
    model = random_model(shape, device)
    floor = floor_s(model, plan.requests, device)
    console.print(f"floor {1e3 * floor:.2f} ms a step, {plan.requests / floor:.0f} tok/s")
    plain = transformers_rates(model, plan, device, plan.new)
    console.print({name: f"{rate:.0f} tok/s" for name, rate in plain.items()})
    asked = patterns(plan.requests)
    decoded: dict[str, list[float]] = {name: [] for name in asked}
    prompted: dict[str, list[float]] = {name: [] for name in ("base", "distinct")}
    whole: dict[str, list[float]] = {"32": [], "64": []}
    with tempfile.TemporaryDirectory() as place:
        write_adapters(model, plan.requests, plan.rank, Path(place))
        bare = Serving(model, plan, device, Path(place))
        alone = [bare.decode(asked["base"]) for _ in range(repetitions + 1)][1:]
        bare.learn()
        for repetition in range(repetitions + 1):
            for case in rotated(list(asked), repetition):
                rate = bare.decode(asked[case])
                if repetition:  # the first time is to warm up
                    decoded[case].append(rate)
            for case in rotated(list(prompted), repetition):
                rate = bare.prefill(asked[case])
                if repetition:
                    prompted[case].append(rate)
            for count, rates in whole.items():
                rate = bare.whole(int(count) * plan.requests // 32)
                if repetition:
                    rates.append(rate)
        arrivals = [bare.arrival("a1", asked["base"]) for _ in range(repetitions + 1)][1:]
    decode, prefill = compared(decoded, "base"), compared(prompted, "base")
    base = decode["base"]["median"]
    figures = {
        "script": "gpu_serving",
        "shape": shape,
        "plan": {
            "requests": plan.requests,
            "prompt": plan.prompt,
            "new": plan.new,
            "rank": plan.rank,
            "repetitions": repetitions,
        },
        "floor_s": floor,
        "share_of_floor": base * floor / plan.requests,
        "transformers_tokens_per_s": plain,
        "whole_answers_tokens_per_s": {count: statistics.median(rates) for count, rates in whole.items()},
        "decode_tokens_per_s": decode,
        "decode_before_any_adapter_tokens_per_s": alone,
        "prefill_tokens_per_s": prefill,
        "arrivals": arrivals,
    }
    save(f"gpu-serving-{shape}", str(__doc__).splitlines()[0], figures, folder)
    for name, found in decode.items():
        console.print(f"decode  {name:10s} {found['median']:8.0f} tok/s ({found['ratio']:.3f})")
    for name, found in prefill.items():
        console.print(f"prefill {name:10s} {found['median']:8.0f} tok/s ({found['ratio']:.3f})")
    console.print(f"decode  before any adapter {statistics.median(alone):.0f} tok/s")
    console.print(f"of the floor: {figures['share_of_floor']:.1%}; whole answers {figures['whole_answers_tokens_per_s']}")
    console.print("arrivals (ms):", [{key: round(1e3 * value, 2) for key, value in each.items()} for each in arrivals])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=[shape for shape in PLANS if shape in SHAPES], shape="7b")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    chosen = parser.parse_args(arguments)
    run(chosen.shape, chosen.device, chosen.out, chosen.repetitions)


if __name__ == "__main__":
    main()
