"""The default model with every kind of adapter in shared batches: each chat matches transformers + PEFT alone.

Weights are small, so that adapters change the completion and it stays text. The two most likely tokens are nowhere so
close that the order of a sum decides.
"""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

from symbiosis.models.fuse_projections import fuse_projections
from symbiosis.models.loading import load_model_and_tokenizer, shared_copy
from symbiosis.serving.engine_core import EngineCore
from symbiosis.serving.scheduling.sequence import Sampling

NEW = 24
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TASK = {"task_type": "CAUSAL_LM"}
KINDS = {
    "rank 4": LoraConfig(r=4, lora_alpha=16, target_modules=ALL, **TASK),
    "rank 8": LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], **TASK),
    "rank 32": LoraConfig(r=32, lora_alpha=32, target_modules=ALL, **TASK),
    "dora": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_dora=True, **TASK),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "prefix": PrefixTuningConfig(num_virtual_tokens=8, **TASK),
    "head": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"], **TASK),
}
NOISE = {"rank 8": 0.05, "rank 32": 0.025, "dora": 0.05, "ia3": 0.1, "prefix": 0.1, "head": 0.01}
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea in winter, as a sailor would say it.",
    "How do I boil an egg?",
    "Name three planets and say which of them is the largest.",
    "Why is the sky blue during the day and red in the evening? Explain it to a child.",
    "Give me a name for a grey cat.",
    "Translate 'good morning' into Spanish.",
    "What should I pack for a week in the mountains?",
]


def adapted(base, kind):
    """PEFT's model around the very same weights."""
    torch.manual_seed(len(kind))
    model = get_peft_model(shared_copy(base), KINDS[kind]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = NOISE.get(kind, 0.02) * torch.randn_like(parameter)
                if kind == "prefix":
                    parameter.copy_(noise)
                elif kind == "ia3" or "magnitude" in name:
                    parameter.mul_(1 + noise)
                else:
                    parameter.add_(noise)
    return model


def complete(model, prompt):
    """Its greedy completion, and the least margin between the two most likely tokens."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    two = torch.stack([logits[0].topk(2).values for logits in found.logits])
    return found.sequences[0, len(prompt) :].tolist(), float((two[:, 0] - two[:, 1]).min())


def run(core):
    while not core.is_idle():
        num_steps = core.num_steps
        core.step()
        if core.num_steps == num_steps:
            core.wait(1.0)


@pytest.mark.slow
@pytest.mark.real
def test_chats_with_every_kind_of_adapter_match_peft_alone(real_cache, tmp_path):
    base, tokenizer = load_model_and_tokenizer(None, device=torch.device("cpu"), dtype=torch.float32)
    base.eval().requires_grad_(False)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]
    names = [None, *KINDS]
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        model = base if name is None else adapted(base, name)
        if name is not None:
            model.save_pretrained(tmp_path / name)
        tokens, margin = complete(model, prompt)
        assert margin > 1e-2, f"{name} says {tokenizer.decode(tokens)!r}: choose another seed, rounding might decide"
        expected.append(tokens)
        del model

    fuse_projections(base)
    core = EngineCore(base, pages=26, page_size=16)
    for name in KINDS:
        core.add_adapter(name, tmp_path / name)
    sampling = Sampling(temperature=0.0, max_tokens=NEW)
    first = []
    for name, prompt in zip(names, prompts, strict=True):  # each arrives while others decode
        first.append(core.add(prompt, sampling, adapter=name))
        core.step()
    run(core)
    assert any(request.preemptions for request in first)
    again = [core.add(prompt, sampling, adapter=name) for name, prompt in zip(names, prompts, strict=True)]
    plain = [core.add(prompt, sampling) for prompt in prompts[1:]]
    run(core)
    assert any(request.num_cached_tokens for request in again)
    for requests in (first, again):
        for name, request, tokens in zip(names, requests, expected, strict=True):
            assert tokenizer.decode(request.outputs) == tokenizer.decode(tokens), name
            assert request.outputs == tokens
    for name, request, tokens in zip(KINDS, plain, expected[1:], strict=True):
        assert request.outputs != tokens, f"{name} changed nothing"
