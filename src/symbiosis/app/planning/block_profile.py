"""Profile of the blocks of a zoo: measured in its models, fitted to the cost model of the cluster's policies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from symbiosis.cluster.policies.blocks.block_cost import BlockCost, BlockProfile, ModelCost
from symbiosis.cluster.step_cost_fit import MeasuredStep, fit_steps
from symbiosis.errors import DoesNotFit
from symbiosis.zoo.block_timing import ModelTiming, TimedBatch, TimingPlan, block_sizes, time_blocks
from symbiosis.zoo.errors import UnknownZooModel
from symbiosis.zoo.manifest import ModelManifest
from symbiosis.zoo.partition import BlockKind
from symbiosis.zoo.zoo import Zoo


@dataclass(frozen=True, slots=True)
class ZooProfile:
    """What was fitted, and what it was fitted to."""

    profile: BlockProfile
    timings: dict[str, ModelTiming]
    median_error: float
    """Of the fitted time of a whole batch: median over batches."""


def profile_zoo(
    zoo: Zoo, plan: TimingPlan, *, device: str = "cpu", progress: Callable[[str], None] = lambda text: None
) -> ZooProfile:
    """Measure one model of each shape. Raises `UnknownZooModel` for a zoo without models, `DoesNotFit` if too little can be
    measured."""
    chosen = _one_of_each_shape(zoo)
    if not chosen:
        raise UnknownZooModel("the zoo has no models to measure: add one with `symbiosis zoo add`")
    models, timings, errors, loaded, load_s = {}, {}, list[float](), 0, 0.0
    for manifest in chosen:
        name = manifest.name
        progress(f"{name}: loading")
        started = time.perf_counter()
        model = zoo.load(name).to(device)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        load_s += time.perf_counter() - started
        loaded += sum(each.object.size for each in manifest.chain)

        def tell(text: str, name: str = name) -> None:
            progress(f"{name}: {text}")

        timing = time_blocks(model, plan, tell)
        if len(timing.batches) < 3:
            raise DoesNotFit(f"{name} is too short for a profile: expected a model with more than 64 positions")
        models[name] = _fit(timing, manifest)
        timings[name] = timing
        errors += [abs(_predicted_s(models[name], each) / max(1e-12, _measured_s(timing, each)) - 1) for each in timing.batches]
        del model
    ordered = dict(sorted(models.items(), key=lambda each: each[1].whole.weight_bytes))
    source = f"symbiosis zoo profile: {', '.join(ordered)} on {device}"
    profile = BlockProfile(ordered, load_bytes_s=loaded / load_s, source=source)
    return ZooProfile(profile, timings, statistics.median(errors))


def zoo_profile_to_json(found: ZooProfile) -> dict[str, Any]:
    return {
        "block_profile": found.profile.to_json(),
        "median_error": found.median_error,
        "measured": {name: asdict(timing) for name, timing in found.timings.items()},
    }


def _one_of_each_shape(zoo: Zoo) -> list[ModelManifest]:
    """Fine-tunes of one model take the same time: the first of each chain of sizes."""
    found: dict[tuple[int, ...], ModelManifest] = {}
    for manifest in zoo.manifests():
        found.setdefault(tuple(each.object.size for each in manifest.chain), manifest)
    return list(found.values())


def _fit(timing: ModelTiming, manifest: ModelManifest) -> ModelCost:
    sizes = block_sizes({each.place: each.object.size for each in manifest.chain})

    def cost(kind: BlockKind) -> BlockCost:
        is_attention = kind is BlockKind.ATTENTION
        steps = [
            MeasuredStep(
                each.rows,
                each.context if is_attention else 0,
                each.prefill,
                each.attended if is_attention else 0.0,
                max(1e-9, each.seconds.get(kind, 0.0)),
            )
            for each in timing.batches
        ]
        terms = fit_steps(steps)
        return BlockCost(
            fixed_s=terms.fixed_s,
            row_s=terms.row_s,
            context_s=terms.context_s,
            prefill_s=terms.prefill_s,
            attention_s=terms.attention_s,
            weight_bytes=sizes.get(kind, 0),
            kv_bytes=timing.kv_bytes if is_attention else 0,
            row_bytes=timing.row_bytes,
        )

    kinds = (BlockKind.EMBEDDING, BlockKind.ATTENTION, BlockKind.FFN, BlockKind.HEAD)
    return ModelCost(timing.layers, *(cost(kind) for kind in kinds))


def _measured_s(timing: ModelTiming, batch: TimedBatch) -> float:
    in_layers = (BlockKind.ATTENTION, BlockKind.FFN)
    return sum(seconds * (timing.layers if kind in in_layers else 1) for kind, seconds in batch.seconds.items())


def _predicted_s(model: ModelCost, batch: TimedBatch) -> float:
    return model.whole.batch_s(batch.rows, batch.context, batch.prefill, batch.attended)
