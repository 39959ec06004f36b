"""Layers of which each shard holds a part, against the layers in one piece."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from symbiosis.distributed.mesh import ShardMesh
from symbiosis.errors import SymbiosisError
from symbiosis.models.split import split
from symbiosis.split.executor.layers import BaseLayer, make_layer, run
from symbiosis.split.executor.sharding.layers import Shards
from symbiosis.split.executor.sharding.weights import divide
from symbiosis.types import Direction, LayerKind
from tests.parity.architectures import ARCHITECTURES

CPU = torch.device("cpu")
NAMES = ["llama", "gpt2", "mixtral"]


@contextmanager
def shards_of(model: torch.nn.Module, size: int, way: str | None) -> Iterator[list[Shards]]:
    store = HashStore()
    hosted = [split(copy.deepcopy(model), host_head=True, host_embeddings=True).layers for _ in range(size)]
    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: Shards(hosted[rank], ShardMesh(rank, size, store, CPU), way), range(size)))
    for shards in found:
        shards.coordinator.start()
    yield found
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda shards: shards.coordinator.stop(), found))


def rows_of(layer: BaseLayer, direction: Direction, count: int) -> tuple[Tensor, ...]:
    spec, torch_seed = layer.spec, torch.Generator().manual_seed(count)
    if spec.kind is LayerKind.EMBEDDING:
        return (torch.randint(0, spec.experts, (count, 1), generator=torch_seed),)
    if spec.kind is LayerKind.EXPERTS:
        index = torch.stack([torch.randperm(spec.experts, generator=torch_seed)[:2] for _ in range(count)])
        rows = (torch.randn(count, spec.in_width, generator=torch_seed), index, torch.rand(count, 2, generator=torch_seed))
        return rows if direction is Direction.FORWARD else (*rows, torch.randn(count, spec.in_width, generator=torch_seed))
    return tuple(torch.randn(count, width or 1, generator=torch_seed) for width in layer.input_widths(direction))


@pytest.mark.parametrize("way", ["tensor", "parameters"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_layer_computes_the_same_from_every_shard(name, size, way):
    model = next(a for a in ARCHITECTURES if a.name == name).model()
    hosted = split(copy.deepcopy(model), host_head=True, host_embeddings=True).layers
    whole = [make_layer(layer.spec, layer.weights, layer.bias, layer.module) for layer in hosted]
    with shards_of(model, size, way) as shards:
        for handle, layer in enumerate(whole):
            for direction in (Direction.FORWARD, Direction.BACKWARD):
                if layer.spec.kind in (LayerKind.NORM, LayerKind.EMBEDDING) and direction is Direction.BACKWARD:
                    continue
                for rank, count in enumerate((1, 7, 40)[:size]):
                    rows = rows_of(layer, direction, count)
                    found = run((shards[rank].layers[handle],), direction, rows)
                    for y, expected in zip(found, run((layer,), direction, rows), strict=True):
                        torch.testing.assert_close(y, expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_weights_biases_and_norms_of_rows_are_those_of_the_whole_layer():
    model = next(a for a in ARCHITECTURES if a.name == "gpt2").model()
    hosted = split(copy.deepcopy(model)).layers
    with shards_of(model, 2, None) as shards:
        sharded = {layer.spec.paths: layer for layer in shards[1].layers}
        for each in [each for each in hosted if each.spec.kind is LayerKind.CONV1D]:
            plain, x = make_layer(each.spec, each.weights, each.bias, None), torch.randn(3, each.spec.in_width)
            layer = sharded[each.spec.paths]
            assert torch.equal(layer.weight("weight"), each.weights["weight"])
            assert torch.equal(layer.row_squares(), plain.row_squares())
            torch.testing.assert_close(layer.with_bias().forward((x,)), plain.with_bias().forward((x,)))


@torch.no_grad()
def test_calls_of_all_shards_at_once_do_not_mix():
    model = next(a for a in ARCHITECTURES if a.name == "llama").model()
    hosted = split(copy.deepcopy(model), host_head=True, host_embeddings=True).layers
    whole = [make_layer(layer.spec, layer.weights, layer.bias, layer.module) for layer in hosted]
    matrices = [layer for layer in whole if layer.spec.kind in (LayerKind.LINEAR, LayerKind.BLOCK)]
    wrong: list[object] = []

    @torch.no_grad()
    def call(own: Shards) -> None:
        for step in range(30):
            layer = matrices[(step * 7 + own.mesh.rank * 3) % len(matrices)]
            direction = Direction.BACKWARD if step % 2 else Direction.FORWARD
            rows = rows_of(layer, direction, 1 + step)
            found, expected = run((own.layers[layer.spec.handle],), direction, rows), run((layer,), direction, rows)
            if not torch.allclose(found[0], expected[0], atol=2e-5):
                wrong.append((own.mesh.rank, step))

    with shards_of(model, 3, None) as shards:
        threads = [threading.Thread(target=call, args=(each,)) for each in shards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not wrong


def test_the_parts_of_a_shard_take_its_share_of_memory():
    model = next(a for a in ARCHITECTURES if a.name == "llama").model()
    layers = split(copy.deepcopy(model), host_head=True, host_embeddings=True).layers
    whole = sum(w.nbytes for layer in layers for w in layer.weights.values())
    with shards_of(model, 2, None) as shards:
        hosted = {w.data_ptr(): w.nbytes for layer in shards[0].layers for w in layer.weights.values()}
        assert sum(hosted.values()) == whole / 2


def test_parts_cover_everything_once():
    for length in range(20):
        for parts in range(1, 6):
            found = divide(length, parts)
            assert [i for part in found for i in range(part.start, part.stop)] == list(range(length))


def test_shards_of_different_models_do_not_start():
    store = HashStore()

    def check(rank: int) -> None:
        ShardMesh(rank, 2, store, CPU).check_same("model", f"hash {rank}")

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(check, rank) for rank in range(2)]
        for result in results:
            with pytest.raises(SymbiosisError, match="shard 1 has another model than shard 0"):
                result.result(60)
