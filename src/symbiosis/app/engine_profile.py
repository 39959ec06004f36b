"""Profile of the real engine: the time of its steps by decode rows, context and prompt tokens, for the simulator.

Steps are those of `EngineCore` itself: schedule, model, sampling, update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from symbiosis.cluster.step_cost import StepCost
from symbiosis.cluster.step_cost_fit import FittedTerms, MeasuredStep, fit_steps
from symbiosis.errors import DoesNotFit
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePlan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    contexts: tuple[int, ...] = (64, 512, 2048)
    prompts: tuple[int, ...] = (64, 512, 2048, 8192)
    steps: int = 12
    """Decode steps of each batch and context; their median counts."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The measured steps and what was fitted to them."""

    steps: list[MeasuredStep]
    terms: FittedTerms
    cost: StepCost


def profile_engine(
    core: EngineCore, plan: ProfilePlan, *, source: str, progress: Callable[[str], None] = lambda text: None
) -> EngineProfile:
    """Measure an idle engine. Raises `DoesNotFit` if not even the smallest cases fit its KV cache."""
    longest, capacity = core.scheduler.max_model_len, _kv_tokens(core)
    steps: list[MeasuredStep] = []
    _prefill(core, 16)  # first use of kernels
    for prompt in plan.prompts:
        if prompt + 1 <= longest:
            progress(f"a prompt of {prompt} tokens")
            steps += _prefill(core, prompt)
    for context in plan.contexts:
        for batch in plan.batches:
            fits = batch * (context + plan.steps + 17) <= capacity and batch <= core.scheduler.config.max_running
            if fits and context + plan.steps + 2 <= longest:
                progress(f"{batch} rows of {context} tokens")
                steps.append(_decode(core, batch, context, plan.steps))
    if len(steps) < 5:
        raise DoesNotFit("the KV cache is too small to profile the engine: raise its size")
    terms = fit_steps(steps)
    config = core.scheduler.config
    cost = StepCost(
        fixed_s=terms.fixed_s,
        row_s=terms.row_s,
        context_s=terms.context_s,
        prefill_s=terms.prefill_s,
        attention_s=terms.attention_s,
        kv_tokens=capacity,
        max_rows=config.max_rows,
        max_chunk=config.max_chunk,
        max_running=config.max_running,
        source=source,
    )
    return EngineProfile(steps, terms, cost)


def with_start_time(profile: EngineProfile, start_s: float) -> EngineProfile:
    """With the seconds until a new engine serves."""
    return replace(profile, cost=replace(profile.cost, start_s=start_s))


def profile_to_json(profile: EngineProfile) -> dict[str, Any]:
    steps = [
        {"rows": s.rows, "context": s.context, "prefill": s.prefill, "attended": s.attended, "seconds": s.seconds}
        for s in profile.steps
    ]
    return {"step_cost": profile.cost.to_json(), "median_error": profile.terms.median_error, "steps": steps}


def _kv_tokens(core: EngineCore) -> int:
    return core.scheduler.block_manager.num_blocks * core.scheduler.block_manager.block_size


def _prompts(core: EngineCore, count: int, length: int) -> Iterator[list[int]]:
    """Random prompts: no two begin with the same block, so none is in the prefix cache."""
    generator = torch.Generator().manual_seed(torch.seed() % (1 << 31))
    for row in torch.randint(0, core.facts.vocab, (count, length), generator=generator):
        yield row.tolist()


def _timed_step(core: EngineCore) -> float:
    started = time.perf_counter()
    core.step()
    return time.perf_counter() - started


def _prefill(core: EngineCore, length: int) -> Sequence[MeasuredStep]:
    """The chunks of one prompt."""
    (prompt,) = _prompts(core, 1, length)
    sequence = core.add(prompt, Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
    steps = []
    while not core.is_idle():
        before, rows = sequence.num_computed_tokens, core.num_rows
        seconds = _timed_step(core)
        count = core.num_rows - rows
        if count:
            steps.append(MeasuredStep(0, 0, count, count * (before + count / 2), seconds))
    return steps


def _decode(core: EngineCore, batch: int, context: int, count: int) -> MeasuredStep:
    """The median of decode steps of a whole batch."""
    sampling = Sampling(temperature=0.0, max_tokens=count + 2, ignore_eos=True)
    for prompt in _prompts(core, batch, context):
        core.add(prompt, sampling)
    times, held = [], []
    while not core.is_idle():
        sampled, rows = core.num_sampled, core.num_rows
        seconds = _timed_step(core)
        if core.num_rows - rows == core.num_sampled - sampled == batch:
            times.append(seconds)
            held.append(batch * (context + len(times)))
    middle = slice(1, None) if len(times) > 2 else slice(None)
    return MeasuredStep(batch, round(statistics.median(held[middle])), 0, 0.0, statistics.median(times[middle]))
