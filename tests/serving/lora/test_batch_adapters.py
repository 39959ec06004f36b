"""Many adapters in one batch against plain PEFT, each alone."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from symbiosis.adapters.parts import Ia3Part
from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.serving.lora.batch_adapters import ActiveAdapters
from symbiosis.serving.lora.lora_layers import install_lora_layers
from symbiosis.serving.lora.lora_ops import FusedProjection
from symbiosis.serving.lora.lora_weights import AdapterSegment, EngineAdapter, LoraWeights, ReplacedWeights
from tests.parity.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES[0]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "rank 4": LoraConfig(r=4, lora_alpha=6, target_modules=ALL, init_lora_weights=False),
    "rank 4 too": LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "rank 7": LoraConfig(r=7, target_modules=ALL, use_rslora=True, init_lora_weights=False),
    "dora": LoraConfig(r=3, target_modules=["k_proj", "down_proj"], use_dora=True, init_lora_weights=False),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False),
}


def peft_model(base, kind: str):
    torch.manual_seed(len(kind))
    model = get_peft_model(copy.deepcopy(base), copy.deepcopy(KINDS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3_l" in name or "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "magnitude" in name:
                parameter.mul_(1.2)
    return model


def lora(a_rI, b_Or, mag_norm_scale_O=None) -> LoraWeights:
    """In the layout of a CPU."""
    return LoraWeights(a_rI.T.contiguous().T, b_Or.T.contiguous().T, mag_norm_scale_O=mag_norm_scale_O)


def engine_adapter(model, kind: str) -> EngineAdapter:
    """The adapter's parts, read from PEFT's own modules."""
    parts: dict[str, tuple] = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            mag_norm_scale = None
            if "default" in module.lora_magnitude_vector:
                scaled = module.scaling["default"] * b @ a
                norm = (module.base_layer.weight + scaled).norm(dim=1)
                mag_norm_scale = (module.lora_magnitude_vector["default"].weight / norm).detach()
            parts[name] = (lora(a.detach(), module.scaling["default"] * b.detach(), mag_norm_scale),)
        elif hasattr(module, "ia3_l") and "default" in module.ia3_l:
            parts[name] = (Ia3Part(module.ia3_l["default"].detach().flatten(), module.is_feedforward),)
        elif hasattr(module, "modules_to_save") and "default" in module.modules_to_save:
            parts[name] = (ReplacedWeights(module.modules_to_save["default"].weight.detach()),)
    return EngineAdapter(kind, parts)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (4, 4, 4, 2, 2, 2), (3, 1, 2, 5, 1, 4), (30, 2, 40, 7, 1, 20)], ids=str)
@torch.no_grad()
def test_each_segment_matches_peft_with_that_adapter_alone(sizes, joined, processor):
    """Rows are independent here: every sequence has one token, so attention mixes nothing."""
    base = LLAMA.model().eval()
    adapters = {kind: peft_model(base, kind) for kind in KINDS}
    served, active = copy.deepcopy(base), ActiveAdapters()
    if joined:
        fuse_projections(served)
    install_lora_layers(served, active)
    ids = torch.randint(0, base.config.vocab_size, (sum(sizes) + 2, 1))  # the last two rows have no adapter
    segments, at = [], 0
    for (kind, model), size in zip(adapters.items(), sizes, strict=True):
        segments.append(AdapterSegment(engine_adapter(model, kind), at, at + size))
        at += size
    active.begin_batch(segments, segments)
    found = served(ids).logits
    for segment, model in zip(segments, adapters.values(), strict=True):
        expected = model(ids[segment.start : segment.end]).logits
        torch.testing.assert_close(found[segment.start : segment.end], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[at:], base(ids[at:]).logits, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_without_adapters_there_are_no_ops():
    base = LLAMA.model().eval()
    served, active = copy.deepcopy(base), ActiveAdapters()
    install_lora_layers(served, active)
    active.begin_batch((), ())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(served(ids).logits, base(ids).logits)
    single = served.get_submodule("model.layers.0.self_attn.q_proj").symbiosis_single
    assert active.ops_at(single, is_head=False) is None


@torch.no_grad()
def test_adapters_of_different_ranks_on_different_layers(processor):
    torch.manual_seed(0)
    fused = FusedProjection(["q", "k", "v"], [8, 4, 4], torch.randn(16, 6), None)
    ranks = ({"q": 2, "k": 3}, {"q": 5, "v": 1}, {"q": 2}, {"k": 3, "q": 4})  # no adapter has all layers
    adapters = [
        EngineAdapter(
            str(number), {path: (lora(torch.randn(r, 6), torch.randn(8 if path == "q" else 4, r)),) for path, r in of.items()}
        )
        for number, of in enumerate(ranks)
    ]
    segments = [AdapterSegment(adapter, 1 + 3 * number, 4 + 3 * number) for number, adapter in enumerate(adapters)]
    x_RI, y_RO = torch.randn(14, 6), torch.randn(14, 16)
    expected = y_RO.clone()
    for segment in segments:
        for path, (part,) in segment.adapter.parts.items():
            column = 4 * ["q", "", "k", "v"].index(path)
            change = x_RI[segment.start : segment.end] @ part.a_rI.T @ part.b_Or.T
            expected[segment.start : segment.end, column : column + change.shape[1]] += change
    active = ActiveAdapters()
    active.begin_batch(segments, segments)
    ops = active.ops_at(fused, is_head=False)
    assert (ops._cpu_batch is not None) == (processor == "compiled")
    ops.apply(x_RI, y_RO, None)
    torch.testing.assert_close(y_RO, expected)


@torch.no_grad()
def test_an_overflow_stays_in_its_segment(processor):
    fused = FusedProjection(["layer"], [8], torch.randn(8, 4), None)
    finite, overflowing = (
        EngineAdapter(name, {"layer": (lora(torch.full((2, 4), size), torch.randn(8, 2)),)})
        for name, size in (("finite", 1.0), ("overflowing", 3e38))
    )
    x, active = torch.ones(4, 4), ActiveAdapters()
    segments = [AdapterSegment(finite, 0, 2), AdapterSegment(overflowing, 2, 4)]
    active.begin_batch(segments, segments)
    ops, y = active.ops_at(fused, is_head=False), torch.zeros(4, 8)
    ops.apply(x, y, None)
    assert y[:2].isfinite().all()
    assert not y[2:].isfinite().all()
