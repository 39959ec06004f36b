"""Adapters side by side in one pass against plain PEFT, each alone."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from symbiosis.adapters.parts import Ia3Part
from symbiosis.models.fuse_projections import join
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


def made(base, kind: str):
    torch.manual_seed(len(kind))
    model = get_peft_model(copy.deepcopy(base), copy.deepcopy(KINDS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3_l" in name or "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "magnitude" in name:
                parameter.mul_(1.2)
    return model


def low(a_rI, b_Or, mag_norm_scale_O=None) -> LoraWeights:
    """As it is loaded on a CPU."""
    return LoraWeights(a_rI.T.contiguous().T, b_Or.T.contiguous().T, mag_norm_scale_O=mag_norm_scale_O)


def loaded(model, kind: str) -> EngineAdapter:
    """The adapter's parts, read from PEFT's own modules."""
    parts: dict[str, tuple] = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            stretch = None
            if "default" in module.lora_magnitude_vector:
                scaled = module.scaling["default"] * b @ a
                norm = (module.base_layer.weight + scaled).norm(dim=1)
                stretch = (module.lora_magnitude_vector["default"].weight / norm).detach()
            parts[name] = (low(a.detach(), module.scaling["default"] * b.detach(), stretch),)
        elif hasattr(module, "ia3_l") and "default" in module.ia3_l:
            parts[name] = (Ia3Part(module.ia3_l["default"].detach().pack(), module.is_feedforward),)
        elif hasattr(module, "modules_to_save") and "default" in module.modules_to_save:
            parts[name] = (ReplacedWeights(module.modules_to_save["default"].weight.detach()),)
    return EngineAdapter(kind, parts)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (4, 4, 4, 2, 2, 2), (3, 1, 2, 5, 1, 4), (30, 2, 40, 7, 1, 20)], ids=str)
@torch.no_grad()
def test_every_adapters_rows_are_computed_as_if_it_were_alone(sizes, joined, processor):
    """Rows are independent here: every sequence has one token, so attention mixes nothing."""
    base = LLAMA.model().eval()
    adapters = {kind: made(base, kind) for kind in KINDS}
    served, bank = copy.deepcopy(base), ActiveAdapters()
    if joined:
        join(served)
    install_lora_layers(served, bank)
    ids = torch.randint(0, base.config.vocab_size, (sum(sizes) + 2, 1))  # two rows of nobody's at the end
    segments, at = [], 0
    for (kind, model), size in zip(adapters.items(), sizes, strict=True):
        segments.append(AdapterSegment(loaded(model, kind), at, at + size))
        at += size
    bank.begin_batch(segments, segments)
    found = served(ids).logits
    for segment, model in zip(segments, adapters.values(), strict=True):
        expected = model(ids[segment.start : segment.end]).logits
        torch.testing.assert_close(found[segment.start : segment.end], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[at:], base(ids[at:]).logits, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_without_adapters_nothing_is_done():
    base = LLAMA.model().eval()
    served, bank = copy.deepcopy(base), ActiveAdapters()
    install_lora_layers(served, bank)
    bank.begin_batch((), ())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(served(ids).logits, base(ids).logits)
    alone = served.get_submodule("model.layers.0.self_attn.q_proj").symbiosis_single
    assert bank.ops_at(alone, is_head=False) is None


@torch.no_grad()
def test_adapters_of_any_rank_on_some_of_the_layers(processor):
    torch.manual_seed(0)
    together = FusedProjection(["q", "k", "v"], [8, 4, 4], torch.randn(16, 6), None)
    ranks = ({"q": 2, "k": 3}, {"q": 5, "v": 1}, {"q": 2}, {"k": 3, "q": 4})  # nobody has all, one layer's are few
    adapters = [
        EngineAdapter(
            str(number), {path: (low(torch.randn(r, 6), torch.randn(8 if path == "q" else 4, r)),) for path, r in of.items()}
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
    bank = ActiveAdapters()
    bank.begin_batch(segments, segments)
    effect = bank.ops_at(together, is_head=False)
    assert (effect._cpu_batch is not None) == (processor == "compiled")
    effect.apply(x_RI, y_RO, None)
    torch.testing.assert_close(y_RO, expected)


@torch.no_grad()
def test_what_overflows_in_one_adapter_stays_there(processor):
    together = FusedProjection(["layer"], [8], torch.randn(8, 4), None)
    calm, wild = (
        EngineAdapter(name, {"layer": (low(torch.full((2, 4), size), torch.randn(8, 2)),)})
        for name, size in (("calm", 1.0), ("wild", 3e38))
    )
    x, bank = torch.ones(4, 4), ActiveAdapters()
    segments = [AdapterSegment(calm, 0, 2), AdapterSegment(wild, 2, 4)]
    bank.begin_batch(segments, segments)
    effect, y = bank.ops_at(together, is_head=False), torch.zeros(4, 8)
    effect.apply(x, y, None)
    assert y[:2].isfinite().all()
    assert not y[2:].isfinite().all()
