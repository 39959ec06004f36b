"""Small clusters by hand: blocks of round times, devices of round memory."""

from __future__ import annotations

from symbiosis.cluster.policies.blocks.block_cost import BlockCost
from symbiosis.cluster.policies.blocks.block_queue import BatchConfig, ChainRequest
from symbiosis.cluster.policies.blocks.block_state import BlockCluster
from symbiosis.cluster.policies.blocks.catalog import Application, BlockCatalog, MeasuredChain
from symbiosis.cluster.policies.blocks.topology import BlockTopology

GB = 1_000_000_000


def make_block(fixed_s: float = 0.01, gigabytes: float = 1.0, **changes) -> BlockCost:
    found = {
        "fixed_s": fixed_s, "row_s": 1e-4, "context_s": 0.0, "prefill_s": 1e-4, "attention_s": 0.0,
        "weight_bytes": round(gigabytes * GB), "kv_bytes": 1000, "row_bytes": 1000, **changes,
    }  # fmt: skip
    return BlockCost(**found)


def make_application(name: str, *blocks: str, others: tuple[MeasuredChain, ...] = (), **changes) -> Application:
    return Application(name, (MeasuredChain(blocks), *others), **changes)


def make_small_cluster(
    blocks: dict[str, BlockCost],
    applications: list[Application],
    placed: list[tuple[str, int]],
    *,
    servers: tuple[int, ...] = (2, 2),
    memory: float = 10.0,
    **changes,
) -> BlockCluster:
    topology = BlockTopology(servers=servers, memory_bytes=round(memory * GB), **changes)
    cluster = BlockCluster(BlockCatalog(blocks, applications), topology, BatchConfig())
    for block, device in placed:
        cluster.add_instance(block, device, 0.0)
    return cluster


def make_request(number: int, application: Application, prompt: int = 100, output: int = 10) -> ChainRequest:
    return ChainRequest(number, application, prompt, output, 0.0, application.allowed)


def settle(cluster: BlockCluster, request: ChainRequest, devices: list[int]) -> ChainRequest:
    """The request has ended its first pass on these devices."""
    request.chains = request.chains[:1]
    for block, device in zip(request.chains[0].blocks, devices, strict=True):
        cluster.assign(request, cluster.devices[device].instances[block])
        request.position += 1
    request.position, request.is_prefill, request.generated = 0, False, 1
    return request
