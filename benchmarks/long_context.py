"""How long does a token of a long context take with its KV cache on the GPU, offloaded by transformers, and on the host?

One tenant on the executor's GPU, in direct mode (random weights of a Llama-2-7B shape, bf16). For each context it decodes
with the cache on the GPU, with transformers' offloaded cache (compute on the GPU, the paper's baseline in Figure 19), and
with `kv="host"` in bf16 and int8. All cases decode the same forced tokens, so their logits are compared in the same run.
Reported: seconds per token (median, without the first two), seconds of the prefill, GPU memory, difference of the logits.
Then requests of 1K context (the paper's Figure 20): how many fit, and tokens per second.

    python -m benchmarks.long_context 7b_long          # about 6 minutes on one H200 with 16 cores and 128 GiB
    python -m benchmarks.long_context tiny --cpu       # seconds, for the tests
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import save
from benchmarks.served import Served
from benchmarks.shapes import SHAPES

QUESTION = str(__doc__).splitlines()[0]
CASES: dict[str, dict[str, Any]] = {
    "device": {"kv": "device"},
    "offloaded": {"kv": "device", "cache_implementation": "offloaded"},
    "host": {"kv": "host"},
    "host int8": {"kv": "host", "kv_dtype": "int8"},
}
WARM_TOKENS = 2
MIN_CHUNK_TOKENS = 512  # of each sequence: every chunk reads the cache again


@dataclass(frozen=True, kw_only=True)
class Plan:
    contexts: Sequence[int]
    new: int
    """Tokens that are timed, and `WARM_TOKENS` before them."""
    request_tokens: int
    requests: Sequence[int]
    chunk: int
    most_offloaded: int
    """Longest context of the offloaded cache: torch's page-locked allocator rounds its layers up to powers of two."""


PLANS = {
    "tiny": Plan(contexts=(64, 128), new=3, request_tokens=32, requests=(2, 4), chunk=32, most_offloaded=128),
    "7b_long": Plan(
        contexts=(8192, 16384, 32768, 65536, 131072),
        new=8,
        request_tokens=1024,
        requests=(8, 24, 64),
        chunk=2048,
        most_offloaded=65536,
    ),
}


class Clock:
    """A stopping criterion that never stops: the time after each token."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, [time.perf_counter()]

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Forced:
    """A logits processor that chooses the same tokens in every case."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        import torch

        token = (17 * (input_ids.shape[1] - self.prompt_tokens) + 5) % scores.shape[-1]
        forced = torch.full_like(scores, float("-inf"))
        forced[:, token] = 0
        return forced


def release(device: str) -> None:
    """Free memory of the last case, page-locked memory included."""
    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()


def run_case(model: Any, case: str, sequences: int, context: int, plan: Plan, device: str) -> dict[str, Any]:
    """Prefill and decode so that the context is full at the end."""
    import torch

    from symbiosis.errors import SymbiosisError

    release(device)
    count = WARM_TOKENS + plan.new
    generator = torch.Generator().manual_seed(context)
    prompt = torch.randint(0, model.config.vocab_size, (sequences, context - count), generator=generator).to(device)
    clock, more = Clock(device), dict(CASES[case])
    if more["kv"] == "host":
        more["kv_chunk_tokens"] = min(plan.chunk, max(plan.chunk // sequences, MIN_CHUNK_TOKENS))
    held = torch.cuda.memory_allocated() if device != "cpu" else 0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    try:
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
            logits_processor=[Forced(prompt.shape[1])],
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
    except (torch.OutOfMemoryError, SymbiosisError) as error:
        return {"case": case, "sequences": sequences, "context": context, "failed": f"{type(error).__name__}: {error}"[:200]}
    steps = [late - early for early, late in zip(clock.times[1:], clock.times[2:], strict=False)]
    token_s = statistics.median(steps[WARM_TOKENS - 1 :])
    result = {
        "case": case,
        "sequences": sequences,
        "context": context,
        "prefill_s": clock.times[1] - clock.times[0],
        "token_s": token_s,
        "steps_s": steps,
        "tokens_per_s": sequences / token_s,
        "gpu_bytes": torch.cuda.max_memory_allocated() - held if device != "cpu" else 0,
        "logits": torch.stack([each.float().cpu() for each in found.logits]),
    }
    del found
    return result


def compare_logits(results: list[dict[str, Any]]) -> None:
    """Replace the logits of each case by their distance from those of the first one, in standard deviations."""
    reference = None
    for result in results:
        logits = result.pop("logits", None)
        if logits is None:
            continue
        if reference is None:
            reference = logits
            continue
        result["logits_error"] = float((logits - reference).abs().max() / reference.std())


def cache_bytes(model: Any, tokens: int) -> int:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(tokens * config.num_hidden_layers * 2 * heads * (config.hidden_size // config.num_attention_heads) * 2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(str(__doc__), shapes=list(PLANS), shape="7b_long")
    parser.add_argument("--budget-s", type=float, default=420.0, help="start no further case after this time")
    parser.add_argument("--contexts", type=int, nargs="+")
    chosen = parser.parse_args(arguments)
    import torch

    import symbiosis
    from symbiosis.common.available_memory import available_memory

    plan, device, started = PLANS[chosen.shape], chosen.device, time.perf_counter()
    console, results, skipped = Console(width=160), [], []
    with Served(chosen.shape, device) as served:
        model = symbiosis.connect(served.address, device=device)
        run_case(model, "host", 1, plan.contexts[0], plan, device)  # allocators, kernels, call groups
        work = [(1, context, list(CASES)) for context in chosen.contexts or plan.contexts]
        work += [(count, plan.request_tokens, ["device", "host", "host int8"]) for count in plan.requests]
        for sequences, context, cases in work:
            group = []
            for case in cases:
                needed = cache_bytes(model, sequences * context)
                is_offloaded = case == "offloaded" and (device == "cpu" or context > plan.most_offloaded)
                is_late = time.perf_counter() - started > chosen.budget_s
                if is_offloaded or is_late or (case != "device" and needed > 0.8 * available_memory()):
                    skipped.append([case, sequences, context])
                    continue
                with console.status(f"{case}, {sequences} x {context}"):
                    group.append(run_case(model, case, sequences, context, plan, device))
                shown = {name: value for name, value in group[-1].items() if name not in ("logits", "steps_s")}
                console.print(shown)
            compare_logits(group)
            results += group
        free = torch.cuda.mem_get_info()[0] if device != "cpu" else available_memory()
        fits = {
            "device": free // cache_bytes(model, plan.request_tokens),
            "host": available_memory() // cache_bytes(model, plan.request_tokens),
        }
        model.symbiosis.close()
    figures = {
        "script": "long_context",
        "shape": chosen.shape,
        "config": SHAPES[chosen.shape].config,
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - started,
        "requests_that_fit": fits,
        "skipped": skipped,
        "results": results,
    }
    worst, rounding = (
        max((result.get("logits_error", 0.0) for result in results if result["case"] == case), default=0.0)
        for case in ("host", "offloaded")
    )
    limit = max(0.25, rounding)
    console.print(f"largest error of logits: {worst:.3g} standard deviations, transformers' offloaded cache {rounding:.3g}")
    console.print(save(f"long-context-{chosen.shape}", QUESTION, figures, chosen.out))
    if worst > limit:
        raise SystemExit(f"logits differ by {worst:.3g} standard deviations: expected at most {limit:.3g}")


if __name__ == "__main__":
    main()
