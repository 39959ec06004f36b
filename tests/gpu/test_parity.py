"""An executor on a GPU, tenants on the GPU or the CPU: the plain model's results, within its own rounding."""

from __future__ import annotations

import pytest
import torch

import symbiosis
from tests.lora import random_lora
from tests.parity.architectures import ARCHITECTURES
from tests.parity.pair import LINKS, LISTEN, adapted, assert_same_gradients, gradients, twin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LLAMA = ARCHITECTURES[0]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_tenant_of_a_gpu_executor_gets_the_plain_models_results(link, device):
    plain = LLAMA.model()
    batch = LLAMA.batch()
    expected = adapted(twin(plain), random_lora)
    reference = gradients(expected, batch)
    logits = expected(**batch).logits
    with symbiosis.Executor(twin(plain), device="cuda") as executor:
        model = symbiosis.connect(executor if link == "inproc" else executor.listen(LISTEN[link]), device=device)
        found = adapted(model, random_lora).to(device)
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        torch.testing.assert_close(found(**on_device).logits.cpu(), logits, atol=1e-4, rtol=1e-4)
        ours = {name: grad.cpu() for name, grad in gradients(found, on_device).items()}
        assert_same_gradients(reference, ours, relative=1e-3)
        model.symbiosis.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_every_architecture_in_bfloat16_is_as_close_as_plain_runs_are_to_each_other(architecture):
    plain = architecture.model().to("cuda", torch.bfloat16)
    batch = {name: tensor.cuda() for name, tensor in architecture.batch().items()}
    with symbiosis.Executor(plain, device="cuda") as executor, torch.no_grad():
        model = symbiosis.connect(executor, device="cuda")
        expected, found = plain(**batch).logits.float(), model(**batch).logits.float()
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
        model.symbiosis.close()
