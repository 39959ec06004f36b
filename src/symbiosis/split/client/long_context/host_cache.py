"""A transformers cache whose layers are in host memory, for contexts that do not fit a device.

Prefill on a GPU stores the keys and values of each chunk in host memory and reads earlier ones in segments
(`segment_stream`). Decode on a CPU reads them in place (`kernels.cpu.flash_decoding`). On a tenant without a GPU both read
in place. Numbers are stored in the model's dtype, in another one, or in int8 with a scale for each token and head.

B = sequences, K = key heads, T = tokens, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from symbiosis.errors import CannotOffload
from symbiosis.gpu.host_memory import HostMemory
from symbiosis.kernels.cpu.flash_decoding import KVRange
from symbiosis.split.client.long_context.quantization import dequantize, quantize
from symbiosis.split.client.long_context.segment_stream import SegmentStream

SEGMENT_TOKENS = 8192
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_ADVICE = "shorten the prompt, lower max_new_tokens, or store it in int8 (kv_dtype='int8')"
_SPARE_DIVISOR = 8
_MIN_SPARE_TOKENS = 64


class HostCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer. `update` returns views of all tokens; the attention function finds this layer by them."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, cache: HostKVCache, index: int) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self.cache, self.index, self.length = cache, index, 0
        self.window: int | None = None
        """Of this layer's attention, once it has run."""
        self._fresh: tuple[Tensor, Tensor] | None = None  # states of the last update, as the model computed them
        self._memory: list[HostMemory] = []  # numbers and, for int8, scales: [2, B, K, capacity, …]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        if value_states is not None and key_states.shape != value_states.shape:
            raise CannotOffload(
                f"keys of shape {tuple(key_states.shape)} and values of shape {tuple(value_states.shape)} differ: "
                "a KV cache in host memory needs equal ones. Use kv='device'"
            )
        self.dtype, self.device = self.cache.storage_dtype or key_states.dtype, key_states.device
        self._reserve(key_states, max(self.cache.expected_tokens, self.length + key_states.shape[2]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise CannotOffload("a KV cache in host memory has no gradients: use torch.no_grad(), or another cache")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self._memory[0].tensor.shape[3]:
            self._reserve(key_states, end + max(_MIN_SPARE_TOKENS, end // _SPARE_DIVISOR))
        self._store(torch.stack([key_states, value_states]), self.length)
        self.length, self._fresh = end, (key_states, value_states)
        return self._expose()

    def _expose(self) -> tuple[Tensor, Tensor]:
        numbers = self._memory[0].tensor
        self.keys, self.values = numbers[0, :, :, : self.length], numbers[1, :, :, : self.length]
        self.keys.symbiosis_layer = self
        return self.keys, self.values

    def _reserve(self, like: Tensor, capacity: int) -> None:
        """Memory for `capacity` tokens; what is there is copied."""
        batch, heads, _, width = like.shape
        pinned = self.device.type == "cuda"
        self.cache.finish_copies()
        made = [HostMemory((2, batch, heads, capacity, width), self.dtype, pinned=pinned, advice=_ADVICE)]
        if self.dtype is torch.int8:
            made.append(HostMemory((2, batch, heads, capacity), torch.float32, pinned=pinned, advice=_ADVICE))
        for old, new in zip(self._memory, made, strict=False):
            new.tensor[:, :, :, : self.length] = old.tensor[:, :, :, : self.length]
        self._memory = made

    def _store(self, states: Tensor, start: int) -> None:
        """States [2, B, K, T, D]."""
        parts = quantize(states) if self.dtype is torch.int8 else (states.to(self.dtype),)
        places = [memory.tensor[:, :, :, start : start + states.shape[3]] for memory in self._memory]
        if states.is_cuda:
            pairs = [
                (part[each].contiguous(), place[each]) for part, place in zip(parts, places, strict=True) for each in (0, 1)
            ]
            self.cache.stream(states.device).store(self.index, pairs)
            return
        for part, place in zip(parts, places, strict=True):
            place.copy_(part)

    def range(self, window: int | None) -> KVRange:
        """All tokens of each sequence, its padding excepted, or the last ones within the window."""
        assert self.keys is not None, "update() precedes attention"
        self._fresh = None
        first = 0 if window is None else max(0, self.length - window)
        starts = [max(start, first) for start in self.cache.starts_of(len(self.keys))]
        scales: list[Tensor] = []
        if self.dtype is torch.int8:
            scales = [self._memory[1].tensor[each, :, :, : self.length] for each in (0, 1)]
        return KVRange(self.keys, self.values, starts, [self.length] * len(starts), *scales)

    def segment_bounds(self, end: int) -> list[tuple[int, int]]:
        """Of the tokens before `end`, those that the window of its next token reaches."""
        first = 0 if self.window is None else max(0, end - self.window + 1)
        first -= first % self.cache.segment_tokens
        return [(start, min(start + self.cache.segment_tokens, end)) for start in range(first, end, self.cache.segment_tokens)]

    def segment(self, start: int, end: int) -> list[Tensor]:
        """Keys and values of some tokens, and for int8 their scales, in host memory."""
        return [memory.tensor[each, :, :, start:end] for memory in self._memory for each in (0, 1)]

    def segments(self, end: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The tokens before `end` on a device: bounds, keys and values. Each is valid until the next one."""
        for start, stop in self.segment_bounds(end):
            tensors = self.segment(start, stop)
            if device.type == "cuda":
                tensors = self.cache.stream(device).fetch((self.index, start, stop), tensors)
            if self.dtype is torch.int8:
                keys, values = (dequantize(tensors[each], tensors[each + 2], dtype) for each in (0, 1))
            else:
                keys, values = (tensors[each].to(dtype) for each in (0, 1))
            yield start, stop, keys, values
            if device.type == "cuda":
                self.cache.stream(device).release()

    def take_fresh(self, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The states of the tokens from `start` on, those of the last update. They are released: a GPU holds one chunk's."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            return fresh
        self.cache.finish_copies()  # a layer whose keys several modules read
        tensors = [tensor.to(like.device) for tensor in self.segment(start, self.length)]
        if self.dtype is torch.int8:
            return dequantize(tensors[0], tensors[2], like.dtype), dequantize(tensors[1], tensors[3], like.dtype)
        return tensors[0].to(like.dtype), tensors[1].to(like.dtype)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions of transformers

    def reset(self) -> None:
        self.cache.finish_copies()
        self.length, self._fresh, self.keys, self.values = 0, None, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """As `DynamicLayer`: a negative number of tokens to remove."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected a negative number, of tokens to remove")
        self.length = max(0, self.length + tokens_to_remove)
        if self.is_initialized:
            self._expose()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Copies all keys and values of the layer: beams are slow with a cache of this kind."""
        if not self.length:
            return
        self.cache.finish_copies()
        indices = indices.to("cpu")
        for number, memory in enumerate(self._memory):
            old = memory.tensor
            if len(indices) == old.shape[1]:
                old[:, :, :, : self.length] = old[:, indices, :, : self.length]
                continue
            shape, pinned = (2, len(indices), *old.shape[2:]), self.device.type == "cuda"
            made = HostMemory(shape, old.dtype, pinned=pinned, advice=_ADVICE)
            made.tensor[:, :, :, : self.length] = old[:, indices, :, : self.length]
            self._memory[number] = made
        self._expose()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.length:
            self.batch_select_indices(torch.arange(self._memory[0].tensor.shape[1]).repeat_interleave(repeats))

    def offload(self) -> None:
        """It is in host memory already."""

    prefetch = offload


class HostKVCache(Cache):  # type: ignore[misc]
    """Layers in host memory, and what they share: padding, expected length, copies in flight."""

    max_cache_len = -1  # PEFT's prefix tuning reads it: no limit

    def __init__(
        self,
        num_layers: int,
        *,
        expected_tokens: int = 0,
        dtype: torch.dtype | None = None,
        segment_tokens: int | None = None,
    ) -> None:
        """`expected_tokens` are reserved at once; `dtype` is that of the stored numbers, by default the model's."""
        super().__init__(layers=[HostCacheLayer(self, index) for index in range(num_layers)])
        self.expected_tokens, self.storage_dtype = expected_tokens, dtype
        self.segment_tokens = segment_tokens or SEGMENT_TOKENS
        self._starts: list[int] = []
        self._stream: SegmentStream | None = None

    def set_padding(self, mask: Tensor | None) -> None:
        """Leading tokens without meaning, by a mask [B, T] of the model. Raises `CannotOffload` for other masks."""
        if mask is None:
            return
        if mask.dim() != 2:
            raise CannotOffload(f"a mask of shape {tuple(mask.shape)}: a KV cache in host memory takes masks [batch, tokens]")
        mask = mask.to("cpu", torch.bool)
        starts = mask.int().argmax(1)
        if not torch.equal(mask, torch.arange(mask.shape[1])[None] >= starts[:, None]):
            raise CannotOffload(
                "this mask has zeros after ones: a KV cache in host memory takes padding before the prompt only "
                "(tokenizer.padding_side='left'), and with prefix tuning none"
            )
        self._starts = starts.tolist()

    def starts_of(self, batch: int) -> list[int]:
        """The first token of each sequence that counts."""
        return self._starts if len(self._starts) == batch else [0] * batch

    def absorb(self, other: Cache) -> None:
        """Take over the keys and values of an empty model's cache, such as a prefix."""
        assert self.get_seq_length() == 0
        for layer, given in zip(self.layers, other.layers, strict=True):
            layer.update(given.keys, given.values)

    def begin_chunk(self) -> None:
        """Start the copies of earlier segments to the GPU, for a chunk that follows them."""
        if self._stream is None:
            return
        end = self.get_seq_length()
        layers = [layer for layer in self.layers if layer.is_initialized]
        plan = [(layer, bounds) for layer in layers for bounds in layer.segment_bounds(end)]
        self._stream.plan([((layer.index, *bounds), layer.segment(*bounds)) for layer, bounds in plan])

    def stream(self, device: torch.device) -> SegmentStream:
        if self._stream is None:
            self._stream = SegmentStream(device)
        return self._stream

    def finish_copies(self) -> None:
        """All is in host memory from now on, and no GPU memory is held."""
        if self._stream is not None:
            self._stream.finish()

    @property
    def nbytes(self) -> int:
        return sum(memory.tensor.nbytes for layer in self.layers for memory in layer._memory)
