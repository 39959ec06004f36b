"""Logits and gradients of a tenant are as close to the plain model's as plain runs of another batch shape are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from tests.lora import with_random_lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LlamaConfig(
    vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
)
BATCH, TOKENS = 8, 96
_MAX_RATIO = 1.5


def adapted(model: Any) -> Any:
    return with_random_lora(model, ("q_proj", "v_proj", "o_proj"), r=8).to("cuda")


def results(model: Any, batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradients of the mean loss as one vector."""
    model.zero_grad()
    logits = []
    for ids in batches:
        out = model(input_ids=ids, labels=ids)
        (out.loss * len(ids) / BATCH).backward()
        logits.append(out.logits.detach().float())
    grads = [p.grad.float().flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    return torch.cat(logits), torch.cat(grads)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().mean() / expected.abs().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["direct", "executor"])
def test_as_close_as_plain_runs_of_another_batch_shape(mode: str, dtype: torch.dtype):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(CONFIG).to("cuda", dtype)
    ids = torch.randint(0, 1000, (BATCH, TOKENS), device="cuda")
    with symbiosis.Executor(plain, device="cuda") as executor:
        model = symbiosis.connect(executor, device="cuda", mode=mode)
        ours = results(adapted(model), [ids])
        model.symbiosis.close()
    reference = adapted(plain)
    together, one_by_one = results(reference, [ids]), results(reference, list(ids.split(1)))
    for name, our, same, other in zip(("logits", "gradients"), ours, together, one_by_one, strict=True):
        between_plain, to_us = distance(other, same), distance(our, same)
        print(f"{mode} {dtype} {name}: plain to plain {between_plain:.2e}, ours to plain {to_us:.2e}")
        assert between_plain > 0
        assert to_us <= _MAX_RATIO * between_plain, (name, to_us, between_plain)
