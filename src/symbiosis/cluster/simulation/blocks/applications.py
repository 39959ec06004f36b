"""A zoo of applications as BlockLLM's, and how each system cuts it into blocks.

Each foundation model in turn has fine-tunes of five kinds: LoRA, adapter, full, prefix, BitFit. A full fine-tune shares the
middle half of its foundation's layers, or all but the last quarter: what was found on real weights keeps 96 % of the gain, or
is exact (docs/zoo.md). The paper names foundations and kinds, but neither how many of each nor what they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from symbiosis.cluster.policies.blocks.block_cost import BlockCost, BlockProfile, ModelCost
from symbiosis.cluster.policies.blocks.catalog import Application, BlockCatalog, MeasuredChain

FULL = "full"
KINDS = ("lora", "adapter", FULL, "prefix", "bitfit")
_LOSS_GAP = 0.347
"""Loss of the smaller model above that of the larger, both measured (docs/zoo.md)."""
_LOSS_STITCHED = 0.205
"""Of the chain that begins with the first quarter of the smaller one."""


class BlockSystem(StrEnum):
    """What is provisioned as one unit, and what runs in one batch."""

    BLOCKS = "blocks"
    PER_MODEL = "per-model"
    """BlockLLM's first baseline: each model by itself."""
    PARAMETER_SHARING = "parameter-sharing"
    """Its second: one copy of a foundation, a batch for each of its applications."""
    MULTI_ADAPTER = "multi-adapter"
    """One copy of a foundation, one batch for all its applications; full fine-tunes by themselves."""


@dataclass(frozen=True, slots=True)
class ZooApplication:
    """One fine-tune."""

    name: str
    foundation: str
    kind: str
    weight: float
    shared: tuple[float, float] = (0.0, 1.0)
    """Part of its depth that it has in common with the foundation."""


def make_applications(count: int, profile: BlockProfile, seed: int) -> list[ZooApplication]:
    """The zoo. Popularity is uniform between almost nothing and twice the mean, as in the paper."""
    generator = np.random.default_rng(seed)
    foundations, made = list(profile.models), []
    for number in range(count):
        foundation, turn = foundations[number % len(foundations)], number // len(foundations)
        kind = KINDS[turn % len(KINDS)]
        shared = (0.0, 1.0) if kind != FULL else ((0.25, 0.75), (0.0, 0.75))[turn // len(KINDS) % 2]
        weight = float(generator.uniform(0.05, 2.0))
        made.append(ZooApplication(f"{foundation}-{kind}-{number}", foundation, kind, weight, shared))
    return made


def make_catalog(
    system: BlockSystem, applications: list[ZooApplication], profile: BlockProfile, *, max_loss: float = 0.0
) -> BlockCatalog:
    """The blocks of a system. `max_loss`: what each tenant allows an equivalent chain to lose; only blocks have such chains."""
    blocks: dict[str, BlockCost] = {}
    weights: dict[str, str] = {}
    made = []
    for each in applications:
        model = profile.models[each.foundation]
        if system is BlockSystem.BLOCKS:
            names = list(_segments(each, applications, model))
            blocks.update({name: cost for name, cost in names})
            chains = [MeasuredChain(tuple(name for name, _ in names))]
            chains += _equivalent_chains(each, applications, profile, blocks) if max_loss > 0 else []
        else:
            is_own = each.kind == FULL or system is not BlockSystem.MULTI_ADAPTER
            name = each.name if is_own else each.foundation
            blocks[name] = model.whole
            if each.kind != FULL and system is BlockSystem.PARAMETER_SHARING:
                weights[name] = each.foundation
            chains = [MeasuredChain((name,))]
        has_adapter = each.kind != FULL and system in (BlockSystem.BLOCKS, BlockSystem.MULTI_ADAPTER)
        made.append(Application(each.name, tuple(chains), each.weight, max_loss, has_adapter))
    return BlockCatalog(blocks, made, adapter_share=profile.adapter_share, weights=weights)


def _cuts(foundation: str, applications: list[ZooApplication], model: ModelCost) -> list[int]:
    """Lazy partition: a model is cut only where some full fine-tune begins or ends to share it."""
    found = {0, model.layers}
    for each in applications:
        if each.foundation == foundation:
            found |= {round(part * model.layers) for part in each.shared}
    return sorted(found)


def _segments(each: ZooApplication, applications: list[ZooApplication], model: ModelCost) -> Iterator[tuple[str, BlockCost]]:
    """The chain of an application. Its own consecutive layers are one block."""
    first, last = (round(part * model.layers) for part in each.shared)
    if first:
        yield f"{each.name}/0-{first}", model.segment(0, first)
    cuts = [cut for cut in _cuts(each.foundation, applications, model) if first <= cut <= last]
    for start, stop in pairwise(cuts):
        yield f"{each.foundation}/{start}-{stop}", model.segment(start, stop)
    if last < model.layers:
        yield f"{each.name}/{last}-{model.layers}", model.segment(last, model.layers)


def _equivalent_chains(
    each: ZooApplication, applications: list[ZooApplication], profile: BlockProfile, blocks: dict[str, BlockCost]
) -> list[MeasuredChain]:
    """Chains that begin in the next smaller model of the family: whole, or stitched after a quarter.

    Only for fine-tunes of the largest model: they have an adapter for both. Losses are those of two real widths.
    """
    names = list(profile.models)
    if each.kind == FULL or len(names) < 2 or each.foundation != names[-1]:
        return []
    small, large = names[-2], names[-1]
    smaller = ZooApplication(each.name, small, each.kind, each.weight)
    of_small = list(_segments(smaller, applications, profile.models[small]))
    of_large = list(_segments(each, applications, profile.models[large]))
    blocks.update(of_small)
    chains = [MeasuredChain(tuple(name for name, _ in of_small), _LOSS_GAP)]
    quarter = round(0.25 * profile.models[small].layers)
    if len(of_small) > 1 and len(of_large) > 1 and of_small[0][0].endswith(f"/0-{quarter}"):
        stitch = f"{small}-to-{large}"
        blocks[stitch] = _stitch_cost(of_small[0][1], of_large[0][1])
        chains.append(MeasuredChain((of_small[0][0], stitch, *(name for name, _ in of_large[1:])), _LOSS_STITCHED))
    return chains


def _stitch_cost(small: BlockCost, large: BlockCost) -> BlockCost:
    """One linear layer from one width to the other: its time by its bytes."""
    size = small.row_bytes * large.row_bytes // 2
    share = size / small.weight_bytes
    return BlockCost(
        fixed_s=small.fixed_s * share,
        row_s=small.row_s * share,
        prefill_s=small.prefill_s * share,
        weight_bytes=size,
        row_bytes=large.row_bytes,
    )
