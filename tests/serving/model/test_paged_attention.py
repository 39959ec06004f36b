"""Concatenated sequences over a paged KV cache, on unmodified models: each sequence's logits match the plain model's."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from symbiosis.errors import CannotServe
from symbiosis.serving.model.paged_attention import PagedKVCache, Span, use_paged_attention
from tests.parity.architectures import ARCHITECTURES

DECODERS = [a for a in ARCHITECTURES if a.name not in ("bert", "t5")]
BLOCK = 4


def kv_cache_for(model) -> PagedKVCache:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):
        heads = 1
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return PagedKVCache(
        layers=config.num_hidden_layers,
        heads=heads,
        width=width,
        num_blocks=64,
        block_size=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("architecture", DECODERS, ids=lambda a: a.name)
@torch.no_grad()
def test_prefill_chunks_and_decodes_share_batches(architecture, processor):
    torch.manual_seed(0)
    model = architecture.model().eval()
    plain = copy.deepcopy(model)
    kv_cache = kv_cache_for(model)
    use_paged_attention(model, kv_cache)
    sequences = [torch.randint(0, model.config.vocab_size, (length,)) for length in (7, 1, 12, 30)]
    numbers = list(range(64))
    random.Random(0).shuffle(numbers)
    own = [numbers[i * 8 : i * 8 + 8] for i in range(4)]
    done, logits = [0, 0, 0, 0], [[], [], [], []]
    batches = [[(0, 5), (2, 7)], [(0, 1), (1, 1), (2, 1), (3, 9)], [(0, 1), (2, 3), (3, 1)], [(2, 1), (3, 20)]]
    for batch in batches:
        spans, start = [], 0
        for i, count in batch:
            spans.append(Span(start, count, done[i], own[i]))
            start += count
        kv_cache.begin(spans)
        ids = torch.cat([sequences[i][done[i] : done[i] + count] for i, count in batch])
        positions = torch.cat([torch.arange(done[i], done[i] + count) for i, count in batch])
        found = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        for span, (i, count) in zip(spans, batch, strict=True):
            logits[i].append(found[span.start : span.start + count])
            done[i] += count
    for i, ids in enumerate(sequences):
        torch.testing.assert_close(torch.cat(logits[i]), plain(ids[None, : done[i]]).logits[0], atol=1e-5, rtol=1e-5)


def test_the_windows_of_the_test_models_are_shorter_than_their_sequences():
    windows = {a.name: getattr(a.model().config, "sliding_window", None) for a in DECODERS}
    assert any(window is not None and window < 30 for window in windows.values()), windows


def test_unsupported_attention_is_rejected():
    model = ARCHITECTURES[0].model()
    use_paged_attention(model, kv_cache_for(model))
    layer = model.model.layers[0].self_attn
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    rows = torch.randn(1, 2, 3, 4)
    with pytest.raises(CannotServe, match="s_aux"):
        attention(layer, rows, rows, rows, None, s_aux=torch.zeros(2))
