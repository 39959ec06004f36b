"""Fused decoder layers for GPUs match their own code. Without a GPU: TRITON_INTERPRET=1, with triton."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from symbiosis.models.patches.fused_ops import patch_fused_ops
from symbiosis.serving.model import decoder_layer_gpu
from symbiosis.serving.model.decoder_layer import FusedDecoderLayer
from symbiosis.serving.model.decoder_layer_gpu import fuse_layers_gpu
from tests.parity.architectures import ARCHITECTURES
from tests.serving.model.test_decoder_layer_cpu import FUSABLE, LOOKALIKES, SPANS, logits, served

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.name in FUSABLE], ids=lambda a: a.name)
@torch.inference_mode()
def test_a_fused_model_matches_its_own_code(architecture, dtype, monkeypatch):
    model, kv_cache, adapters = served(architecture, DEVICE, dtype)
    ids = torch.arange(10, device=DEVICE)[None]
    positions = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]], device=DEVICE)
    before = copy.deepcopy(kv_cache._memory)
    patch_fused_ops(model)
    adapters.begin_batch((), ())
    kv_cache.begin(SPANS)
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    stored = copy.deepcopy(kv_cache._memory)
    fuse_layers_gpu(model, adapters)
    layers = list(model.model.layers)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in layers)
    normed = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda *_: normed.append(1))
    kv_cache._memory.copy_(before)
    kv_cache.begin(SPANS)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kv_cache._memory, stored, rtol=tolerance, atol=tolerance)
    assert len(normed) == 1, "each layer norms the input of the next"
    assert all(layer.symbiosis_fused_forward._normed is None for layer in layers)
    # rows that change between two layers are normed again
    layers[1].register_forward_pre_hook(lambda _, given: (given[0] * 2.0, *given[1:]))
    kv_cache.begin(SPANS)
    changed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert len(normed) == 3
    monkeypatch.setattr(decoder_layer_gpu.FusedDecoderLayerGpu, "compute", lambda *_: None)
    kv_cache.begin(SPANS)
    own = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(changed, own, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_a_layer_with_other_code_is_not_fused():
    model, _, adapters = served(next(a for a in ARCHITECTURES if a.name == "llama"), DEVICE, torch.float32)
    odd, plain = model.model.layers[0], model.model.layers[1]
    forward = type(odd).forward

    class Scaled(type(odd)):
        def forward(self, *given, **named):
            return forward(self, *given, **named) * 1.01

    odd.__class__ = Scaled
    patch_fused_ops(model)
    fuse_layers_gpu(model, adapters)
    assert not isinstance(odd, FusedDecoderLayer)
    assert isinstance(plain, FusedDecoderLayer)


@torch.inference_mode()
def test_without_fused_norms_no_layer_is_fused():
    model, _, adapters = served(next(a for a in ARCHITECTURES if a.name == "llama"), DEVICE, torch.float32)
    fuse_layers_gpu(model, adapters)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", LOOKALIKES)
@torch.inference_mode()
def test_a_layer_that_only_looks_common_matches_its_own_code(make, dtype):
    model, kv_cache, adapters = served(SimpleNamespace(model=make), DEVICE, dtype)
    patch_fused_ops(model)
    before = copy.deepcopy(kv_cache._memory)
    expected = logits(model, kv_cache, adapters)
    fuse_layers_gpu(model, adapters)
    kv_cache._memory.copy_(before)
    tolerance = (1e-5 if dtype is torch.float32 else 2e-3) * float(expected.abs().max())
    torch.testing.assert_close(logits(model, kv_cache, adapters), expected, rtol=0, atol=tolerance)
