"""Every architecture decodes with a cache in host memory as with its own, or refuses in one line."""

from __future__ import annotations

import pytest
import torch

import symbiosis
from symbiosis.errors import CannotOffload
from tests.parity.architectures import ARCHITECTURES, MORE

REFUSED = {
    *("t5", "bart", "stablelm", "bloom", "falcon", "gptj", "gpt_neo", "mamba", "mamba2"),  # no attention interface
    *("deepseek_v3", "jetmoe", "gpt_oss", "llama4"),  # keys changed after they were stored, sinks, chunked attention
}
CASES = [each for each in (*ARCHITECTURES, *MORE) if each.generates]
QUICK = ("mamba", "deepseek_v3")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=() if each.name in QUICK else pytest.mark.slow, id=each.name) for each in CASES],
)
def test_same_completion_or_a_refusal(architecture):
    with symbiosis.Executor(architecture.model()) as executor:
        model = symbiosis.connect(executor)
        ids = architecture.batch(length=24)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        expected = model.generate(input_ids=ids, **options)
        if architecture.name in REFUSED:
            with pytest.raises(CannotOffload) as error:
                model.generate(input_ids=ids, kv="host", **options)
            assert "\n" not in str(error.value)
        else:
            found = model.generate(input_ids=ids, kv="host", kv_chunk_tokens=7, **options)
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=1e-3)
        again = model.generate(input_ids=ids, **options)
        assert torch.equal(again.sequences, expected.sequences)
        model.symbiosis.close()
