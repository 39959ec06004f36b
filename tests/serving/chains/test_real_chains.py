"""The default model and fine-tunes of it, in one engine."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.app.served_zoo import ServedZoo
from symbiosis.models.default_model import default_model_folder
from symbiosis.serving.scheduling.sequence import Sampling
from symbiosis.zoo.zoo import Zoo
from tests.serving.chains.chain_world import fine_tuned

PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea,"]
COUNT = 12


@pytest.mark.slow
@pytest.mark.real
def test_fine_tunes_of_the_default_model_say_what_transformers_says(real_cache, tmp_path):
    folder = default_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = [f".layers.{number}." for number in range(22, 30)]
    models = {"base": base, "mine": fine_tuned(base, *last, seed=1, scale=0.02)}
    zoo, expected = Zoo(tmp_path / "zoo", create=True), {}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        zoo.add(name, tmp_path / name)
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")
            made = model.generate(**ids, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, pad_token_id=0)
            expected[name, prompt] = made[0, ids["input_ids"].shape[1] :].tolist()
    with ServedZoo(tmp_path / "zoo") as served:
        assert served.bytes_held < 0.7 * 2 * sum(parameter.nbytes for parameter in base.parameters())
        engine = symbiosis.Engine(chains=served.chains, tokenizer=served.tokenizer())
        requests = list(expected)
        sampling = Sampling(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT)
        found = engine.generate([prompt for _, prompt in requests], None, sampling, [name for name, _ in requests])
        assert [each.tokens for each in found] == list(expected.values())
        assert found[0].tokens != found[len(PROMPTS)].tokens
