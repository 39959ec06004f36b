"""Tenants whose part has another dtype than the executor: rows are converted on their way."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.errors import DirectRefused, SymbiosisError
from tests.parity.pair import LINKS, LISTEN

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CASES = [(base, own, "inproc") for base in DTYPES[:2] for own in DTYPES]
CASES += [(torch.bfloat16, torch.float32, link) for link in LINKS[1:]]


@pytest.mark.parametrize(("base", "own", "link"), CASES, ids=str)
def test_forward_backward_and_generate(tiny, ids, base, own, link):
    plain = copy.deepcopy(tiny)
    with symbiosis.Executor(copy.deepcopy(tiny), dtype=base) as executor:
        model = symbiosis.connect(executor if link == "inproc" else executor.listen(LISTEN[link]), dtype=own)
        assert model.dtype is own
        assert model.get_input_embeddings().weight.dtype is own
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        found = adapted(input_ids=ids, labels=ids)
        assert found.logits.dtype is own
        exact = base is own is torch.float32
        torch.testing.assert_close(found.logits.float(), plain(ids).logits, rtol=0, atol=1e-5 if exact else 0.05)
        found.loss.backward()
        grads = [p.grad for p in adapted.parameters() if p.grad is not None]
        assert grads
        assert all(grad.isfinite().all() for grad in grads)
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
            hosted = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, kv="host")
        assert tokens.shape == hosted.shape == (2, ids.shape[1] + 4)
        model.symbiosis.close()


def test_direct_mode_keeps_the_executors_dtype(tiny):
    with symbiosis.Executor(copy.deepcopy(tiny)) as executor:
        with pytest.raises(DirectRefused, match="float32"):
            symbiosis.connect(executor, dtype="bfloat16", mode="direct")
        model = symbiosis.connect(executor, dtype="float32", mode="direct")
        assert model.dtype is torch.float32
        with pytest.raises(SymbiosisError, match="dtype"):
            symbiosis.connect(executor, dtype="int8")
