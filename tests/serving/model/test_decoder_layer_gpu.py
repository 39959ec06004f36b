"""Decoder layers in few launches: they give what their own code gives. Without a GPU: TRITON_INTERPRET=1, with triton."""

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
from symbiosis.serving.model.decoder_layer_gpu import shorten
from tests.parity.architectures import ARCHITECTURES
from tests.serving.model.test_decoder_layer_cpu import SPANS, UNUSUAL, USUAL, logits, served

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.name in USUAL], ids=lambda a: a.name)
@torch.inference_mode()
def test_a_short_model_gives_what_its_own_code_gives(architecture, dtype, monkeypatch):
    model, memory, bank = served(architecture, DEVICE, dtype)
    ids = torch.arange(10, device=DEVICE)[None]
    places = torch.tensor([[5, 0, 1, 2, 0, 1, 2, 4, 5, 6]], device=DEVICE)
    before = copy.deepcopy(memory._memory)
    patch_fused_ops(model)
    bank.begin_batch((), ())
    memory.begin(SPANS)
    expected = model(input_ids=ids, position_ids=places, use_cache=False).logits
    stored = copy.deepcopy(memory._memory)
    shorten(model, bank)
    layers = list(model.model.layers)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in layers)
    normed = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda *_: normed.append(1))
    memory._memory.copy_(before)
    memory.begin(SPANS)
    room = 1e-5 if dtype is torch.float32 else 2e-2
    found = model(input_ids=ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=room, atol=room)
    torch.testing.assert_close(memory._memory, stored, rtol=room, atol=room)
    assert len(normed) == 1, "each layer norms the rows of the next"
    assert all(layer.symbiosis_function._ready is None for layer in layers)
    # rows that somebody has changed between two layers are normed again
    layers[1].register_forward_pre_hook(lambda _, given: (given[0] * 2.0, *given[1:]))
    memory.begin(SPANS)
    changed = model(input_ids=ids, position_ids=places, use_cache=False).logits
    assert len(normed) == 3
    monkeypatch.setattr(decoder_layer_gpu.FusedDecoderLayerGpu, "compute", lambda *_: None)
    memory.begin(SPANS)
    own = model(input_ids=ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(changed, own, rtol=room, atol=room)


@torch.inference_mode()
def test_a_layer_whose_code_does_something_else_keeps_it():
    model, _, bank = served(next(a for a in ARCHITECTURES if a.name == "llama"), DEVICE, torch.float32)
    odd, plain = model.model.layers[0], model.model.layers[1]
    forward = type(odd).forward

    class Scaled(type(odd)):
        def forward(self, *given, **named):
            return forward(self, *given, **named) * 1.01

    odd.__class__ = Scaled
    patch_fused_ops(model)
    shorten(model, bank)
    assert not isinstance(odd, FusedDecoderLayer)
    assert isinstance(plain, FusedDecoderLayer)


@torch.inference_mode()
def test_without_fused_norms_nothing_is_short():
    model, _, bank = served(next(a for a in ARCHITECTURES if a.name == "llama"), DEVICE, torch.float32)
    shorten(model, bank)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", UNUSUAL)
@torch.inference_mode()
def test_what_only_looks_usual_computes_what_its_own_code_computes(make, dtype):
    model, memory, bank = served(SimpleNamespace(model=make), DEVICE, dtype)
    patch_fused_ops(model)
    before = copy.deepcopy(memory._memory)
    expected = logits(model, memory, bank)
    shorten(model, bank)
    memory._memory.copy_(before)
    room = (1e-5 if dtype is torch.float32 else 2e-3) * float(expected.abs().max())
    torch.testing.assert_close(logits(model, memory, bank), expected, rtol=0, atol=room)
