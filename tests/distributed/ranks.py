"""Shards as threads of this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.distributed import HashStore
from transformers import PreTrainedModel

from symbiosis.distributed.mesh import ShardMesh
from symbiosis.distributed.operations import FirstShard, Handler, OperationFollower, OperationLeader
from symbiosis.distributed.parallel_model import ParallelModel

CPU = torch.device("cpu")


def divide(model: PreTrainedModel, size: int) -> list[ParallelModel]:
    """The parts of a model, by rank."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(lambda rank: ParallelModel.of(copy.deepcopy(model), ShardMesh(rank, size, store, CPU)), range(size))
        )


@contextmanager
def sharded(
    model: PreTrainedModel, size: int, handlers: Callable[[ParallelModel], Mapping[str, Handler]]
) -> Iterator[tuple[FirstShard, list[OperationFollower]]]:
    """The first shard, and the others, which do what `handlers` of their parts do."""
    first, *others = divide(model, size)
    followers = []
    for part in others:
        follower = OperationFollower(part.mesh)
        follower.add(handlers(part))
        follower.start()
        followers.append(follower)
    leader = OperationLeader(first.mesh)
    try:
        yield FirstShard(first, leader), followers
    finally:
        leader.stop()
        for follower in followers:
            follower.join(timeout=20)
            assert not follower.is_alive()
