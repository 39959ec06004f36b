"""What does fine-tuning on the same cores cost a chat that is served there?

One process holds the default model: it serves streaming answers over HTTP and
computes the base layers of a tenant that fine-tunes a LoRA in a process of its
own (2 × 128 tokens a step). 1 and 8 answers at a time are streamed to another
process by the openai client, without the tenant and next to it; the tenant
trains without answers too. The cases take turns. A gap is the time between two
tokens of an answer at its client; the ratios are of all gaps of a case (and
round by round, in the JSON). A tenant that is not to train is stopped in mid-step.

    python -m benchmarks.colocation          # about 6 minutes on 2 cores
    python -m benchmarks.colocation --tiny   # seconds, for the tests
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.results import FOLDER, rotated, save
from benchmarks.serving import tiny_model
from benchmarks.tenants import one_thread_each

TRAINING = "training alone"


@dataclass(frozen=True, kw_only=True)
class Plan:
    streams: tuple[int, ...] = (1, 8)
    new: int = 32
    batch: int = 2
    length: int = 128
    training_s: float = 5.0
    repetitions: int = 10
    share: float | None = None
    tiny: bool = False

    @property
    def cases(self) -> dict[str, tuple[int, bool]]:
        """How many answers at a time, and whether the tenant trains."""
        return {TRAINING: (0, True)} | {
            _case(count, trains): (count, trains) for count in self.streams for trains in (False, True)
        }


TINY = Plan(streams=(1, 2), new=6, batch=1, length=8, training_s=1.0, repetitions=1, tiny=True)


def _case(count: int, trains: bool) -> str:
    return f"{count} at a time, {'with training' if trains else 'alone'}"


def train(address: str, plan: Plan, pipe: Any) -> None:
    """The tenant."""
    import torch
    from peft import LoraConfig, get_peft_model

    import symbiosis

    model = get_peft_model(symbiosis.connect(address, name="tenant"), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (plan.batch, plan.length))
    for step in range(1 << 62):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            pipe.send("ready")


def ask(url: str, plan: Plan, pipe: Any) -> None:
    """Whoever reads the answers: told how many at a time, it sends all gaps of each."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    model = client.models.list().data[0].id

    def gaps(number: int) -> list[float]:
        prompt = [(7 * number + i) % 100 + 1 for i in range(16)]
        # with logprobs every token is sent at once, also one that is not whole text yet
        stream = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=plan.new,
            temperature=0,
            logprobs=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        times = [time.perf_counter() for piece in stream if piece.choices[0].logprobs is not None]
        assert len(times) == plan.new, f"{len(times)} tokens came one by one, not {plan.new}"
        return [round(then - before, 5) for before, then in itertools.pairwise(times)]

    with ThreadPoolExecutor(max(plan.streams)) as pool:
        while count := pipe.recv():
            pipe.send([gap for found in pool.map(gaps, range(count)) for gap in found])


def tiny_tokenizer() -> Any:
    """A word for each token of the tiny model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(128)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0")


class Stage:
    """The executor that also serves, and the two client processes."""

    def __init__(self, plan: Plan, executor: Any, asked: Any, tenant: int) -> None:
        self.plan, self.executor, self.asked, self.tenant = plan, executor, asked, tenant

    def measure(self, count: int, trains: bool) -> tuple[list[float], float]:
        """One window of one case: all gaps, and the rows trained a second."""
        os.kill(self.tenant, signal.SIGCONT if trains else signal.SIGSTOP)
        while not trains and self.executor.stats()["queued"]:  # what it asked for last
            time.sleep(0.01)
        before, started = self._rows(), time.monotonic()
        if count:
            self.asked.send(count)
            gaps = self.asked.recv()
        else:
            gaps = []
            time.sleep(self.plan.training_s)
        return gaps, (self._rows() - before) / (time.monotonic() - started)

    def _rows(self) -> int:
        return int(self.executor.stats()["tenants"]["tenant"]["training_rows"])


@contextmanager
def staged(plan: Plan) -> Iterator[Stage]:
    import symbiosis

    context = mp.get_context("spawn")
    settings = {"model_or_path": tiny_model(), "tokenizer": tiny_tokenizer()} if plan.tiny else {}
    with symbiosis.Executor(hosting=True, training_share=plan.share, **settings) as executor, executor.host() as host:
        one_thread_each()
        (trained, theirs), (asked, its) = context.Pipe(), context.Pipe()
        tenant = context.Process(target=train, args=(executor.listen("shm://"), plan, theirs), daemon=True)
        chats = context.Process(target=ask, args=(host.url, plan, its), daemon=True)
        try:
            tenant.start()
            chats.start()
            assert trained.recv() == "ready"
            yield Stage(plan, executor, asked, int(tenant.pid or 0))
        finally:
            tenant.kill()
            chats.kill()


def share_below(gaps: Sequence[float], share: float) -> float:
    """The gap that so many are not longer than."""
    return sorted(gaps)[min(len(gaps) - 1, int(share * len(gaps)))]


def run(plan: Plan, folder: Path = FOLDER) -> dict[str, Any]:
    console = Console(width=140)
    gaps: dict[str, list[list[float]]] = {case: [] for case in plan.cases}
    rates: dict[str, list[float]] = {case: [] for case in plan.cases}
    with staged(plan) as stage:
        for repetition in range(plan.repetitions + 1):
            for case in rotated(list(plan.cases), repetition):
                found, rate = stage.measure(*plan.cases[case])
                if repetition:  # the first time is to warm up
                    gaps[case].append(found)
                    rates[case].append(rate)
    figures: dict[str, Any] = {"training_rows_per_s": {}, "gaps_s": {}, "ratios": {}}
    for case, (count, trains) in plan.cases.items():
        if trains:
            # rows count when their call is answered, a few calls a window: the mean of windows says more than their median
            figures["training_rows_per_s"][case] = statistics.mean(rates[case])
        if count:
            every = [gap for found in gaps[case] for gap in found]
            figures["gaps_s"][case] = {name: share_below(every, q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    for count in plan.streams:
        alone, colocated = _case(count, False), _case(count, True)
        ratios: dict[str, Any] = {
            name: figures["gaps_s"][colocated][name] / figures["gaps_s"][alone][name] for name in ("p50", "p90", "p99")
        }
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            ratios[f"{name} by round"] = [
                share_below(b, q) / share_below(a, q) for a, b in zip(gaps[alone], gaps[colocated], strict=True)
            ]
        figures["ratios"][f"{count} at a time"] = ratios
    _show(console, figures)
    figures["runs"] = {"gaps_s": gaps, "training_rows_per_s": rates}
    name = "colocation" + ("-tiny" if plan.tiny else "" if plan.share is None else f"-{plan.share:g}")
    save(name, str(__doc__).splitlines()[0], {"share": plan.share, **figures}, folder)
    return figures


def _show(console: Console, figures: dict[str, Any]) -> None:
    for case, found in figures["gaps_s"].items():
        console.print(f"{case:30s} gaps", "  ".join(f"{name} {1e3 * gap:6.1f} ms" for name, gap in found.items()))
    for count, ratios in figures["ratios"].items():
        console.print(
            f"{count:30s} with training / alone  " + "  ".join(f"{name} {ratios[name]:.2f}" for name in ("p50", "p90", "p99")),
            " medians of rounds " + "  ".join(f"{n} {statistics.median(ratios[f'{n} by round']):.2f}" for n in ("p50", "p99")),
        )
    whole = figures["training_rows_per_s"][TRAINING]
    for case, rate in figures["training_rows_per_s"].items():
        console.print(f"{case:30s} trained rows/s {rate:8.0f} ({rate / whole if whole else 0:.2f})")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--share", type=float, default=None, help="the executor's training_share")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    base = TINY if chosen.tiny else Plan()
    run(replace(base, repetitions=chosen.repetitions or base.repetitions, share=chosen.share), chosen.out)


if __name__ == "__main__":
    main()
