"""How fast are many adapters served on a CPU, against transformers + PEFT?

32 requests over 8 LoRA adapters (rank 16 on all projections; prompts of 32
tokens, 64 new ones, greedy: answers are longer than questions, as in chats) on
the embedded default model: by our engine in shared passes; by PEFT, one adapter
after the other with its four requests as a batch; and by PEFT's mixed batches
(`adapter_names`). The same requests without adapters by our engine and by
`generate()` as one batch. All take turns; tokens per second are those of whole
answers, prompts included.

    python -m benchmarks.serving           # about 15 minutes on 2 cores
    python -m benchmarks.serving --tiny    # seconds, for the tests
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, save

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).eval()


def default_model() -> Any:
    import torch

    from symbiosis.models.loading import load

    return load(None, device=torch.device("cpu"), dtype=torch.float32, tokenizer=None).model.eval()


def with_adapters(base: Any, count: int, rank: int, folder: Path) -> Any:
    """A PEFT model with `count` adapters, saved one folder each."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(base, config, adapter_name="a0")
    for number in range(1, count):
        model.add_adapter(f"a{number}", config)
    model.save_pretrained(folder)
    return model.eval()


class Ways:
    """The same requests, answered in different ways; each returns the tokens it made."""

    def __init__(self, base: Any, folder: Path, *, requests: int, adapters: int, prompt: int, new: int, rank: int) -> None:
        import torch

        from symbiosis.serving.engine import Engine
        from symbiosis.serving.scheduling.sequence import Sampling

        self.new, self.names = new, [f"a{i * adapters // requests}" for i in range(requests)]
        self.peft = with_adapters(copy.deepcopy(base), adapters, rank, folder)
        self.plain = copy.deepcopy(base)
        self.engine = Engine(base, pages=requests * (-(-(prompt + new) // 16) + 1), page_size=16)
        for name in dict.fromkeys(self.names):
            self.engine.add_adapter(name, folder / name)
        self._shape, self._vocabulary, self._random = (
            (requests, prompt),
            base.config.vocab_size,
            torch.Generator().manual_seed(2),
        )
        self.wish = Sampling(temperature=0.0, max_tokens=new, ignore_eos=True)

    def begin(self) -> None:
        """Other prompts: the engine would remember the old ones."""
        import torch

        self.prompts = torch.randint(1, self._vocabulary, self._shape, generator=self._random)

    def _generate(self, model: Any, ids: Any, **more: Any) -> list[list[int]]:
        import torch

        settings = {"max_new_tokens": self.new, "min_new_tokens": self.new, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **more)
        return [row[ids.shape[1] :].tolist() for row in found]

    def ours(self) -> list[list[int]]:
        return [answer.tokens for answer in self.engine.generate(self.prompts.tolist(), self.names, self.wish)]

    def ours_base(self) -> list[list[int]]:
        return [answer.tokens for answer in self.engine.generate(self.prompts.tolist(), None, self.wish)]

    def generate_base(self) -> list[list[int]]:
        return self._generate(self.plain, self.prompts)

    def adapter_by_adapter(self) -> list[list[int]]:
        answers: list[list[int]] = []
        for name in dict.fromkeys(self.names):
            self.peft.set_adapter(name)
            answers += self._generate(self.peft, self.prompts[[i for i, n in enumerate(self.names) if n == name]])
        return answers

    def mixed_batches(self) -> list[list[int]]:
        return self._generate(self.peft, self.prompts, adapter_names=self.names)


def run(*, tiny: bool, repetitions: int, folder: Path = FOLDER) -> dict[str, Any]:
    console = Console(width=140)
    plan = {"requests": 8, "adapters": 4, "prompt": 5, "new": 4, "rank": 4}
    if not tiny:
        plan = {"requests": 32, "adapters": 8, "prompt": 32, "new": 64, "rank": 16}
    with tempfile.TemporaryDirectory() as place:
        ways = Ways(tiny_model() if tiny else default_model(), Path(place), **plan)
        named: dict[str, Callable[[], list[list[int]]]] = {
            "engine, adapters": ways.ours,
            "PEFT, adapter by adapter": ways.adapter_by_adapter,
            "PEFT, mixed batches": ways.mixed_batches,
            "engine, no adapter": ways.ours_base,
            "generate, no adapter": ways.generate_base,
        }
        rates: dict[str, list[float]] = {name: [] for name in named}
        answers: dict[str, list[list[int]]] = {}
        for repetition in range(repetitions + 1):
            ways.begin()
            for name, way in named.items():
                started = time.perf_counter()
                answers[name] = way()
                seconds = time.perf_counter() - started
                if repetition:  # the first time is to warm up
                    rates[name].append(plan["requests"] * plan["new"] / seconds)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    same = {
        name: sum(a == b for a, b in zip(answers["engine, adapters"], answers[name], strict=True)) for name in list(named)[1:3]
    }
    for name, rate in medians.items():
        console.print(f"{name:26s} {rate:8.1f} tok/s")
    console.print(f"answers equal to the engine's, of {plan['requests']}: {same}")
    figures = {"plan": plan, "tokens_per_s": medians, "runs": rates, "equal_answers": same}
    save("serving-tiny" if tiny else "serving", str(__doc__).splitlines()[0], figures, folder)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    run(tiny=chosen.tiny, repetitions=chosen.repetitions, folder=chosen.out)


if __name__ == "__main__":
    main()
