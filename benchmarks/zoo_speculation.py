"""What does speculation gain where one block of a model is on another host?

A tenant has the whole model but one block, which an executor on another host computes. The hosts are network namespaces. The
link between them has 10 Gbit/s and a round trip of 5 or 20 ms. Compared in turns, in one process and over the same link:
plain generation, exact speculation with a surrogate of the block, the paper's cosine rule (approximate), and transformers'
assisted generation with the surrogate chain. Each process has one thread of torch.

Cases: an FFN (one round trip for a token) and a whole layer (two) of the default model, whose local part takes tens of
milliseconds for a token on a CPU; and of a small model with random weights, whose local part takes about as long as the link,
as that of a large model on a GPU does.

    python -m benchmarks.zoo_surrogates     # first: makes the surrogates of the default model
    python -m benchmarks.zoo_speculation    # about 6 minutes on 2 cores, as root
    python -m benchmarks.zoo_speculation --tiny
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import TOKEN, Child
from benchmarks.plots import pyplot
from benchmarks.results import FOLDER, rotated, save
from benchmarks.zoo_surrogates import MODEL, ZOO
from tests.network.emulated_link import Conditions, EmulatedLink, Host

QUESTION = str(__doc__).splitlines()[0]
DEFAULT, SMALL = "default model", "small model"
MODES = ("plain", "exact", "cosine", "assisted")
PAPER = {"speculations": 231, "accepted": 192, "p95 without": 1.316, "median without": 1.113, "min cosine": 0.95}
"""Section 7.3 of BlockLLM."""
SMALL_SHAPE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 2048, "initializer_range": 0.08,
}  # fmt: skip
PROMPTS = (
    "The module provides a class that reads records from a file and",
    "Licensed under the terms below, you may not use this file except",
    "What does the red light on my kettle mean? The red light means that",
    "To install the package, create a virtual environment and then",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    cases: tuple[tuple[str, str], ...] = ((DEFAULT, "ffn 12"), (DEFAULT, "layer 12"), (SMALL, "ffn 4"), (SMALL, "layer 4"))
    round_trips_ms: tuple[float, ...] = (5.0, 20.0)
    gbit_per_s: float = 10.0
    new_tokens: int = 32
    prompts: int = 2
    """At the first round trip; one less at each of the others."""
    threads: int = 1
    window: int = 3
    tiny: bool = False


def make_model(name: str, plan: Plan) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if name == DEFAULT:
        from symbiosis.models.loading import load_model_and_tokenizer

        return load_model_and_tokenizer(None, device=torch.device("cpu"), dtype=None)[0].eval()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL_SHAPE)).eval()  # type: ignore[arg-type]


def serve(host: Host, name: str, plan: Plan, pipe: Any) -> None:
    host.enter()
    import torch

    import symbiosis

    torch.set_num_threads(plan.threads)
    with symbiosis.Executor(make_model(name, plan), tokens={"tenant": TOKEN}) as executor:
        pipe.send(executor.listen(f"tcp://{host.ip}:0"))
        while pipe.recv() is not None:
            pass


class Tenant:
    """One model, of which one block is on the other host."""

    def __init__(self, name: str, address: str, plan: Plan, zoo: Path) -> None:
        import torch

        torch.set_num_threads(plan.threads)
        self.plan, self.name, self.address, self.zoo = plan, name, address, zoo
        self.model = make_model(name, plan).requires_grad_(False)
        if name == DEFAULT:
            from symbiosis.models.loading import load_model_and_tokenizer

            tokenizer = load_model_and_tokenizer(None, device=torch.device("cpu"), dtype=None)[1]
            self.prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS]
        else:
            self.prompts = [torch.randint(0, SMALL_SHAPE["vocab_size"], (1, 12)) for _ in PROMPTS]  # type: ignore[call-overload]

    def connect(self, block: str) -> None:
        """The block is remote from now on. The surrogate is that of the zoo, or made here."""
        import torch

        import symbiosis
        from symbiosis.zoo.surrogates.block_modules import Piece
        from symbiosis.zoo.surrogates.distillation import Training
        from symbiosis.zoo.surrogates.speculation import Speculation
        from symbiosis.zoo.surrogates.surrogate import load_surrogate, make_surrogates, surrogate_chain
        from symbiosis.zoo.zoo import Zoo

        piece = Piece.parse(block)
        if self.name == DEFAULT:
            surrogate = load_surrogate(Zoo(self.zoo), MODEL, piece)
        else:
            ids = torch.randint(0, SMALL_SHAPE["vocab_size"], (24, 64))  # type: ignore[call-overload]
            training = Training(seconds=15.0, epochs=2 if self.plan.tiny else 200)
            surrogate = make_surrogates(self.model, [piece], ids[:16], ids[16:], training=training)[piece].module
        self.connected = symbiosis.connect_blocks(self.model, [block], self.address, token=TOKEN)
        self.speculations = {
            mode: Speculation(piece, surrogate, mode=mode, window=self.plan.window) for mode in ("exact", "cosine")
        }
        self.assistant = surrogate_chain(self.model, piece, surrogate)
        for mode in MODES:
            self.generate(mode, 0, 6)

    def close(self) -> None:
        self.connected.symbiosis.close()

    def generate(self, mode: str, prompt: int, new_tokens: int, sampled: bool = False) -> dict[str, Any]:
        """`mode`: one of `MODES`, or `local`: without the link."""
        import torch

        options: dict[str, Any] = {}
        if mode in self.speculations:
            options = {"custom_generate": self.speculations[mode]}
        elif mode == "assisted":
            options = {"assistant_model": self.assistant}
        model = self.model if mode == "local" else self.connected
        ids = self.prompts[prompt]
        torch.manual_seed(prompt)
        before, started = self.connected.symbiosis.traffic()["round_trips"], time.perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=sampled,
            pad_token_id=0, **({"temperature": 1.0, "top_k": 0} if sampled else {}), **options,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        trips = self.connected.symbiosis.traffic()["round_trips"] - before
        tokens = found[0, ids.shape[1] :].tolist()
        cell = {"seconds": seconds, "tokens": tokens, "round_trips": trips}
        if mode in self.speculations:
            cell["report"] = asdict(self.speculations[mode].report)
        return cell


def work(host: Host, name: str, address: str, plan: Plan, zoo: Path, pipe: Any) -> None:
    host.enter()
    tenant = Tenant(name, address, plan, zoo)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        method, *arguments = asked
        pipe.send(getattr(tenant, method)(*arguments))


def differing(found: list[int], expected: list[int]) -> int:
    """Tokens that are not those of plain generation, from the first difference on."""
    return sum(1 for a, b in zip(found, expected, strict=True) if a != b)


def run_case(tenant: Child, plan: Plan, conditions: Conditions, prompts: int) -> dict[str, Any]:
    """All modes in turns, the first of them another one for each prompt."""
    seconds: dict[str, list[float]] = {mode: [] for mode in ("local", *MODES)}
    found: dict[str, Any] = {
        "same_tokens": 0,
        "cosine_differing_tokens": 0,
        "tokens": 0,
        "reports": {"exact": [], "cosine": []},
    }
    trips = {mode: 0 for mode in MODES}
    for prompt in range(prompts):
        texts = {}
        for mode in rotated(("local", *MODES), prompt):
            cell = tenant("generate", mode, prompt, plan.new_tokens)
            seconds[mode].append(cell["seconds"])
            texts[mode] = cell["tokens"]
            if mode in trips:
                trips[mode] += cell["round_trips"]
            if mode in found["reports"]:
                found["reports"][mode].append(cell["report"])
        found["tokens"] += plan.new_tokens
        found["same_tokens"] += plan.new_tokens - differing(texts["exact"], texts["plain"])
        found["cosine_differing_tokens"] += differing(texts["cosine"], texts["plain"])
    sampled = [tenant("generate", mode, 0, plan.new_tokens, True)["tokens"] for mode in ("plain", "exact")]
    found["same_sampled_tokens"] = plan.new_tokens - differing(*sampled)
    drafts = {
        mode: [sum(each[key] for each in reports) for key in ("drafts", "accepted")]
        for mode, reports in found["reports"].items()
    }
    return {
        **asdict(conditions), **found, "seconds": seconds,
        "tokens_per_s": {mode: plan.new_tokens / statistics.median(values) for mode, values in seconds.items()},
        "speedup": {
            mode: statistics.median(p / s for p, s in zip(seconds["plain"], seconds[mode], strict=True)) for mode in seconds
        },
        "round_trips_per_token": {mode: count / found["tokens"] for mode, count in trips.items()},
        "accepted": {mode: accepted / max(1, judged) for mode, (judged, accepted) in drafts.items()},
    }  # fmt: skip


def run(plan: Plan, folder: Path = FOLDER, zoo: Path = ZOO) -> dict[str, Any]:
    figures: dict[str, Any] = {"script": "zoo_speculation", "plan": asdict(plan), "paper": PAPER, "runs": []}
    with EmulatedLink(offload=True) as link:
        figures["link"] = link.kind
        here, there = link.hosts
        for name in dict.fromkeys(name for name, _ in plan.cases):
            with Child(serve, there, name, plan) as executor, Child(work, here, name, executor.first, plan, zoo) as tenant:
                for block in [block for each, block in plan.cases if each == name]:
                    link.set(Conditions(gbit_per_s=plan.gbit_per_s))
                    tenant("connect", block)
                    for number, round_trip_ms in enumerate(plan.round_trips_ms):
                        conditions = Conditions(round_trip_ms=round_trip_ms, gbit_per_s=plan.gbit_per_s)
                        link.set(conditions)
                        cell = {
                            "model": name,
                            "block": block,
                            **run_case(tenant, plan, conditions, max(1, plan.prompts - number)),
                        }
                        figures["runs"].append(cell)
                        show(cell)
                        path = save("zoo_speculation", QUESTION, figures, folder)
                    tenant("close")
    draw(figures, path)
    return figures


def show(cell: dict[str, Any]) -> None:
    speeds = ", ".join(f"{mode} {speed:.2f}" for mode, speed in cell["tokens_per_s"].items())
    gains = ", ".join(f"{mode} {cell['speedup'][mode]:.2f}" for mode in MODES[1:])
    print(
        f"{cell['model']}, {cell['block']}, {cell['round_trip_ms']:g} ms: tokens/s {speeds}; against plain: {gains}; "
        f"same tokens {cell['same_tokens']} of {cell['tokens']}, sampled {cell['same_sampled_tokens']}; cosine differs in "
        f"{cell['cosine_differing_tokens']}; accepted {cell['accepted']['exact']:.2f}, {cell['accepted']['cosine']:.2f}",
        flush=True,
    )


def draw(figures: dict[str, Any], path: Path) -> None:
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(7, 4))
    for name, block in dict.fromkeys((each["model"], each["block"]) for each in figures["runs"]):
        cells = [each for each in figures["runs"] if (each["model"], each["block"]) == (name, block)]
        axes.plot(
            [each["round_trip_ms"] for each in cells],
            [each["speedup"]["exact"] for each in cells],
            "o-",
            label=f"{name}, {block}",
        )
    axes.axhline(1.2, color="#9aa0a6", linewidth=1)
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel("tokens/s of exact speculation, plain = 1")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the small model and one round trip, for the tests")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="that of benchmarks.zoo_surrogates")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    small = {"cases": ((SMALL, "layer 4"),), "round_trips_ms": (5.0,), "new_tokens": 8, "prompts": 1, "tiny": True}
    run(Plan(**small) if chosen.tiny else Plan(), chosen.out, chosen.zoo)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
