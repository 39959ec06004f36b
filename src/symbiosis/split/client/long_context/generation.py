"""`generate` of a connected model, with a choice of where the KV cache is.

`kv="device"` is transformers' own cache. `kv="host"` keeps the cache in host memory: prefill runs on the model's device in
chunks, then the client part moves to the CPU and decodes there, and base layers are called on the executor. `kv="auto"`
chooses host where the whole cache would not fit the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from symbiosis.errors import CannotOffload, OutOfRange
from symbiosis.split.client.direct_mode import MappedParameter
from symbiosis.split.client.long_context.host_attention import NAME, register_host_attention
from symbiosis.split.client.long_context.host_cache import DTYPES, HostKVCache
from symbiosis.split.client.long_context.placement import HostPlacement
from symbiosis.types import LayerKind

PLACES = ("auto", "device", "host")
_CHUNK_TOKENS = 2048
_HEADROOM = 0.9  # share of the free GPU memory that a cache may take
_GROWTH = 9 / 8  # a cache that grows has spare memory
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_UNSUPPORTED = {
    "assistant_model": "assisted generation",
    "prompt_lookup_num_tokens": "prompt lookup",
    "output_attentions": "attention weights",
    "output_hidden_states": "hidden states",
    "cache_implementation": "another cache",
    "prefill_chunk_size": "transformers' chunks (pass kv_chunk_tokens)",
    "pixel_values": "images",
    "use_cache": "generation without a cache",
}
_in_use = threading.Lock()


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a call of `generate` will store, at most."""

    sequences: int
    tokens: int
    """Of each sequence: the prompt and all new ones."""
    nbytes: int


@torch.no_grad()
def generate(
    self: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *args: Any,
    kv: str = "auto",
    kv_dtype: str | None = None,
    kv_chunk_tokens: int = _CHUNK_TOKENS,
    **kwargs: Any,
) -> Any:
    """transformers' `generate`. `kv` is where the KV cache is: "device", "host", or "auto" (host if it would not fit).

    With a cache in host memory, `kv_dtype` is that of its numbers ("float32", "bfloat16", "float16" or "int8"; by default the
    model's), and the prompt is computed in chunks of `kv_chunk_tokens`. Raises `CannotOffload` if `kv="host"` is not
    possible, `OutOfHostMemory` if the cache does not fit there either.
    """
    if kv not in PLACES:
        raise OutOfRange(f"kv is {kv!r:.80}", field="kv", expected=f"one of {', '.join(PLACES)}")
    if kv_dtype is not None and kv_dtype not in DTYPES:
        raise OutOfRange(f"kv_dtype is {kv_dtype!r:.80}", field="kv_dtype", expected=f"one of {', '.join(DTYPES)}")
    if not isinstance(kv_chunk_tokens, int) or kv_chunk_tokens < 1:
        raise OutOfRange(f"kv_chunk_tokens is {kv_chunk_tokens!r:.80}", field="kv_chunk_tokens", expected="a positive integer")
    plain = functools.partial(type(self).generate, self, inputs, generation_config, *args)
    size = estimate_cache(self, inputs, generation_config, kwargs)
    given = kwargs.get("past_key_values")
    is_host = kv == "host" or isinstance(given, HostKVCache)
    if kv == "auto" and not is_host and size is not None and would_not_fit(size, self.device):
        is_host = unsupported_reason(self, generation_config, kwargs) is None
    if not is_host:
        if kv_dtype is not None:
            raise OutOfRange(f"kv_dtype is {kv_dtype!r} with kv={kv!r}", field="kv_dtype", expected="kv='host' with it")
        return plain(**kwargs)
    reason = unsupported_reason(self, generation_config, kwargs)
    if reason is not None:
        raise CannotOffload(f"kv='host' does not support {reason}: use kv='device'")
    cache = given
    if not isinstance(cache, HostKVCache):
        config = self.config.get_text_config(decoder=True)
        tokens = 0 if size is None else size.tokens
        dtype = None if kv_dtype is None else DTYPES[kv_dtype]
        cache = HostKVCache(config.num_hidden_layers, expected_tokens=tokens, dtype=dtype)
    with use_host_cache(self, cache, kv_chunk_tokens):
        return plain(**{**kwargs, "past_key_values": cache})


def estimate_cache(model: PreTrainedModel, inputs: Any, generation_config: Any, kwargs: Mapping[str, Any]) -> CacheSize | None:
    """The cache of a call of `generate`; None if its prompt is not a tensor, or the model has no heads of one size."""
    prompt = next((x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if isinstance(x, Tensor)), None)
    config = model.config.get_text_config(decoder=True)
    query_heads: Any = getattr(config, "num_attention_heads", None)
    heads: Any = getattr(config, "num_key_value_heads", None) or query_heads
    layers: Any = getattr(config, "num_hidden_layers", None)
    if prompt is None or prompt.dim() < 2 or not all(isinstance(each, int) for each in (query_heads, heads, layers)):
        return None
    sources = [kwargs, *(vars(each) for each in (generation_config, model.generation_config) if each is not None)]

    def option(name: str) -> Any:
        return next((source[name] for source in sources if source.get(name) is not None), None)

    length, new = prompt.shape[1], option("max_new_tokens")
    tokens = length + int(new) if new is not None else max(int(option("max_length") or 0), length + 1)
    sequences = prompt.shape[0] * max(int(option("num_beams") or 1), int(option("num_return_sequences") or 1))
    width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return CacheSize(sequences, tokens, sequences * tokens * layers * 2 * heads * width * model.dtype.itemsize)


def would_not_fit(size: CacheSize, device: torch.device) -> bool:
    """Whether a GPU has too little memory left for this cache. On a CPU the cache is in host memory anyway."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size.nbytes * _GROWTH > (free + unused) * _HEADROOM


def unsupported_reason(model: PreTrainedModel, generation_config: Any, kwargs: Mapping[str, Any]) -> str | None:
    """What this model or this call needs and a cache in host memory lacks."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or not model._supports_attention_backend:
        return f"{type(model).__name__}, which does not call transformers' attention interface as a decoder"
    unknown = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))}"
    for name, meaning in _UNSUPPORTED.items():
        value = kwargs.get(name, getattr(generation_config, name, None))
        if (value is False) if name == "use_cache" else (value is not None and value is not False):
            return meaning
    given = kwargs.get("past_key_values")
    if given is not None and not isinstance(given, HostKVCache):
        return "a cache of another kind in past_key_values"
    has_experts = any(spec.kind is LayerKind.EXPERTS for spec in model.symbiosis.manifest.layers)
    if model.device.type != "cpu" and has_experts and any(isinstance(p, MappedParameter) for p in model.parameters()):
        return "experts in direct mode (connect with mode='executor')"
    return None


@contextmanager
def use_host_cache(model: PreTrainedModel, cache: HostKVCache, chunk_tokens: int) -> Iterator[None]:
    """Inside, forward passes with `cache` compute their prompt in chunks, and decode on the CPU."""
    if not _in_use.acquire(blocking=False):
        raise CannotOffload("another thread generates with kv='host': one call at a time in a process")
    with ExitStack() as undo:
        undo.callback(_in_use.release)
        register_host_attention()
        for config in {id(config): config for config in _configs(model)}.values():
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
            config._attn_implementation_internal = NAME
        forward = _HostForward(model, cache, chunk_tokens, undo)
        before = model.__dict__.get("forward")
        undo.callback(lambda: model.__dict__.pop("forward", None) if before is None else model.__dict__.update(forward=before))
        model.__dict__["forward"] = functools.wraps(forward.original)(forward)
        undo.callback(cache.finish_copies)
        yield


def _configs(model: PreTrainedModel) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            yield config


class _HostForward:
    """A forward pass in chunks; the first one that decodes moves the model to the CPU."""

    def __init__(self, model: PreTrainedModel, cache: HostKVCache, chunk_tokens: int, undo: ExitStack) -> None:
        self._model, self._cache, self._chunk_tokens, self._undo = model, cache, chunk_tokens, undo
        self.original = model.forward
        self._is_moved = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise CannotOffload("a forward pass with positional arguments: kv='host' takes keyword arguments")
        self._adopt(kwargs)
        name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
        length, device = kwargs[name].shape[1], kwargs[name].device
        past = self._cache.get_seq_length()
        self._cache.set_padding(kwargs.get("attention_mask"))
        if past and length == 1 and self._model.device.type == "cuda" and not self._is_moved:
            self._cache.finish_copies()
            self._undo.enter_context(HostPlacement(self._model, self._model.symbiosis))
            self._is_moved = True
        for start in range(0, length, self._chunk_tokens):
            end = min(start + self._chunk_tokens, length)
            self._cache.begin_chunk()
            output = self.original(**self._place(_cut(kwargs, length, past, start, end)))
        if self._cache.get_seq_length() != past + length:
            raise CannotOffload(
                f"{type(self._model).__name__} does not store its keys and values in the cache that it is given"
            )
        if self._is_moved and device.type != "cpu":
            output.logits = output.logits.to(device)
        return output

    def _adopt(self, kwargs: dict[str, Any]) -> None:
        """Use the cache in host memory, whatever cache the pass brings: PEFT's prefix tuning makes one of its own."""
        given = kwargs.get("past_key_values")
        if given is self._cache:
            return
        if not isinstance(given, Cache) or self._cache.get_seq_length():
            raise CannotOffload(f"a forward pass brings {type(given).__name__} as its cache: use kv='device'")
        self._cache.absorb(given)
        kwargs["past_key_values"] = self._cache

    def _place(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self._is_moved:
            return kwargs
        return {name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def _cut(kwargs: dict[str, Any], length: int, past: int, start: int, end: int) -> dict[str, Any]:
    """The arguments of some tokens of a forward pass. Masks reach from the first token to the last of these."""
    if (start, end) == (0, length):
        return dict(kwargs)
    cut = dict(kwargs)
    for name in ("input_ids", "position_ids", "token_type_ids", "cache_position"):
        if isinstance(cut.get(name), Tensor) and cut[name].shape[-1] == length:
            cut[name] = cut[name][..., start:end]
    if isinstance(cut.get("inputs_embeds"), Tensor):
        cut["inputs_embeds"] = cut["inputs_embeds"][:, start:end]
    mask = cut.get("attention_mask")
    if isinstance(mask, Tensor):
        cut["attention_mask"] = mask[:, : mask.shape[1] - (length - end)]
    if end < length and "logits_to_keep" in cut:
        cut["logits_to_keep"] = 1
    return cut
