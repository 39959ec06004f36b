"""Kernels, joined layers and CUDA graphs against the plain way. Without a GPU: TRITON_INTERPRET=1, with triton installed."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from symbiosis.models.fuse_projections import find_fused_projections, fuse_projections
from symbiosis.serving.engine import Engine
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling
from tests.parity.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES[0]
BY_NAME = {a.name: a for a in ARCHITECTURES}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ON_GPU = torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(
    not ON_GPU and "TRITON_INTERPRET" not in os.environ, reason="needs a CUDA device or Triton's interpreter"
)
DEVICE = "cuda" if ON_GPU else "cpu"


def test_joined_layers_are_views_of_one_matrix_and_compute_the_same():
    model, ids = LLAMA.model().eval(), torch.arange(9)[None]
    plain = copy.deepcopy(model)
    fuse_projections(model)
    attention = model.get_submodule("model.layers.0.self_attn")
    assert find_fused_projections(attention) == [("q_proj", "k_proj", "v_proj")]
    assert find_fused_projections(model.get_submodule("model.layers.0.mlp")) == [("gate_proj", "up_proj")]
    assert find_fused_projections(plain.get_submodule("model.layers.0.mlp")) == []
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_an_engine_over_joined_layers_gives_the_same_tokens(tmp_path):
    base = LLAMA.model().eval()
    joined = copy.deepcopy(base)
    fuse_projections(joined)
    configs = {
        "lora": LoraConfig(r=3, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM"),
        "dora": LoraConfig(r=2, target_modules=["k_proj", "up_proj"], use_dora=True, init_lora_weights=False),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "up_proj"], feedforward_modules=["up_proj"]),
    }
    engines = Engine(copy.deepcopy(base)), Engine(joined)
    for number, (name, config) in enumerate(configs.items()):
        torch.manual_seed(number)
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / name)
        for engine in engines:
            engine.add_adapter(name, tmp_path / name)
    names = [None, *configs, "lora", "ia3"]
    prompts = [list(range(1, 4 + number)) for number in range(len(names))]
    wish = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected, found = (engine.generate(prompts, names, wish) for engine in engines)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


@needs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("architecture", [LLAMA, BY_NAME["gemma2"]] if "gemma2" in BY_NAME else [LLAMA], ids=lambda a: a.name)
@pytest.mark.parametrize("times", [1, 5], ids=["few", "many"])
def test_a_pass_that_decodes_as_a_graph_gives_the_logits_of_the_usual_way(times, architecture, tmp_path):
    base = architecture.model().eval().to(DEVICE)
    fuse_projections(base)
    for number, rank in enumerate((2, 16, 40)):
        torch.manual_seed(number)
        targets = ALL if number else ["q_proj", "down_proj"]
        options = {"init_lora_weights": False, "use_dora": number == 1, "task_type": "CAUSAL_LM"}
        config = LoraConfig(r=rank, target_modules=targets, **options)
        get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / f"a{number}")
    core = EngineCore(base, pages=128, page_size=16)
    for number in range(3):
        core.add_adapter(f"a{number}", tmp_path / f"a{number}")
    names = [None, "a0", "a0", "a1", "a2", "a2", None] * times
    wish = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    for length, name in enumerate(names, 3):
        core.add(list(range(1, length)), wish, adapter=name)
    runner, compared = core._runner, 0
    compute = core._async_decoder.compute

    def both(made, adapters):
        nonlocal compared
        found = compute(made, adapters).clone()
        graphs = runner._decode_graphs, runner._prefill_graphs
        runner._decode_graphs = runner._prefill_graphs = None
        plain = runner.compute(made, adapters)
        runner._decode_graphs, runner._prefill_graphs = graphs
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
        compared += all(chunk.count == 1 for chunk in made.chunks)
        return found

    core._async_decoder.compute = both
    while not core.is_idle():
        passes = core.num_steps
        core.step()
        if core.num_steps == passes:
            core.wait(1.0)
    assert compared >= 5
    assert runner._decode_graphs._graphs, "no graph was made"


@needs_kernels
@pytest.mark.gpu
def test_graphs_of_larger_ranks_take_the_place_of_others(tmp_path):
    base = LLAMA.model().eval().to(DEVICE)
    fuse_projections(base)
    core, wish = (
        EngineCore(copy.deepcopy(base), pages=16, page_size=16),
        Sampling(temperature=0.0, max_tokens=4, ignore_eos=True),
    )
    for rank in (8, 40):  # all rows have an adapter: no other graph keeps the shared memory
        config = LoraConfig(r=rank, target_modules=ALL, init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / str(rank))
        core.add_adapter(str(rank), tmp_path / str(rank))
        core.add([1, 2, 3], wish, adapter=str(rank))
        while not core.is_idle():
            passes = core.num_steps
            core.step()
            if core.num_steps == passes:
                core.wait(1.0)
    decoder = core._runner._decode_graphs
    assert not decoder._graphs.rejected
    assert [rank for _, rank, _ in decoder._graphs] == [64]
