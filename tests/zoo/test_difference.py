"""A low-rank difference computes the same in PEFT, in the multi-adapter engine, and merged."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from symbiosis.serving.engine import Engine
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.zoo.differences.difference import Difference, DifferenceFinder, EmbeddingForm, factorize
from symbiosis.zoo.differences.difference_adapter import merge_adapter, write_adapter
from tests.zoo.conftest import CONFIG, make_model

IDS = torch.arange(1, 13)[None]


def shake(model, size: float, names: str = ""):
    """A copy in which weights with one of these names are other ones; with a low-rank change of the embedding."""
    made = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if any(each in name for each in names.split()):
                if "embed" in name or "wte" in name:
                    weight.add_(size * torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1]))
                else:
                    weight.add_(size * torch.randn_like(weight))
    return made.eval()


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


def widths(**changes):
    return make_model(seed=3, initializer_range=0.2, **changes)


CASES = {
    "llama": (widths, "proj norm.", EmbeddingForm.BASE),
    "a tied embedding": (lambda: widths(tie_word_embeddings=True), "proj embed", EmbeddingForm.LOW_RANK),
    "an embedding with a head of its own": (widths, "proj embed lm_head", EmbeddingForm.LOW_RANK),
    "its own embedding": (widths, "proj embed lm_head", EmbeddingForm.WHOLE),
    "its own embedding, tied": (lambda: widths(tie_word_embeddings=True), "proj embed", EmbeddingForm.WHOLE),
    "biases": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**CONFIG, tie_word_embeddings=True)).eval(), "proj norm.", EmbeddingForm.BASE,
    ),
    "norms of heads": (lambda: Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=8)).eval(), "proj", EmbeddingForm.BASE),
    "Conv1D": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=64)).eval(),
        "c_attn c_proj c_fc", EmbeddingForm.BASE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_difference_of_full_rank_is_the_fine_tune_in_peft_in_the_engine_and_merged(case, tmp_path):
    make, names, form = CASES[case]
    base = make()
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(4)
    own = shake(base, 0.03, names)
    if "norm." in names:  # the last norm is in the head's block: no linear layer of the blocks reads it
        own.model.norm.load_state_dict(base.model.norm.state_dict())
    finder = DifferenceFinder(base, own, IDS.repeat(4, 1))
    assert form in list(finder.embedding_forms())
    difference = finder.at(100.0, form)
    with torch.inference_mode():
        chain = torch.func.functional_call(base, finder.weights(difference), (IDS,)).logits
    assert (logits(base) - logits(own)).abs().max() > 0.05
    torch.testing.assert_close(chain, logits(own), atol=0.02, rtol=0.02)  # its factors are rounded to bfloat16
    write_adapter(difference, finder.facts, "base", tmp_path)
    merged = copy.deepcopy(base)
    merge_adapter(merged, tmp_path)
    torch.testing.assert_close(logits(merged), chain, atol=1e-4, rtol=1e-4)
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    torch.testing.assert_close(logits(adapted), chain, atol=1e-4, rtol=1e-4)
    engine = Engine(copy.deepcopy(base), pages=64, page_size=4)
    engine.add_adapter("own", tmp_path)
    prompt, sampling = list(range(1, 13)), Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    (found,) = engine.generate([prompt], ["own"], sampling)
    for _ in range(6):
        with torch.inference_mode():
            prompt.append(int(merged(torch.tensor([prompt])).logits[0, -1].argmax()))
    assert found.tokens == prompt[12:]


def test_a_few_changed_rows_of_an_embedding_are_stored_as_rows(tmp_path):
    base = make_model(tie_word_embeddings=True)
    own = copy.deepcopy(base)
    with torch.no_grad():
        own.model.embed_tokens.weight[7] += 1.0
        own.model.embed_tokens.weight[60] -= 1.0
        own.model.layers[1].mlp.up_proj.weight += 0.1
    finder = DifferenceFinder(base, own, IDS.repeat(4, 1))
    assert list(finder.embedding_forms()) == [EmbeddingForm.BASE, EmbeddingForm.ROWS]
    difference = finder.at(1.0, EmbeddingForm.ROWS)
    assert difference.rows == (7, 60)
    assert list(difference.factors) == ["model.layers.1.mlp.up_proj"]
    write_adapter(difference, finder.facts, "base", tmp_path)
    merged = copy.deepcopy(base)
    merge_adapter(merged, tmp_path)
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    torch.testing.assert_close(logits(merged), logits(own), atol=0.02, rtol=0.02)
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (1100, 1030)])
def test_factors_are_the_best_of_their_rank(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape[0], 6) @ torch.randn(6, shape[1]) + 0.01 * torch.randn(shape)
    found = factorize(matrix, 6)
    expected = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(found.energies_r, expected[:6] ** 2, rtol=1e-3, atol=1e-3)
    residual = (matrix - found.left_Or @ found.right_rI).norm()
    assert residual <= 1.01 * (expected[6:] ** 2).sum().sqrt()


def test_equal_matrices_take_nothing():
    base = make_model()
    own = shake(base, 0.1, "layers.3.mlp")
    difference = DifferenceFinder(base, own, IDS.repeat(4, 1)).at(0.1, EmbeddingForm.BASE)
    assert {path.rpartition(".")[0] for path in difference.factors} == {"model.layers.3.mlp"}
    assert isinstance(difference, Difference)
    assert 0 < difference.parameters <= 0.1 * sum(each.numel() for each in base.parameters())
