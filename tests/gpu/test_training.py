"""Packed training passes on a GPU: kernels and CUDA graphs against plain torch, session by session."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

from symbiosis import kernels
from symbiosis.device_sharing.gpu_partition import GpuPartition
from symbiosis.finetuning.adapters.adapter_factory import AdapterFactory
from symbiosis.finetuning.config import TrainerConfig
from symbiosis.finetuning.optimizer import StepSettings
from symbiosis.finetuning.packed.model import PackedModel
from symbiosis.finetuning.trainer import Trainer
from tests.conftest import tiny_config
from tests.finetuning.peft_reference import examples, max_relative_error, slice_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = [
    LoraConfig(r=8, target_modules=ALL[:4], init_lora_weights=False, task_type="CAUSAL_LM"),
    LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM"),
    LoraConfig(r=24, lora_alpha=48, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"),
    LoraConfig(r=4, target_modules=ALL, use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"),
]
LENGTHS = {"alike": [(64, 64)] * 4, "different": [(40, 70), (9,), (130, 33, 5), (20,)]}


def model_in(dtype):
    torch.manual_seed(3)
    config = tiny_config(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def slices_of(model, lengths, configs=CONFIGS, hidden=1):
    factory = AdapterFactory(model)
    return [
        slice_of(factory.create(config, seed=7 + at), examples(*some, hidden=hidden), divisor=9.0)
        for at, (config, some) in enumerate(zip(configs, lengths, strict=False))
    ]


def graphs_of(packed):
    return sum(len(kept.graphs) for kept in packed._graphs._streams.values())


def assert_close(found, expected, close):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.is_finite
        assert mine.losses == pytest.approx(theirs.losses, rel=close)
        assert max_relative_error(dict(mine.gradients), dict(theirs.gradients)) < 5 * close


def run_loop(model, lengths, monkeypatch, configs=CONFIGS, hidden=1):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "run_on", lambda device: False)
        return PackedModel(model).compute(slices_of(model, lengths, configs, hidden))


@pytest.mark.parametrize("hidden", [1, 20])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_kernels_equal_the_loop_over_sessions(lengths, dtype, close, hidden, monkeypatch):
    model = model_in(dtype)
    found = PackedModel(model).compute(slices_of(model, LENGTHS[lengths], hidden=hidden))
    assert_close(found, run_loop(model, LENGTHS[lengths], monkeypatch, hidden=hidden), close)


@pytest.mark.parametrize("hidden", [1, 20])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_graphs_equal_the_kernels(lengths, hidden, monkeypatch):
    model = model_in(torch.bfloat16)
    packed = PackedModel(model, graphs=2)
    for number in range(5):
        slices = slices_of(model, LENGTHS[lengths], CONFIGS[:3], hidden)  # new tensors each time
        found = packed.compute(slices)
        assert graphs_of(packed) == (number >= 2)
    assert_close(found, run_loop(model, LENGTHS[lengths], monkeypatch, CONFIGS[:3], hidden), 2e-2)
    other = slices_of(
        model, [(41, 69), (8,), (129, 34, 5)] if lengths == "different" else LENGTHS["alike"], CONFIGS[:3], hidden
    )
    again = packed.compute(other)
    assert graphs_of(packed) == 1
    plain = PackedModel(model).compute(other)
    assert_close(again, plain, 2e-2)


LARGE, SMALLER = [(512,) * 8] * 3, [[(512,) * 8] * 2, [(512,) * 8], [(512,) * 5] * 3]


@pytest.mark.parametrize("apart", [False, True], ids=["default stream", "a stream of its own"])
def test_eager_passes_reuse_the_memory_of_graphs(apart):
    model = model_in(torch.bfloat16)
    packed, plain = PackedModel(model, graphs=4), PackedModel(model)
    expected = {len(lengths): plain.compute(slices_of(model, lengths, CONFIGS[:3])) for lengths in SMALLER[:2]}
    plain.trim()
    with torch.cuda.stream(torch.cuda.Stream() if apart else torch.cuda.default_stream()):
        for _ in range(4):
            packed.compute(slices_of(model, LARGE, CONFIGS[:3]))
        assert graphs_of(packed) == 1
        before = torch.cuda.memory_reserved()
        large = packed.compute(slices_of(model, LARGE, CONFIGS[:3]))
        found = {len(lengths): packed.compute(slices_of(model, lengths, CONFIGS[:3])) for lengths in SMALLER}
        again = packed.compute(slices_of(model, LARGE, CONFIGS[:3]))
    assert graphs_of(packed) == 1
    assert torch.cuda.memory_reserved() < 1.25 * before
    for sessions, each in expected.items():
        assert_close(found[sessions], each, 2e-2)
    assert_close(again, large, 1e-6)


def test_a_larger_graph_replaces_the_memory_pool():
    model = model_in(torch.bfloat16)
    packed = PackedModel(model, graphs=4)
    reserved = []
    for lengths, kept in [(SMALLER[1], 1), (SMALLER[0], 1), (LARGE, 1), (SMALLER[0], 2), (SMALLER[1], 3)]:
        for _ in range(4):
            packed.compute(slices_of(model, lengths, CONFIGS[:3]))
        assert graphs_of(packed) == kept
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[4] < 1.25 * reserved[2]


def test_tensors_that_a_model_caches_are_not_overwritten(monkeypatch, caplog):
    model = model_in(torch.bfloat16)
    packed = PackedModel(model, graphs=4)
    kept = {}
    plain = LlamaForCausalLM.forward

    def forward(self, *args, **named):
        rows = named["position_ids"].shape[1]
        if rows not in kept:
            kept[rows] = torch.full((1 << 20,), float(rows), device="cuda")
        return plain(self, *args, **named)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    for lengths in [LARGE, *SMALLER, LARGE]:
        for _ in range(4):
            packed.compute(slices_of(model, lengths, CONFIGS[:3]))
    assert len(kept) == 4
    for rows, values in kept.items():
        assert torch.equal(values, torch.full_like(values, rows))
    assert "stores results of training passes" in caplog.text


def test_the_two_most_recent_streams_keep_their_graphs():
    model = model_in(torch.bfloat16)
    packed, slices = PackedModel(model, graphs=2), slices_of(model, LENGTHS["alike"], CONFIGS[:3])
    whole, part, other = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()

    def compute(stream, times):
        with torch.cuda.stream(stream):
            for _ in range(times):
                packed.compute(slices)
            assert not packed.is_new
        return id(packed._graphs._streams[stream.cuda_stream])

    kept = compute(whole, 4)
    compute(part, 4)
    assert compute(whole, 1) == kept
    compute(other, 4)
    for _ in range(3):
        assert compute(whole, 1) == kept
        compute(other, 1)


@pytest.mark.parametrize("family", ["in float32", "with capped scores"])
def test_passes_that_depend_on_sequence_lengths_are_not_captured(family):
    """A replay would use the lengths of the captured pass."""
    if family == "in float32":
        model, close = model_in(torch.float32), 1e-4
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
        config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        model, close = Gemma2ForCausalLM(config).to("cuda", torch.bfloat16).eval(), 2e-2
    packed, plain = PackedModel(model, graphs=2), PackedModel(model)
    for number in range(6):
        lengths = [(40 + number, 70 - number), (9,), (130 - number, 33, 5 + number)]
        slices = slices_of(model, lengths, CONFIGS[:2])
        assert_close(packed.compute(slices), plain.compute(slices), close)
    assert graphs_of(packed) == 0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_nan_does_not_reach_other_sessions(lengths):
    model = model_in(torch.bfloat16)
    packed = PackedModel(model, graphs=2)
    slices = slices_of(model, LENGTHS[lengths], CONFIGS[:3])
    for _ in range(4):
        clean = packed.compute(slices)
    with torch.no_grad():
        for parameter in slices[1].adapter.parameters.values():
            parameter.fill_(float("nan"))
    found = packed.compute(slices)
    assert [each.is_finite for each in found] == [True, False, True]
    for at in (0, 2):
        assert found[at].losses == clean[at].losses
        assert all(torch.equal(found[at].gradients[name], g) for name, g in clean[at].gradients.items())


def test_steps_equal_plain_adamw(monkeypatch):
    model, data = model_in(torch.float32), examples(40, 40)
    ends = []
    for by_kernels in (True, False):
        with monkeypatch.context() as patch:
            if not by_kernels:
                patch.setattr(kernels, "run_on", lambda device: False)
            with Trainer(model, TrainerConfig(graphs=2 if by_kernels else 0)) as trainer:
                sessions = [trainer.open("ann", CONFIGS[0], seed=1), trainer.open("bob", CONFIGS[1], seed=2)]
                for _ in range(12):
                    futures = [s.forward_backward(data) for s in sessions]
                    steps = [s.optim_step(StepSettings(learning_rate=1e-3, weight_decay=0.1)) for s in sessions]
                    losses = [each.result(60).loss for each in futures]
                    assert all(each.result(60).gradient_norm > 0 for each in steps)
                ends.append((losses, [p.detach().clone() for s in sessions for p in s.adapter.parameters.values()]))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-3)
    for mine, theirs in zip(ends[0][1], ends[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("share_of_gpu", [1.0, 0.5])
def test_training_during_serving_equals_training_alone(share_of_gpu, tmp_path):
    """Passes move from the whole GPU to a partition and back, with graphs on both and checkpoints in between."""
    device = torch.device("cuda", 0)
    turns = GpuPartition(device, share_of_gpu)
    model, data, steps = model_in(torch.bfloat16), examples(40, 70), StepSettings(learning_rate=1e-2)
    losses = []
    for shared in (None, turns):
        with Trainer(model, TrainerConfig(max_rows=256), shared) as trainer:
            session = trainer.open("ann", CONFIGS[0], seed=7)
            found = []
            for number in range(16):
                if shared is not None and number % 8 >= 4:
                    with turns:  # the engine serves
                        torch.ones(64, 64, device=device).sum().item()
                else:
                    turns._step_ended = -float("inf")  # serving has ended
                found.append(session.forward_backward(data).result(60).loss)
                session.optim_step(steps).result(60)
                if number == 9:
                    session.save(tmp_path / str(len(losses)), optimizer=True).result(60)
                    session.load(tmp_path / str(len(losses))).result(60)
            losses.append(found)
    torch.cuda.set_stream(torch.cuda.default_stream(device))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[0][-1] < losses[0][0]
