"""What do host blocks save an engine whose KV cache is smaller than its conversations?

Documents of 32K tokens (random weights of a Llama-2-7B shape, bf16), more than the KV cache holds. First each is asked once,
then each is asked again: its blocks were evicted. Then several sequences decode together until blocks run out, and the
youngest are preempted. Without host blocks both cases compute the tokens again; with them the blocks come back. Reported
for each: seconds of every phase, computed rows, preemptions, blocks moved, and whether the tokens are equal.

    python -m benchmarks.engine_host_blocks 7b_long       # about 4 minutes on one H200
    python -m benchmarks.engine_host_blocks tiny --cpu    # seconds, for the tests
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import save
from benchmarks.shapes import random_model

QUESTION = str(__doc__).splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class Plan:
    documents: int
    document_tokens: int
    question_tokens: int
    answer_tokens: int
    together: int
    """Sequences that decode until blocks run out."""
    long_prompt: int
    long_answer: int
    cache_tokens: int
    host_tokens: int
    max_chunk: int


PLANS = {
    "tiny": Plan(
        documents=4, document_tokens=64, question_tokens=8, answer_tokens=4, together=3, long_prompt=32, long_answer=24,
        cache_tokens=160, host_tokens=640, max_chunk=64,
    ),
    "7b_long": Plan(
        documents=4, document_tokens=32768, question_tokens=64, answer_tokens=16, together=3, long_prompt=24576,
        long_answer=1024, cache_tokens=75776, host_tokens=110592, max_chunk=2048,
    ),
}  # fmt: skip


def timed(core: Any, prompts: Sequence[list[int]], answer_tokens: int, *, at_once: bool) -> tuple[float, list[list[int]]]:
    """Seconds of all requests, one by one or at once, and their tokens."""
    from symbiosis.serving.scheduling.sequence import Sampling

    sampling = Sampling(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
    started, sequences = time.perf_counter(), []
    for prompt in prompts:
        sequences.append(core.add(prompt, sampling))
        while not at_once and not core.is_idle():
            core.step()
    while not core.is_idle():
        core.step()
    return time.perf_counter() - started, [sequence.outputs for sequence in sequences]


def run_engine(model: Any, plan: Plan, host_tokens: int) -> dict[str, Any]:
    from symbiosis.serving.engine_core import EngineCore

    facts = model.config
    heads = getattr(facts, "num_key_value_heads", None) or facts.num_attention_heads
    token_bytes = facts.num_hidden_layers * 2 * heads * (facts.hidden_size // facts.num_attention_heads) * model.dtype.itemsize
    rng = random.Random(0)
    documents = [[rng.randrange(facts.vocab_size) for _ in range(plan.document_tokens)] for _ in range(plan.documents)]
    questions = [[rng.randrange(facts.vocab_size) for _ in range(plan.question_tokens)] for _ in range(plan.documents)]
    prompts = [[rng.randrange(facts.vocab_size) for _ in range(plan.long_prompt)] for _ in range(plan.together)]
    started = time.perf_counter()
    core = EngineCore(
        model, cache_bytes=plan.cache_tokens * token_bytes, host_cache_bytes=host_tokens * token_bytes, max_chunk=plan.max_chunk
    )
    found: dict[str, Any] = {
        "host_tokens": host_tokens,
        "start_s": time.perf_counter() - started,
        "copy_s": core.host_tier.copy_s,
    }
    timed(core, [[1] * plan.question_tokens], 4, at_once=True)  # kernels and CUDA graphs
    tokens: list[list[list[int]]] = []
    phases = {
        "first question": (documents, plan.answer_tokens, False),
        "second question": ([d + q for d, q in zip(documents, questions, strict=True)], plan.answer_tokens, False),
        "preempted": (prompts, plan.long_answer, True),
    }
    for name, (requests, answer, at_once) in phases.items():
        rows, preempted = core.num_rows, core.scheduler.num_preemptions
        seconds, outputs = timed(core, requests, answer, at_once=at_once)
        tokens.append(outputs)
        found[name] = {
            "seconds": seconds,
            "tokens_per_s": sum(map(len, outputs)) / seconds,
            "rows": core.num_rows - rows,
            "preemptions": core.scheduler.num_preemptions - preempted,
        }
    host = core.scheduler.block_manager.host
    found |= {"stored": host.num_stored, "restored": host.num_restored, "is_worthwhile": host.is_worthwhile, "tokens": tokens}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(PLANS), shape="7b_long")
    chosen = parser.parse_args(arguments)
    import torch

    plan, console, runs = PLANS[chosen.shape], Console(width=160), {}
    for name, host_tokens in (("recompute", 0), ("host blocks", plan.host_tokens)):
        model = random_model(chosen.shape, chosen.device)  # an engine owns its model
        with console.status(name):
            runs[name] = run_engine(model, plan, host_tokens)
        del model
        gc.collect()
        if chosen.device != "cpu":
            torch.cuda.empty_cache()
        console.print(name, {key: value for key, value in runs[name].items() if key != "tokens"})
    answers = [[answer for phase in run.pop("tokens") for answer in phase] for run in runs.values()]
    equal = sum(one == other for one, other in zip(*answers, strict=True))
    console.print(f"{equal} of {len(answers[0])} completions are equal")
    figures = {"script": "engine_host_blocks", "shape": chosen.shape, "plan": plan.__dict__, "runs": runs}
    figures |= {"equal": equal, "completions": len(answers[0])}
    console.print(save(f"engine-host-blocks-{chosen.shape}", QUESTION, figures, chosen.out))


if __name__ == "__main__":
    main()
