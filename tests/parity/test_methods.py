"""Every PEFT method trains over a connected model as over the plain one."""

from __future__ import annotations

import pytest
import torch

from symbiosis.errors import WeightsWithheld
from tests.parity.architectures import ARCHITECTURES
from tests.parity.methods import METHODS, MORE
from tests.parity.pair import adapted, assert_same_training, connected, on_links, slow_but_every_third, twin

LLAMA = ARCHITECTURES[0]


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return LLAMA.batch(seed)


def check(method, link, **options):
    plain = LLAMA.model()
    before = {name: p.clone() for name, p in plain.named_parameters()}
    with connected(plain, link, **options) as model:
        expected, found = adapted(twin(plain), method.config).train(), adapted(model, method.config).train()
        assert_same_training(expected, found, task_batch(method))
        for peft_model in (expected, found):
            peft_model.eval()
        with torch.no_grad():
            logits = expected(**task_batch(method)()).logits
            torch.testing.assert_close(found(**task_batch(method)()).logits, logits, atol=1e-4, rtol=0)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, before[name]), f"the shared {name} has changed"


def task_batch(method):
    if method.name != "poly":
        return batch
    return lambda seed=0: {**batch(seed), "task_ids": torch.zeros(2, dtype=torch.long)}


@pytest.mark.parametrize(("method", "link"), on_links(METHODS, often=("lora", "dora", "ia3", "prefix", "boft")))
def test_gradients_and_training_are_those_of_plain_peft(method, link):
    check(method, link)


@pytest.mark.parametrize("method", slow_but_every_third(MORE))
def test_the_rest_of_peft_works_too(method):
    check(method, "inproc")


@pytest.mark.parametrize("method", slow_but_every_third([m for m in METHODS if not m.needs_weights]))
def test_most_methods_need_no_base_weight(method):
    check(method, "inproc", weights=False)


@pytest.mark.parametrize("method", [m for m in METHODS + MORE if m.needs_weights], ids=lambda m: m.name)
def test_a_method_that_needs_weights_the_provider_withholds_gets_an_error_that_names_it(method):
    def train(model):
        adapted(model, method.config).train()(**batch()).loss.backward()

    with connected(LLAMA.model(), "inproc", weights=False) as model:
        with pytest.raises(WeightsWithheld, match=r"PEFT's \w+ .*--no-weights"):
            train(model)
