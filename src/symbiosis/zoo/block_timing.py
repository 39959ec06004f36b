"""Times of the blocks of a model, measured in the model itself: by decode rows, their context, and prompt tokens."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from symbiosis.zoo.partition import BlockKind, BlockPlace, partition


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPlan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 4, 16, 32)
    contexts: tuple[int, ...] = (32, 256, 1024)
    prompts: tuple[int, ...] = (16, 128, 512, 1024)
    repetitions: int = 7
    """Of each batch; their median counts."""


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """Seconds of each kind of block in one batch; of attention and FFN those of one layer, in the mean."""

    rows: int
    context: int
    """Tokens in the KV cache of the rows, all together."""
    prefill: int
    attended: float
    """Sum over the prompt tokens of the tokens before each."""
    seconds: dict[BlockKind, float]
    total_s: float
    """Of the whole model."""


@dataclass(frozen=True, slots=True)
class ModelTiming:
    layers: int
    kv_bytes: int
    """Of a token, in one layer."""
    row_bytes: int
    batches: list[TimedBatch]


class _BlockTimer:
    """Hooks on the modules of blocks. Times add up from one `reset` to the next."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.seconds: dict[BlockKind, float] = defaultdict(float)
        self._started: dict[BlockKind, float] = {}
        self._handles = []
        for module, kind in _modules(model):
            self._handles.append(module.register_forward_pre_hook(lambda _module, _inputs, kind=kind: self._begin(kind)))
            self._handles.append(module.register_forward_hook(lambda _module, _inputs, _output, kind=kind: self._end(kind)))

    def _wait(self) -> None:
        """For what the device still computes."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def _begin(self, kind: BlockKind) -> None:
        self._wait()
        self._started[kind] = time.perf_counter()

    def _end(self, kind: BlockKind) -> None:
        self._wait()
        self.seconds[kind] += time.perf_counter() - self._started[kind]

    def reset(self) -> None:
        self.seconds.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _modules(model: PreTrainedModel) -> Iterator[tuple[nn.Module, BlockKind]]:
    """The modules of each block: of a layer its children, otherwise what holds the tensors."""
    names = dict(model.named_modules())
    found: dict[str, BlockKind] = {}
    for place, tensors in partition(name for name, _ in model.named_parameters(remove_duplicate=False)).items():
        for name in tensors.values():
            owner = name.rpartition(".")[0]
            if place.kind in (BlockKind.ATTENTION, BlockKind.FFN):
                before, _, rest = owner.partition(f".{place.layer}.")
                owner = f"{before}.{place.layer}.{rest.split('.')[0]}"
            found[owner] = place.kind
    for name, kind in found.items():
        yield names[name], kind


@contextmanager
def _timed(model: PreTrainedModel, device: torch.device) -> Iterator[_BlockTimer]:
    timer = _BlockTimer(model, device)
    try:
        yield timer
    finally:
        timer.remove()


@torch.inference_mode()
def time_blocks(model: PreTrainedModel, plan: TimingPlan, progress: Callable[[str], None] = lambda text: None) -> ModelTiming:
    """Measure a model on the device where it is."""
    device = next(model.parameters()).device
    longest = int(getattr(model.config, "max_position_embeddings", 1 << 30))
    vocabulary = int(model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, tokens: int) -> Tensor:
        return torch.randint(0, vocabulary, (rows, tokens), generator=generator).to(device)

    places = partition(name for name, _ in model.named_parameters(remove_duplicate=False))
    layers = 1 + max(place.layer for place in places if place.kind is BlockKind.ATTENTION)
    batches = []
    with _timed(model, device) as timer:
        model(input_ids=draw(1, 8), use_cache=False)  # first use of kernels
        for prompt in (each for each in plan.prompts if each < longest):
            progress(f"a prompt of {prompt} tokens")

            def prefill(prompt: int = prompt) -> None:
                model(input_ids=draw(1, prompt), use_cache=False, logits_to_keep=1)

            seconds, total_s = _median(timer, plan.repetitions, layers, prefill)
            batches.append(TimedBatch(0, 0, prompt, prompt * prompt / 2, seconds, total_s))
        kv_bytes = 0
        for context in (each for each in plan.contexts if each + plan.repetitions < longest):
            for rows in plan.batches:
                progress(f"{rows} rows of {context} tokens")
                cache = DynamicCache()
                model(input_ids=draw(rows, context), past_key_values=cache, use_cache=True, logits_to_keep=1)
                kv_bytes = kv_bytes or _kv_bytes(cache, rows * context, layers)

                def decode(rows: int = rows, cache: DynamicCache = cache) -> None:
                    model(input_ids=draw(rows, 1), past_key_values=cache, use_cache=True)

                seconds, total_s = _median(timer, plan.repetitions, layers, decode)
                held = rows * (context + plan.repetitions // 2)
                batches.append(TimedBatch(rows, held, 0, 0.0, seconds, total_s))
    width = int(model.config.hidden_size)
    return ModelTiming(layers, kv_bytes, width * next(model.parameters()).element_size(), batches)


def _kv_bytes(cache: DynamicCache, tokens: int, layers: int) -> int:
    size: int = sum(each.numel() * each.element_size() for layer in cache.layers for each in (layer.keys, layer.values))
    return size // tokens // layers


def _median(timer: _BlockTimer, repetitions: int, layers: int, run: Callable[[], None]) -> tuple[dict[BlockKind, float], float]:
    """The medians of each kind of block, for one layer, and of the whole."""
    found: dict[BlockKind, list[float]] = defaultdict(list)
    totals = []
    for _ in range(repetitions):
        timer.reset()
        started = time.perf_counter()
        run()
        totals.append(time.perf_counter() - started)
        for kind, seconds in timer.seconds.items():
            found[kind].append(seconds / (layers if kind in (BlockKind.ATTENTION, BlockKind.FFN) else 1))
    return {kind: statistics.median(each) for kind, each in found.items()}, statistics.median(totals)


def block_sizes(sizes: dict[BlockPlace, int]) -> dict[BlockKind, int]:
    """Mean bytes of each kind of block."""
    found: dict[BlockKind, list[int]] = defaultdict(list)
    for place, size in sizes.items():
        found[place.kind].append(size)
    return {kind: round(statistics.mean(each)) for kind, each in found.items()}
