"""The settings of all policies of blocks, and the cluster that they begin with."""

from __future__ import annotations

from dataclasses import dataclass, field

from symbiosis.cluster.policies.blocks.block_placement import (
    PlacementRule,
    TrafficCounter,
    place_by_fragments,
    place_by_locality,
)
from symbiosis.cluster.policies.blocks.block_queue import BatchConfig
from symbiosis.cluster.policies.blocks.block_scaling import BlockScalingConfig
from symbiosis.cluster.policies.blocks.block_state import BlockCluster
from symbiosis.cluster.policies.blocks.catalog import BlockCatalog
from symbiosis.cluster.policies.blocks.dispatch import DispatchConfig
from symbiosis.cluster.policies.blocks.topology import BlockTopology


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPolicyConfig:
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    scaling: BlockScalingConfig = field(default_factory=BlockScalingConfig)
    placement: PlacementRule = PlacementRule.LOCALITY


def provision_cluster(
    catalog: BlockCatalog, topology: BlockTopology, config: BlockPolicyConfig, *, prompt: float, output: float
) -> tuple[BlockCluster, TrafficCounter]:
    """Instances for the expected load, placed and loaded. `prompt`, `output`: mean lengths. Raises `DoesNotFit`."""
    cluster, traffic = BlockCluster(catalog, topology, config.batches), TrafficCounter.expected(catalog)
    instances = place_by_locality(catalog, topology, traffic, prompt=prompt, output=output)
    if config.placement is PlacementRule.FRAGMENTATION:
        instances = place_by_fragments(instances, catalog, topology)
    for each in instances:
        cluster.add_instance(each.block, each.device, 0.0)
    return cluster, traffic
